"""Private names of Hugging Face Datasets: what a stream is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt.compat.private import Private

_REPLAYED = "A stream of datasets is read again up to its position on resume: exact, and slow."
STREAM = Private(
    "datasets.IterableDataset._ex_iterable",
    since="3.0",
    use="whether the `state_dict` of a stream leaves out samples, as those in a shuffle buffer",
    without=_REPLAYED,
)
FORMAT = Private(
    "datasets.IterableDataset._formatting",
    since="3.0",
    use="whether a stream hands out tables, of which a batched `map` leaves out the rest of a batch",
    without=_REPLAYED,
)
_SHUFFLES = "BufferShuffledExamplesIterable"


def loses_samples(dataset: Any) -> bool:
    """Whether the `state_dict` of a stream drops samples: those in a shuffle buffer, or a batch of a batched `map` with
    table output (its documentation names both). Also where that cannot be known."""
    if type(dataset).__name__ != "IterableDataset" or not type(dataset).__module__.startswith("datasets."):
        return False
    stream = STREAM.of(dataset)
    if stream is None or not hasattr(dataset, FORMAT.name):
        FORMAT.of(dataset)  # names it
        return True
    tables = bool(getattr(FORMAT.of(dataset), "is_table", False))
    return any(
        type(step).__name__ == _SHUFFLES or (tables and getattr(step, "batched", False)) for step in _steps(stream)
    )


def _steps(stream: Any) -> Iterator[Any]:
    """A stream and, recursively, its sources."""
    yield stream
    for source in (getattr(stream, "ex_iterable", None), *(getattr(stream, "ex_iterables", None) or ())):
        if source is not None:
            yield from _steps(source)
