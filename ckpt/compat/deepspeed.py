"""Private names of DeepSpeed."""

from __future__ import annotations

from typing import Any

from ckpt.compat.private import Private

BOUNDARY = Private(
    "deepspeed.DeepSpeedEngine._is_gradient_accumulation_boundary",
    since="0.19",
    use="whether an engine is within an accumulation window that Accelerate counts",
    without="ckpt goes by the engine's own count of micro-batches.",
)


def in_window(engine: Any) -> bool:
    """Whether the engine holds gradients of an unfinished accumulation window."""
    boundary = BOUNDARY.of(engine)  # set by Accelerate before each backward, else None
    return not boundary if boundary is not None else engine.micro_steps % engine.gradient_accumulation_steps() != 0
