"""The buckets in which DistributedDataParallel sums gradients.

A new process begins with one bucket, and lays buckets out in the order in which gradients arrive after its first step.
In another bucket a sum over three ranks and more is rounded in another way, and hooks that compress gradients by bucket
compress others: a resumed run has the buckets of the saved one from its first step on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt.formats.damage import reason
from ckpt.state.unwrap import clean_names, kinds_in, modules_in

Wrapper = Any  # a DistributedDataParallel: its reducer is not part of its typed, public side

_ANY_ORDER = 2  # ranks: the sum of so many numbers does not depend on their order


@dataclass(frozen=True)
class Buckets:
    """The parameters in each bucket, by their numbers, and a digest of all parameters that are summed, in order."""

    layout: tuple[tuple[int, ...], ...]
    parameters: str

    def as_json(self) -> dict[str, Any]:
        return {"layout": [_runs(bucket) for bucket in self.layout], "parameters": self.parameters}


_known: WeakKeyDictionary[nn.Module, tuple[int, bool, Buckets]] = WeakKeyDictionary()
_restored: WeakKeyDictionary[nn.Module, Buckets] = WeakKeyDictionary()


def ddp_wrappers(models: Mapping[str, nn.Module]) -> dict[str, Wrapper]:
    """The DDP wrappers in models, by the model's key and their number in it."""
    found: dict[str, Wrapper] = {}
    for key, model in models.items():
        if any(isinstance(module, DistributedDataParallel) for module in kinds_in(model)):
            wrappers = (module for module in modules_in(model) if isinstance(module, DistributedDataParallel))
            found |= {f"{key}/{number}": wrapper for number, wrapper in enumerate(wrappers)}
    return found


def decide_sums(wrapper: Wrapper) -> bool:
    """Whether gradients depend on their buckets: a hook may do anything with them."""
    return dist.get_world_size(wrapper.process_group) > _ANY_ORDER or bool(hooks_of(wrapper))


def hooks_of(wrapper: Wrapper) -> list[tuple[Any, Any]]:
    """The communication hooks of a wrapper, each with its state."""
    return list(getattr(wrapper, "_comm_hooks", ()))


def buckets_of(wrapper: Wrapper) -> Buckets:
    """The buckets that the next backward pass uses, if no forward pass lays them out anew before."""
    moment = (id(wrapper.reducer), wrapper._has_rebuilt_buckets)
    known = _known.get(wrapper)
    if known is None or known[:2] != moment:
        _known[wrapper] = known = (*moment, _read(wrapper))
    return known[2]


def about_to_change(wrapper: Wrapper) -> bool:
    """Whether the next forward pass lays the buckets out anew, in a way that is not known yet."""
    rebuilds = wrapper.static_graph or not wrapper.find_unused_parameters
    if not rebuilds or wrapper._has_rebuilt_buckets or _restored.get(wrapper) == buckets_of(wrapper):
        return False
    return any(wrapper.reducer.get_backward_stats())


def saved_buckets(wrapper: Wrapper, saved: Any) -> Buckets | None:
    """The buckets in a checkpoint; none if they are not buckets of this wrapper's parameters."""
    digest = buckets_of(wrapper).parameters
    if not isinstance(saved, Mapping) or saved.get("parameters") != digest:
        return None
    number = sum(map(len, buckets_of(wrapper).layout))
    layout = _layout(saved.get("layout"), number)
    return None if layout is None else Buckets(layout, digest)


def obstacle(wrapper: Wrapper) -> str | None:
    """Why a wrapper cannot be given the buckets of another process. The same on every rank."""
    try:
        buckets_of(wrapper)
        return _unusual(wrapper)
    except Exception as error:  # DDP's private side may change, and a save must not fail for it
        return f"DDP does not tell its buckets ({reason(error)})"


