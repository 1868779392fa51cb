"""The state of torch's PowerSGD hook: what compression has left out so far, by bucket, and where it starts from."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ckpt.compat.torch_ddp import Wrapper, has_rebuilt
from ckpt.formats.checks import damage_reported
from ckpt.state import rng
from ckpt.state.ddp_buckets import Buckets, buckets_of
from ckpt.state.parts import SavedTensor

_log = logging.getLogger("ckpt")

# what the tensors depend on; the other options may be changed for a resume
_OPTIONS = (
    "matrix_approximation_rank", "min_compression_rate", "use_error_feedback", "warm_start",
    "batch_tensors_with_same_shape",
)  # fmt: skip
_COUNTERS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")
_TENSORS = ("error_dict", "p_memory_dict", "q_memory_dict")


def is_power_sgd(state: Any) -> bool:
    """Whether this is a PowerSGDState. Imports nothing: a live one has imported its module."""
    hooks = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    return hooks is not None and isinstance(state, hooks.PowerSGDState)


def captured(state: Any, hook: Any) -> dict[str, Any]:
    """The state of a hook as a tree of values and live tensors."""
    return {
        "hook": hook.__qualname__,
        "options": _options(state),
        "counters": {name: getattr(state, name) for name in _COUNTERS},
        "rng": rng.capture_one(state.rng),
        **{name: {str(bucket): tensor for bucket, tensor in getattr(state, name).items()} for name in _TENSORS},
    }


def misfit(state: Any, hook: Any, saved: Any, number: int) -> str | None:
    """Why a saved state, whose tensors have not been read, does not fit a hook over so many buckets."""
    if not isinstance(saved, Mapping) or saved.get("hook") != hook.__qualname__:
        return "saved with another communication hook"
    options = saved.get("options")
    changed = [
        name
        for name, value in _options(state).items()
        if not isinstance(options, Mapping) or options.get(name) != value
    ]
    if changed:
        return f"saved with another {', '.join(changed)}"
    tensors = [saved.get(name) for name in _TENSORS]
    known = set(map(str, range(number)))
    if not all(isinstance(found, Mapping) and found.keys() <= known for found in tensors):
        return "saved with other buckets"
    kept = [tensor for found in tensors if isinstance(found, Mapping) for tensor in found.values()]
    return None if all(isinstance(tensor, SavedTensor) for tensor in kept) else "saved without its tensors"


def restore(state: Any, saved: Mapping[str, Any], wrapper: Wrapper) -> None:
    """Set the state of a hook. The wrapper has the buckets that it was saved with."""
    with damage_reported("what was saved of a communication hook", "state of PowerSGD"):
        rng.check_one(state.rng, saved["rng"])
        counters = {name: int(saved["counters"][name]) for name in _COUNTERS}
    rng.restore_one(state.rng, saved["rng"])
    for name, value in counters.items():
        setattr(state, name, value)
    device = next(wrapper.module.parameters()).device
    for name in _TENSORS:
        tensors = {int(bucket): tensor.to(device) for bucket, tensor in saved[name].items()}
        getattr(state, name).clear()
        getattr(state, name).update(tensors)
    if wrapper.static_graph or not wrapper.find_unused_parameters:
        _watch(state, wrapper, buckets_of(wrapper))


def _watch(state: Any, wrapper: Wrapper, buckets: Buckets) -> None:
    """After its first step, DDP lays buckets out by the order in which gradients came: mostly the same as before."""

    def check(*_: Any) -> None:
        if not has_rebuilt(wrapper) or not torch.is_grad_enabled():
            return
        handle.remove()
        if buckets_of(wrapper) != buckets:
            for name in _TENSORS:
                getattr(state, name).clear()
            _log.warning(
                "PowerSGD begins its error feedback anew: gradients arrived in another order than in the run that "
                "was saved, and DDP has laid out other buckets."
            )

    handle = wrapper.register_forward_hook(check)


def _options(state: Any) -> dict[str, Any]:
    return {name: getattr(state, name) for name in _OPTIONS}
