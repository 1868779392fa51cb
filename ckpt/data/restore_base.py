"""What the strategies for restoring a loader's position have in common: by index, by state and by replay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from ckpt.data.batch_digest import Contents, extract
from ckpt.data.cursor import Cursor
from ckpt.data.following import MakeIterator
from ckpt.data.loader_info import batch_size
from ckpt.data.prefetch import Lookahead
from ckpt.state import rng


class RestoreStrategy(ABC):
    """One pass through a loader, from its cursor's position to the end of the epoch.

    `open` makes the iterator. `land` is called when all that the loop had got is behind, `arrive` when everything is as
    it was at the save. The two differ only for a loader that reads ahead: what had been read but not handed out is read
    again in between, with the generators of that time.
    """

    lands_with_order = False  # `land` is called by the order of indices, not by the reads

    def __init__(self, cursor: Cursor, make_iterator: MakeIterator) -> None:
        self._cursor = cursor
        self._make_iterator = make_iterator
        self._lookahead: Lookahead | None = None
        self._contents: Contents | None = None  # of a stream that can only be replayed

    @abstractmethod
    def open(self) -> Iterator[Any]:
        """An iterator that stands at the position, or that takes the loader there when it is first used."""

    def take(self, batch: Any) -> int:
        """The loop gets a batch: how many samples it has."""
        if self._cursor.has_saved_position:  # nothing was read here: rank 0 reads for all
            self.arrive()
        self._note_contents(batch)
        return self._count_samples(batch)

    def _count_samples(self, batch: Any) -> int:
        return batch_size(batch)

    def update_position(self) -> None:
        """Write what the strategy knows into the position, to be saved."""
        position = self._cursor.position
        if self._contents is not None:
            position.contents = self._contents.digests()
        if self._lookahead is not None:
            position.ahead, position.rng_ahead, position.state = self._lookahead.first

    def close(self) -> None:
        """The pass is over, or was left: no reference may keep the iterator alive, because its workers stop with it."""
        if self._lookahead is not None:
            self._lookahead.forget()

    def land(self) -> None:
        """The batches that the loop had got are behind. What had been read ahead of it is read again."""
        if self._cursor.has_saved_position and self._lookahead is not None and self._cursor.position.ahead:
            self._restore_before_reads_ahead()
        else:
            self.arrive()

    def _restore_before_reads_ahead(self) -> None:
        rng.restore(self._cursor.position.rng_ahead)

    def arrive(self) -> None:
        """The position is reached: everything is as it was at the save."""
        self._cursor.arrive()

    def _note_contents(self, batch: Any) -> None:
        if self._lookahead is not None:
            self._lookahead.taken(self._cursor.reads)
        elif self._contents is not None:
            self._contents.add(extract(batch))

    def _look_ahead(self, again: int = 0) -> None:
        """Follow the reads of a loader that reads ahead. The loop had got the first `again` of them at the save, and
        `position.ahead` more had been read."""
        cursor = self._cursor

        def before(reads: int) -> None:
            if cursor.has_saved_position and reads == again and not self.lands_with_order:
                self.land()
            elif cursor.has_saved_position and cursor.position.ahead and reads == again + cursor.position.ahead:
                self.arrive()

        self._lookahead = Lookahead(cursor.reader, cursor.keeper, before, self._contents)
