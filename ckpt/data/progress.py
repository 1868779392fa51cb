"""The counters of training progress."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Progress:
    """Counters that a checkpoint keeps.

    `epoch` and `batch` say where the loop is: `batch` batches of epoch `epoch` have been handed out. `step` counts the
    calls of `manager.step()` or, attached to an accelerator, the steps of its first optimizer. `samples` counts
    those of all ranks, over all epochs.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)
