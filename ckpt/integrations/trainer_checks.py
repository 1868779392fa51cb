"""What `CkptCallback` refuses: options that are not its own, and Trainers that it does not work with."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import transformers
from transformers import Trainer

from ckpt.errors import ConfigError
from ckpt.options import ManagerOptions, inside
from ckpt.state.objects import KINDS
from ckpt.util.option_values import names_of, refuse_unknown

_DECIDED_ELSEWHERE = {"root", "save_every", "accelerator", *KINDS}  # by the Trainer and its arguments


def refuse_foreign_options(options: Mapping[str, Any]) -> None:
    """Refuse options of a manager that the Trainer and its arguments decide, and those that do not exist."""
    taken = {*names_of(ManagerOptions)} - _DECIDED_ELSEWHERE
    if decided := sorted(options.keys() & _DECIDED_ELSEWHERE):
        raise ConfigError(
            f"CkptCallback has no option {', '.join(decided)}. It takes {', '.join(sorted(taken))}; the rest is for "
            "the Trainer and its TrainingArguments to say."
        )
    refuse_unknown("CkptCallback", options, taken, inside())


def refuse_unsupported(trainer: Trainer, methods: Collection[str]) -> None:
    if trainer.is_deepspeed_enabled and trainer.args.save_only_model:
        raise ConfigError(
            "save_only_model=True with DeepSpeed: CkptCallback saves an engine as a whole. Leave it out, and take the "
            "model from a checkpoint with `ckpt merge`."
        )
    missing = [name for name in methods if not hasattr(trainer, name)]
    if missing:
        raise ConfigError(
            f"the Trainer of transformers {transformers.__version__} has no {', '.join(missing)}. CkptCallback works "
            "with 4.56 and newer, and was tried up to 5.22."
        )


def calling_trainer() -> Trainer:
    """The Trainer that is being built: it calls its callbacks without passing itself."""
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    assert frame is not None
    return frame.f_locals["self"]
