"""What an accelerator adds to a checkpoint, and how a snapshot in memory differs from one in the root."""

from __future__ import annotations

from typing import Any

from ckpt.compat.accelerate import save_hooks


def has_save_hooks(source: object) -> bool:
    """Whether hooks of the user's own save a part of the state into files that a snapshot in memory would lack."""
    accelerator = getattr(source, "accelerator", None)
    return accelerator is not None and bool(save_hooks(accelerator))


def without_this_save(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a source for a snapshot in memory, which does not count as a save: names are numbered by those."""
    return {**state, "saves": state["saves"] - 1} if "saves" in state else state
