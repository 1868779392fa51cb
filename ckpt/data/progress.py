"""The counters of training progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ckpt.errors import MetricError

# Metrics as a training loop gives them, and as a checkpoint keeps them.


def checked_metrics(metrics: Any) -> dict[str, Any]:
    """Metrics to be kept until a save, if there is one. Nothing waits for the device."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise MetricError(f"metrics must be a dict of names and numbers, not {metrics!r}.")
    unfit = [key for key, value in (metrics or {}).items() if not isinstance(key, str) or not _is_one_number(value)]
    if unfit:
        raise MetricError(f"metrics must be names with one number each: {', '.join(map(repr, unfit))} is not.")
    return {key: _detached(value) for key, value in (metrics or {}).items()}


def _is_one_number(value: Any) -> bool:
    """Nothing waits for the device: of a tensor, its shape is enough."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, str)


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as plain numbers. This waits for the device, so it is done for saves only."""
    try:
        return {key: float(_detached(value)) for key, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError, OverflowError, AttributeError) as error:
        raise MetricError(f"metrics must be names with one number each, not {metrics!r}: {error}") from error


def _detached(value: Any) -> Any:
    """Without the graph behind it, which would otherwise live until the next step."""
    return value.detach() if isinstance(value, torch.Tensor) else value


@dataclass
class Progress:
    """Counters that a checkpoint keeps.

    Attributes:
        epoch: That the loop is in.
        batch: Batches of it that have been handed out.
        step: Calls of `manager.step()` or, attached to an accelerator, steps of its first optimizer.
        samples: Of all ranks, over all epochs.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0

    @classmethod
    def from_json(cls, saved: Mapping[str, int]) -> Progress:
        """The counters of a manifest; a later version may have more of them."""
        return cls(**{counter.name: saved.get(counter.name, 0) for counter in fields(cls)})

    def to_json(self) -> dict[str, int]:
        return asdict(self)
