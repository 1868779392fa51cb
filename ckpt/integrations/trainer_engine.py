"""The objects of a Trainer that are saved: its model and what trains it, or DeepSpeed's engine, which has all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers.trainer
from torch import nn
from transformers import Trainer


def trained_model(trainer: Trainer) -> nn.Module:
    """The model that is trained; under DeepSpeed the engine, whose master weights are loaded with it."""
    model: nn.Module = trainer.model_wrapped if trainer.is_deepspeed_enabled else trainer.model
    return model


def managed_objects(trainer: Trainer) -> dict[str, Any]:
    """What `StateManager` is given. An engine's optimizer and its own scheduler come with it."""
    model = trained_model(trainer)
    if trainer.args.save_only_model:
        return {"model": model}
    scheduler = trainer.lr_scheduler
    if trainer.is_deepspeed_enabled:
        in_engine = type(scheduler).__name__ == "DeepSpeedSchedulerWrapper"
        return {"model": model} if in_engine else {"model": model, "scheduler": scheduler}
    return {
        "model": model,
        "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
        "scheduler": scheduler,
        "scaler": trainer.accelerator.scaler,
    }


@contextmanager
def engine_loaded_elsewhere(trainer: Trainer) -> Iterator[None]:
    """Leave a Trainer's engine to `CkptCallback`: Trainer would load DeepSpeed's own files by a function."""
    own = transformers.trainer.deepspeed_load_checkpoint

    def load(engine: Any, *given: Any, **named: Any) -> None:
        if engine is not trainer.model_wrapped:
            own(engine, *given, **named)

    transformers.trainer.deepspeed_load_checkpoint = load
    try:
        yield
    finally:
        transformers.trainer.deepspeed_load_checkpoint = own
