"""Private names of Hugging Face Accelerate: what an accelerator has prepared, and the hooks of its saves and loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt.compat.private import Private

_ACCELERATOR = "accelerate.Accelerator"
_GIVE = "Give it to the manager itself: StateManager(root, {0}={0}), without accelerator=."


def _prepared(name: str, what: str, argument: str) -> Private:
    return Private(
        f"{_ACCELERATOR}.{name}",
        since="1.10",
        use=f"every {what} that the accelerator has prepared",
        without=f"ckpt cannot see which {what} an accelerator has prepared, and saves none. {_GIVE.format(argument)}",
    )


MODELS = _prepared("_models", "model", "model")
OPTIMIZERS = _prepared("_optimizers", "optimizer", "optimizer")
SCHEDULERS = _prepared("_schedulers", "scheduler", "scheduler")
LOADERS = _prepared("_dataloaders", "loader", "dataloader")
CUSTOM = Private(
    f"{_ACCELERATOR}._custom_objects",
    since="1.10",
    use="what was given to `register_for_checkpointing`",
    without="Objects of accelerator.register_for_checkpointing() are not saved. Give them to manager.register().",
)
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


def save_hooks(accelerator: Any) -> list[Callable[..., Any]]:
    return list(SAVE_HOOKS.of(accelerator, {}).values())


def load_hooks(accelerator: Any) -> list[Callable[..., Any]]:
    return list(LOAD_HOOKS.of(accelerator, {}).values())
