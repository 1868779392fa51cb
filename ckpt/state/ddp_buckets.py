"""The buckets in which DistributedDataParallel sums gradients.

A new process begins with one bucket, and lays buckets out in the order in which gradients arrive after its first step.
In another bucket a sum over three ranks and more is rounded in another way, and hooks that compress gradients by bucket
compress others: a resumed run has the buckets of the saved one from its first step on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt.compat import torch_ddp
from ckpt.compat.torch_ddp import Wrapper, has_rebuilt, hooks_of
from ckpt.formats.checks import reason
from ckpt.state.unwrap import clean_names, kinds_in, modules_in

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


def buckets_of(wrapper: Wrapper) -> Buckets:
    """The buckets that the next backward pass uses, if no forward pass lays them out anew before."""
    moment = (id(wrapper.reducer), has_rebuilt(wrapper))
    known = _known.get(wrapper)
    if known is None or known[:2] != moment:
        _known[wrapper] = known = (*moment, _read(wrapper))
    return known[2]


def about_to_change(wrapper: Wrapper) -> bool:
    """Whether the next forward pass lays the buckets out anew, in a way that is not known yet."""
    rebuilds = wrapper.static_graph or not wrapper.find_unused_parameters
    if not rebuilds or has_rebuilt(wrapper) or _restored.get(wrapper) == buckets_of(wrapper):
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
        found = torch_ddp.obstacle(wrapper)
        if found is None:
            buckets_of(wrapper)
        return found
    except Exception as error:  # DDP's private side may change, and a save must not fail for it
        return f"DDP does not tell its buckets ({reason(error)})"


def restore_buckets(wrapper: Wrapper, buckets: Buckets) -> bool:
    """Give a wrapper these buckets, with its hooks. Waits for no other rank. Returns whether it has them."""
    if buckets_of(wrapper) != buckets:
        torch_ddp.lay_out(wrapper, buckets.layout)
        _known.pop(wrapper, None)
    _restored[wrapper] = buckets
    return buckets_of(wrapper) == buckets


def _read(wrapper: Wrapper) -> Buckets:
    return Buckets(torch_ddp.layout_of(wrapper), _digest(wrapper.module, torch_ddp.summed_parameters(wrapper)))


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
