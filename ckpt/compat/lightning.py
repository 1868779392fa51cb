"""Private names of Lightning."""

from __future__ import annotations

from typing import Any

from ckpt.compat.private import Private

FETCHER = Private(
    "lightning.pytorch.loops.fit_loop._FitLoop._data_fetcher",
    since="2.6",
    use="begins the epoch again in the order that was saved",
    without="A fit that resumes in the middle of an epoch sees its data in the order in which Lightning draws it.",
)


def begin_data(trainer: Any) -> None:
    """Begin to fetch batches from the loaders as they are now."""
    fetcher = FETCHER.of(trainer.fit_loop)
    if fetcher is not None:
        iter(fetcher)
