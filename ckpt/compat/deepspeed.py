"""Private names of DeepSpeed."""

from __future__ import annotations

from typing import Any

from ckpt.compat.private import Private

MASTERS = Private(
    "deepspeed.utils.tensor_fragment._hp_mapping",
    since="0.19",
    use="whether a bare model is trained by an engine, which has master weights of its own",
    without="A model that is given without its engine is not refused, and loads no master weights.",
)
SHAPES = Private(
    "deepspeed.DeepSpeedEngine._get_zero_param_shapes",
    since="0.19",
    use="whether ZeRO's flat partitions are those of the same parameters, and how other ranks cut them",
    without="Partitions of ZeRO's optimizer that were saved with it cannot be loaded; strict=False loads the weights.",
)
BOUNDARY = Private(
    "deepspeed.DeepSpeedEngine._is_gradient_accumulation_boundary",
    since="0.19",
    use="whether an engine is within an accumulation window that Accelerate counts",
    without="ckpt goes by the engine's own count of micro-batches.",
)


def is_fragmented(parameter: Any) -> bool:
    """Whether an engine has a master copy of this parameter."""
    return hasattr(parameter, MASTERS.name)


def parameter_shapes(engine: Any) -> list[dict[str, Any]]:
    """The names and shapes of the parameters in each group; none where the engine does not say."""
    find = SHAPES.of(engine)
    found: list[dict[str, Any]] = [] if find is None else find()
    return found


def in_window(engine: Any) -> bool:
    """Whether the engine holds gradients of an unfinished accumulation window."""
    boundary = BOUNDARY.of(engine)  # set by Accelerate before each backward, else None
    return not boundary if boundary is not None else engine.micro_steps % engine.gradient_accumulation_steps() != 0