def _unusual(wrapper: Wrapper) -> str | None:
    if wrapper._use_python_reducer:
        return "DDP is compiled into the backward pass"
    if wrapper.mixed_precision is not None:
        return "DDP has mixed_precision"
    if wrapper._delay_all_reduce_params:
        return "DDP has delay_all_reduce_named_params"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in wrapper._module_parameters):
        return "DDP steps optimizers in the backward pass"
    if not hooks_of(wrapper) and wrapper._get_ddp_logging_data().get("comm_hook"):
        return "DDP has a built-in communication hook"
    return None


def restore_buckets(wrapper: Wrapper, buckets: Buckets) -> bool:
    """Give a wrapper these buckets, with its hooks. Waits for no other rank. Returns whether it has them."""
    if buckets_of(wrapper) != buckets:
        _lay_out(wrapper, [list(bucket) for bucket in buckets.layout])
    _restored[wrapper] = buckets
    return buckets_of(wrapper) == buckets


def _lay_out(wrapper: Wrapper, layout: list[list[int]]) -> None:
    """Build the reducer anew, as DDP itself does when it is unpickled, with other buckets."""
    torch_distributed: Any = dist
    parameters, sparse = wrapper._build_params_for_reducer()
    before, by_size = wrapper.reducer, torch_distributed._compute_bucket_assignment_by_size

    def assigned(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if tensors is not parameters:
            return by_size(tensors, *args, **kwargs)
        return layout[::-1], [sys.maxsize] * len(layout)  # DDP reverses both

    torch_distributed._compute_bucket_assignment_by_size = assigned
    try:
        names = wrapper._build_debug_param_to_name_mapping(parameters)
        wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    finally:
        torch_distributed._compute_bucket_assignment_by_size = by_size
    before._remove_autograd_hooks()
    _known.pop(wrapper, None)
    wrapper._has_rebuilt_buckets = False
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    for hook, state in hooks_of(wrapper):
        wrapper.logger._set_comm_hook_name(hook.__qualname__)
        torch_distributed._register_comm_hook(wrapper.reducer, state, hook)


def _read(wrapper: Wrapper) -> Buckets:
    parameters, _ = wrapper._build_params_for_reducer()
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    with _WithoutZeros():  # type: ignore[no-untyped-call]
        found = wrapper.reducer._get_zeros_like_grad_buckets()
    layout = tuple(tuple(numbers[id(parameter)] for parameter in bucket.parameters()) for bucket in found)
    return Buckets(layout, _digest(wrapper.module, parameters))


class _WithoutZeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Buckets are described together with zeros as large as all gradients, which nobody looks at."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.zeros_like.default:
            return torch.empty(0)
        return func(*args, **(kwargs or {}))


def _digest(module: nn.Module, parameters: Iterable[torch.Tensor]) -> str:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    clean = clean_names(module, names.values())
    digest = xxhash.xxh3_128()
    for parameter in parameters:
        digest.update(f"{clean[names[id(parameter)]]} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    return digest.hexdigest()


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers as pairs of the first and the last of every run up or down: mostly one pair for a bucket."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and _continues(runs[-1], number):
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def _continues(run: list[int], number: int) -> bool:
    first, last = run
    step = number - last
    return abs(step) == 1 and (first == last or (last > first) == (step > 0))


def _layout(saved: Any, number: int) -> tuple[tuple[int, ...], ...] | None:
    """The layout that runs describe, if it has each of so many parameters once."""
    layout: list[tuple[int, ...]] = []
    seen: list[int] = []
    for runs in saved if isinstance(saved, list | tuple) else ():
        begin = len(seen)
        for run in runs if isinstance(runs, list | tuple) else ():
            if not _is_run(run, number) or len(seen) > number:
                return None
            first, last = run
            seen += range(first, last + 1) if first <= last else range(first, last - 1, -1)
        layout.append(tuple(seen[begin:]))
    is_whole = len(seen) == number == len(set(seen)) and all(layout)
    return tuple(layout) if is_whole else None


def _is_run(run: Any, number: int) -> bool:
    if not isinstance(run, list | tuple) or len(run) != 2:
        return False
    return all(isinstance(end, int) and not isinstance(end, bool) and 0 <= end < number for end in run)
