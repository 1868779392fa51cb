"""Private names of DistributedDataParallel: which parameters its reducer sums together, and its hooks.

Whatever is missing here is an obstacle that `ckpt/state/ddp.py` names; models and optimizers are saved and loaded all
the same.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import nn

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
PYTHON = _name(f"{_DDP}._use_python_reducer", "whether DDP is compiled into the backward pass")
BUCKETS = _name("torch.distributed.Reducer._get_zeros_like_grad_buckets", "which parameters are in which bucket")
STATIC = _name("torch.distributed.Reducer._set_static_graph", "the same for static_graph=True")


def hooks_of(wrapper: Wrapper) -> list[tuple[Any, Any]]:
    """The communication hooks of a wrapper, each with its state."""
    return list(HOOKS.of(wrapper, ()))


def obstacle(wrapper: Wrapper) -> str | None:
    """Why a wrapper cannot be given the buckets of another process. The same on every rank."""
    reducer = getattr(wrapper, "reducer", None)
    if reducer is None:
        return "DDP has delay_all_reduce_named_params for all parameters"
    absent = [name for name in (REBUILT, PYTHON) if not hasattr(wrapper, name.name)]
    absent += [name for name in (BUCKETS, STATIC) if not hasattr(reducer, name.name)]
    if absent:
        return f"this DDP has no {', '.join(name.name for name in absent)}"
    if PYTHON.of(wrapper):
        return "DDP is compiled into the backward pass"
    if wrapper.mixed_precision is not None:
        return "DDP has mixed_precision"
    return None


def has_rebuilt(wrapper: Wrapper) -> bool:
    """Whether DDP has laid out its buckets in the order in which gradients arrive."""
    return bool(REBUILT.of(wrapper, False))


def summed_parameters(wrapper: Wrapper) -> dict[str, nn.Parameter]:
    """The parameters whose gradients are summed, by name, in the reducer's order."""
    named, ignored = wrapper.module.named_parameters(), wrapper.parameters_to_ignore
    kept = {name: value for name, value in named if value.requires_grad}
    return {name: value for name, value in kept.items() if (name if "." in name else f".{name}") not in ignored}


def layout_of(wrapper: Wrapper) -> Layout:
    """The parameters in each bucket, by their numbers. For a moment it takes as much memory as all gradients do."""
    numbers = {id(parameter): number for number, parameter in enumerate(summed_parameters(wrapper).values())}
    found = BUCKETS.of(wrapper.reducer)()
    return tuple(tuple(numbers[id(parameter)] for parameter in bucket.parameters()) for bucket in found)


def lay_out(wrapper: Wrapper, layout: Layout) -> None:
    """Give a wrapper another reducer, with these buckets. The old one leaves the backward pass when it is freed."""
    torch_distributed: Any = dist  # has both classes, and does not list them
    named, hooks = summed_parameters(wrapper), hooks_of(wrapper)
    first = {} if wrapper.bucket_bytes_cap_default else {"first_bucket_bytes_cap": wrapper.bucket_bytes_cap}
    reducer = torch_distributed.Reducer(
        list(named.values()),
        [list(bucket) for bucket in layout],
        [sys.maxsize] * len(layout),
        wrapper.process_group,
        expect_sparse_gradients=_are_sparse(wrapper.module, named),
        param_to_name_mapping=dict(enumerate(named)),
        **first,
        **{name: getattr(wrapper, name) for name in _OPTIONS if hasattr(wrapper, name)},
    )
    logger = torch_distributed.Logger(reducer)
    reducer.set_logger(logger)
    batch_norm = any(isinstance(module, nn.SyncBatchNorm) for module in wrapper.module.modules())
    logger.set_construction_data_and_log(
        type(wrapper.module).__name__,
        wrapper.device_ids or [],
        -1 if wrapper.output_device is None else wrapper.output_device,
        wrapper.broadcast_buffers,
        batch_norm,
        wrapper.static_graph,
    )
    wrapper.reducer, wrapper.logger = reducer, logger
    setattr(wrapper, REBUILT.name, False)
    if wrapper.static_graph:
        STATIC.of(reducer)()
        STATIC.of(logger)()
    setattr(wrapper, HOOKS.name, [])
    for hook, state in hooks:
        wrapper.register_comm_hook(state, hook)


# of the reducer, as the wrapper was given them; some releases do not have all
_OPTIONS = (
    "bucket_bytes_cap", "bucket_bytes_cap_list", "find_unused_parameters", "gradient_as_bucket_view",
    "skip_all_reduce_unused_params", "batched_grad_copy",
)  # fmt: skip


def _are_sparse(module: nn.Module, names: dict[str, Any]) -> list[bool]:
    """Whether each parameter has sparse gradients."""
    owners = (module.get_submodule(name.rpartition(".")[0]) for name in names)
    return [isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse for owner in owners]
