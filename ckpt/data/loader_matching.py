"""Recognises the loaders and the epoch variable of scripts that give them no name."""

from __future__ import annotations

import inspect
import sys
from types import FrameType

from ckpt.data.loader_info import Loader, size_of
from ckpt.state import samplers

_EPOCH_NAMES = ("epoch", "epoch_idx", "epoch_index", "epoch_number", "current_epoch", "cur_epoch", "ep", "_epoch")
_DEEPEST = 8  # frames above the loop that are searched for its variable
_PLUMBING = ("ckpt", "tqdm", "accelerate", "torch", "torchdata")


def description(loader: Loader) -> str:
    """A description by which the next run of the script recognises a loader without a name:
    `DataLoader of TensorDataset (80), RandomSampler`. The batch size is left out: it may change between runs.
    """
    reader = samplers.reader(loader)
    dataset = getattr(reader, "dataset", None)
    names_of_samplers = [type(sampler).__name__ for sampler in samplers.samplers(loader)]
    kinds = f"{type(loader).__name__} of {type(dataset).__name__}"
    return f"{kinds} ({size_of(dataset)}), {', '.join(names_of_samplers)}"


def skips_by_itself(loader: Loader) -> bool:
    """Whether a loader skips batches already: what `accelerate.skip_first_batches` returns."""
    names = (type(part).__name__ for part in (loader, *samplers.samplers(loader)))
    return any(name in ("SkipBatchSampler", "SkipDataLoader") for name in names)


def epoch_variable() -> int | None:
    """The value of the variable in which the calling loop counts its epochs, if one has a usual name."""
    frame: FrameType | None = sys._getframe(1)
    seen = 0
    while frame is not None and seen < _DEEPEST:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _PLUMBING:
            seen += 1
            counted = _counted(frame)
            if counted is not None:
                return counted
        frame = frame.f_back
    return None


def _counted(frame: FrameType) -> int | None:
    local = frame.f_locals
    value = next((local[name] for name in _EPOCH_NAMES if type(local.get(name)) is int), None)
    # Before Python 3.13 a function's frame keeps this copy of its variables, and with it the last batch: the script
    # would seem to hold that.
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(local, dict):
        local.clear()
    return value
