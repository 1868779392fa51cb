"""The counters of training progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields


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
