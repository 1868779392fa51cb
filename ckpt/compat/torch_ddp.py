"""Private names of DistributedDataParallel: which parameters its reducer sums together, and another reducer for it.

Whatever is missing here is an obstacle that `ckpt/state/ddp_buckets.py` names; models and optimizers are saved and
loaded all the same.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from ckpt.compat.private import Private

Wrapper = Any  # a DistributedDataParallel: its reducer is not part of its typed, public side
Layout = tuple[tuple[int, ...], ...]  # the parameters in each bucket, by their numbers

_DDP = "torch.nn.parallel.DistributedDataParallel"
_FIRST_STEP = "DDP sums gradients in other buckets in the first step after a resume, which may round in another way."


def _name(path: str, use: str, without: str = _FIRST_STEP) -> Private:
    return Private(path, since="2.8", use=use, without=without)


HOOKS = _name(
    f"{_DDP}._comm_hooks",
    "the communication hooks, which may have a state, and which may leave ranks with different gradients",
    "The state of DDP's communication hooks is not saved, and ranks are compared as if they had none.",
)
REBUILT = _name(f"{_DDP}._has_rebuilt_buckets", "whether the buckets are those of the first step")
SUMMED = _name(f"{_DDP}._build_params_for_reducer", "the parameters that are summed, in the reducer's order")
BUCKETS = _name("torch.distributed.Reducer._get_zeros_like_grad_buckets", "which parameters are in which bucket")
DISPATCH = _name("torch.utils._python_dispatch.TorchDispatchMode", "describes buckets without memory for all gradients")
ASSIGN = _name(
    "torch.distributed._compute_bucket_assignment_by_size", "builds a reducer with the buckets that were saved"
)
BUILD = _name(f"{_DDP}._ddp_init_helper", "builds a reducer, as DDP itself does when it is unpickled")
UNHOOK = _name("torch.distributed.Reducer._remove_autograd_hooks", "takes the reducer before out of the backward pass")
STATIC = _name("torch.distributed.Reducer._set_static_graph", "the same for static_graph=True")
PYTHON = _name(f"{_DDP}._use_python_reducer", "whether DDP is compiled into the backward pass")
DELAYED = _name(f"{_DDP}._delay_all_reduce_params", "whether DDP has delay_all_reduce_named_params")
LOGGED = _name(f"{_DDP}._get_ddp_logging_data", "whether DDP has a built-in communication hook")
_NEEDED = (REBUILT, SUMMED, BUILD, PYTHON, DELAYED, LOGGED)


def hooks_of(wrapper: Wrapper) -> list[tuple[Any, Any]]:
    """The communication hooks of a wrapper, each with its state."""
    return list(HOOKS.of(wrapper, ()))


def obstacle(wrapper: Wrapper) -> str | None:
    """Why a wrapper cannot be given the buckets of another process. The same on every rank."""
    absent = [name for name in _NEEDED if not hasattr(wrapper, name.name)]
    absent += [name for name in (BUCKETS, UNHOOK, STATIC) if not hasattr(wrapper.reducer, name.name)]
    absent += [name for name in (DISPATCH, ASSIGN) if name.imported() is None]
    if absent:
        return f"this DDP has no {', '.join(name.name for name in absent)}"
    if PYTHON.of(wrapper):
        return "DDP is compiled into the backward pass"
    if wrapper.mixed_precision is not None:
        return "DDP has mixed_precision"
    if DELAYED.of(wrapper):
        return "DDP has delay_all_reduce_named_params"
    if not hooks_of(wrapper) and LOGGED.of(wrapper)().get("comm_hook"):
        return "DDP has a built-in communication hook"
    return None


def has_rebuilt(wrapper: Wrapper) -> bool:
    """Whether DDP has laid out its buckets in the order in which gradients arrive."""
    return bool(REBUILT.of(wrapper, False))


def summed_parameters(wrapper: Wrapper) -> list[torch.Tensor]:
    """The parameters whose gradients are summed, in the reducer's order."""
    parameters: list[torch.Tensor] = SUMMED.of(wrapper)()[0]
    return parameters


def layout_of(wrapper: Wrapper) -> Layout:
    """The parameters in each bucket, by their numbers."""
    numbers = {id(parameter): number for number, parameter in enumerate(summed_parameters(wrapper))}
    with _without_zeros():
        found = BUCKETS.of(wrapper.reducer)()
    return tuple(tuple(numbers[id(parameter)] for parameter in bucket.parameters()) for bucket in found)


def lay_out(wrapper: Wrapper, layout: Layout) -> None:
    """Build the reducer anew, as DDP itself does when it is unpickled, with other buckets."""
    torch_distributed: Any = dist
    parameters, sparse = SUMMED.of(wrapper)()
    before, by_size, hooks = wrapper.reducer, ASSIGN.of(dist), hooks_of(wrapper)

    def assigned(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if tensors is not parameters:
            return by_size(tensors, *args, **kwargs)
        return [list(bucket) for bucket in layout[::-1]], [sys.maxsize] * len(layout)  # DDP reverses both

    names = {id(parameter): name for name, parameter in wrapper.module.named_parameters()}
    setattr(torch_distributed, ASSIGN.name, assigned)
    try:
        BUILD.of(wrapper)(
            parameters, sparse, {at: names[id(one)] for at, one in enumerate(parameters)}, wrapper.static_graph
        )
    finally:
        setattr(torch_distributed, ASSIGN.name, by_size)
    UNHOOK.of(before)()
    setattr(wrapper, REBUILT.name, False)
    if wrapper.static_graph:
        STATIC.of(wrapper.reducer)()
        STATIC.of(wrapper.logger)()
    setattr(wrapper, HOOKS.name, [])
    for hook, state in hooks:
        wrapper.register_comm_hook(state, hook)


def _without_zeros() -> Any:
    """Buckets are described together with zeros as large as all gradients, which nobody looks at."""
    mode: Any = DISPATCH.imported()

    class WithoutZeros(mode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.zeros_like.default:
                return torch.empty(0)
            return func(*args, **(kwargs or {}))

    return WithoutZeros()
