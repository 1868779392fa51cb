"""Checkpoints of Lightning: one file of `torch.save` with the model, optimizers, schedulers and counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VERSION = "pytorch-lightning_version"
_WRITTEN_AS = "2.0.0"  # the version whose form is written; Lightning migrates what later ones changed
_TAKEN = ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", _VERSION)
_PRECISION = ("MixedPrecision", "MixedPrecisionPlugin", "native_amp_scaling_state")
_WHY = {
    "loops": "of the progress of Lightning's loops, the epoch and the steps are taken over",
    "callbacks": "state of Lightning's callbacks, which only they read",
    "hyper_parameters": "what your module was built with: give it again",
    "hparams_name": "what your module was built with: give it again",
    "datamodule_hyper_parameters": "what your data module was built with: give it again",
}
_OWN = "added by a module or a plugin of its own"


def is_lightning(found: Mapping[Any, Any]) -> bool:
    """Whether Lightning wrote what a file of `torch.save` holds."""
    return _VERSION in found and isinstance(found.get("state_dict"), dict)


def parts(found: Mapping[str, Any]) -> dict[str, Any]:
    """The state of every part. With several optimizers or schedulers, each has its number."""
    read = {"model": found["state_dict"]}
    for key, kind in (("optimizer_states", "optimizer"), ("lr_schedulers", "scheduler")):
        states = found.get(key) or []
        read |= {f"{kind}.{number}" if len(states) > 1 else kind: state for number, state in enumerate(states)}
    scalers = [found[key] for key in _PRECISION if found.get(key)]
    return read | ({"scaler": scalers[0]} if scalers else {})


def counters(found: Mapping[str, Any]) -> dict[str, int]:
    values = {"epoch": _epochs(found), "step": found.get("global_step")}
    return {key: value for key, value in values.items() if type(value) is int and value >= 0}


def _epochs(found: Mapping[str, Any]) -> Any:
    """The epochs that were done. What is saved at the end of an epoch has the number of that epoch beside its model."""
    processed: Any = found.get("loops")
    for key in ("fit_loop", "epoch_progress", "current", "processed"):
        processed = processed.get(key) if isinstance(processed, dict) else None
    numbers = [number for number in (found.get("epoch"), processed) if type(number) is int]
    return max(numbers, default=None)


def left_out(found: Mapping[str, Any]) -> dict[str, str]:
    """What is not taken over, and why; an empty container is not worth a word."""
    return {str(key): _WHY.get(key, _OWN) for key, value in found.items()
            if key not in (*_TAKEN, *_PRECISION) and value is not None and not _is_empty(value)}  # fmt: skip


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict | list | tuple) and not value


def document(
    model: Any, optimizers: list[Any], schedulers: list[Any], scaler: Any | None, *, epoch: int, step: int
) -> dict[str, Any]:
    """What Lightning's `Trainer.fit(ckpt_path=...)` and `load_from_checkpoint` read."""
    found = {
        "epoch": epoch,
        "global_step": step,
        _VERSION: _WRITTEN_AS,
        "state_dict": model,
        "loops": _loops(epoch, step),
        "callbacks": {},
        "optimizer_states": optimizers,
        "lr_schedulers": schedulers,
    }
    return found if scaler is None else {**found, _PRECISION[0]: scaler}


def _loops(epoch: int, step: int) -> dict[str, Any]:
    """The progress of Lightning's loops at the beginning of an epoch, after so many steps of the optimizer."""
    none = {"ready": 0, "completed": 0}
    steps = {"total": {"ready": step, "completed": step}, "current": dict(none)}
    batches = {"total": _counts(step), "current": _counts(0), "is_last_batch": False}
    optimizer = {"step": steps, "zero_grad": {"total": {**steps["total"], "started": step},
                                              "current": {**none, "started": 0}}}  # fmt: skip
    other = {"state_dict": {}, "batch_progress": {**batches, "total": _counts(0)}}
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": step},
        "epoch_loop.batch_progress": batches,
        "epoch_loop.scheduler_progress": {"total": dict(none), "current": dict(none)},
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer},
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": steps,
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": other["batch_progress"],
        "epoch_progress": {"total": _counts(epoch), "current": _counts(epoch)},
    }
    names = ("validate_loop", "test_loop", "predict_loop")
    predicted = {"total": _counts(0), "current": _counts(0)}  # without a last batch
    others = {name: {**other, "batch_progress": predicted} if name == names[2] else other for name in names}
    return {"fit_loop": fit, **others}


def _counts(number: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "completed", "started", "processed"), number)
