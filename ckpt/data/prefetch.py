"""Loaders that read ahead of the loop, as Accelerate's do: the generators and the stream's state before each read.

Accelerate's loaders read the next batch before they hand out this one. Reading draws from generators and advances a
stream. To resume exactly, what had been read ahead must be read again from the same generators and the same state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ckpt.data.batch_digest import Contents, Extract, extract
from ckpt.data.loader_info import Stateful
from ckpt.state import rng


class Lookahead:
    """Follows the reads of `reader`, the loader inside another one, in one pass.

    Before each read, `before` is called with the number of reads made; then the generators are captured, and the state
    of the `keeper`, if there is one. What was read is digested in `contents`, if given, when the loop gets it: here it
    has not been sent to a device yet.
    """

    def __init__(
        self, reader: Any, keeper: Stateful | None, before: Callable[[int], None], contents: Contents | None = None
    ) -> None:
        self._reader = reader
        self._keeper = keeper
        self._before = before
        self._contents = contents
        self._moments: deque[tuple[dict[str, Any], Any]] = deque()  # of each read that the loop has not got yet
        self._read: deque[Extract] = deque()  # by each of them
        # found before the method of its class, because the outer loader calls `__iter__` by name; used once
        vars(reader)["__iter__"] = self._begin

    @property
    def first(self) -> tuple[int, dict[str, Any], Any]:
        """How many reads the loop has not got yet, and the generators and the keeper's state before the first."""
        generators, kept = self._moments[0] if self._moments else ({}, self._kept())
        return len(self._moments), generators, kept

    def taken(self, reads: int) -> None:
        """The loop has got the batches of this many reads; fewer, where the data was at its end."""
        for _ in range(min(reads, len(self._moments))):
            self._moments.popleft()
        for _ in range(min(reads, len(self._read))):
            extracted = self._read.popleft()
            if self._contents is not None:
                self._contents.add(extracted)

    def forget(self) -> None:
        """Drop the callback: an iterator that is never finished keeps this object alive."""
        self._before = lambda reads: None
        vars(self._reader).pop("__iter__", None)

    def _begin(self) -> Iterator[Any]:
        del vars(self._reader)["__iter__"]
        return self._follow(iter(self._reader))

    def _follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        reads = 0
        while True:
            self._before(reads)
            self._moments.append((rng.capture(), self._kept()))
            try:
                batch = next(batches)
            except StopIteration:
                self._moments.pop()
                return
            reads += 1
            if self._contents is not None:
                self._read.append(extract(batch))
            yield batch

    def _kept(self) -> Any:
        return self._keeper.state_dict() if self._keeper is not None else None


def reads_per_batch(loader: Any, rank: int) -> int:
    """How many batches Accelerate's loader reads here for each that it hands out."""
    from accelerate.data_loader import DataLoaderDispatcher

    if not isinstance(loader, DataLoaderDispatcher):
        return 1
    if rank != 0:  # rank 0 reads for all
        return 0
    whole = loader.split_batches or loader.submesh_tp is not None
    return 1 if whole else loader.state.num_processes
