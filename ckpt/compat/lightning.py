"""Private names of Lightning."""

from __future__ import annotations

from typing import Any

from ckpt.compat.private import Private

CONNECTOR = Private(
    "lightning.pytorch.Trainer._checkpoint_connector",
    since="2.6",
    use="a checkpoint as a dict, for a snapshot in memory",
    without="CkptMemory takes no snapshots. Checkpoints are saved to their folder as before.",
)
FETCHER = Private(
    "lightning.pytorch.loops.fit_loop._FitLoop._data_fetcher",
    since="2.6",
    use="begins the epoch again in the order that was saved",
    without="A fit that resumes in the middle of an epoch sees its data in the order in which Lightning draws it.",
)


def checkpoint_of(trainer: Any) -> dict[str, Any] | None:
    """What Lightning would save now. On every rank; None where it cannot be asked."""
    connector = CONNECTOR.of(trainer)
    found: dict[str, Any] | None = None if connector is None else connector.dump_checkpoint(weights_only=False)
    return found


def begin_data(trainer: Any) -> None:
    """Begin to fetch batches from the loaders as they are now."""
    fetcher = FETCHER.of(trainer.fit_loop)
    if fetcher is not None:
        iter(fetcher)
