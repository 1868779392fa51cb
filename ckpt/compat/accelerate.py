"""Private names of Hugging Face Accelerate: what an accelerator has prepared, and the hooks of its saves and loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt.compat.private import Private

_ACCELERATOR = "accelerate.Accelerator"


def _prepared(name: str, use: str) -> Private:
    without = "A manager of an accelerator is refused: it would save checkpoints without what it cannot see."
    return Private(f"{_ACCELERATOR}.{name}", since="1.10", use=use, without=without)


MODELS = _prepared("_models", "every model that the accelerator has prepared")
OPTIMIZERS = _prepared("_optimizers", "the same for optimizers")
SCHEDULERS = _prepared("_schedulers", "the same for schedulers")
LOADERS = _prepared("_dataloaders", "the same for loaders")
CUSTOM = _prepared("_custom_objects", "what was given to `register_for_checkpointing`")
_PREPARED = (MODELS, OPTIMIZERS, SCHEDULERS, LOADERS, CUSTOM)
SAVE_HOOKS = Private(
    f"{_ACCELERATOR}._save_model_state_pre_hook",
    since="1.10",
    use="hooks of `register_save_state_pre_hook` are called by ckpt's saves, too",
    without="Hooks of accelerator.register_save_state_pre_hook() are not called when ckpt saves.",
)
LOAD_HOOKS = Private(
    f"{_ACCELERATOR}._load_model_state_pre_hook",
    since="1.10",
    use="the same for loads",
    without="Hooks of accelerator.register_load_state_pre_hook() are not called when ckpt loads.",
)


def unseen(accelerator: Any) -> list[str]:
    """The names under which an accelerator has what it prepared, and that this one does not have."""
    return [one.name for one in _PREPARED if not hasattr(accelerator, one.name)]


def save_hooks(accelerator: Any) -> list[Callable[..., Any]]:
    return list(SAVE_HOOKS.of(accelerator, {}).values())


def load_hooks(accelerator: Any) -> list[Callable[..., Any]]:
    return list(LOAD_HOOKS.of(accelerator, {}).values())
