"""How much of a snapshot has arrived in host memory: whoever hashes or writes it waits no longer than for its bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from ckpt.errors import StateError

STEP = 64 << 20  # bytes that hashing and writing wait for at a time


class Arrival:
    """Blocks of the image of a snapshot that are filled in any order. `blocks`: their places, ascending, and sizes."""

    def __init__(self, blocks: Sequence[tuple[int, int]] = ()) -> None:
        self._starts = [start for start, _ in blocks]
        self._missing = {number: size for number, (_, size) in enumerate(blocks)}  # bytes, by block
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self.is_discarded = False  # nobody needs the rest any more
        self.at = time.monotonic()  # when the last byte arrived

    def arrived(self, number: int, size: int) -> None:
        """As many bytes of the block of this number are in the image."""
        with self._changed:
            self._missing[number] -= size
            if not self._missing[number]:
                del self._missing[number]
                self.at = time.monotonic()
                self._changed.notify_all()

    @property
    def missing(self) -> int:
        """Bytes that have not arrived yet."""
        return sum(self._missing.values())

    def fail(self, error: BaseException) -> None:
        """The rest will not arrive: whoever waits for it gets this error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def discard(self) -> None:
        """Nobody needs the rest: it is not fetched, and whoever waits for it gets an error."""
        self.is_discarded = True
        if self.missing:
            self.fail(StateError("a snapshot was read after its memory had been given back"))

    def wait(self, stop: int | None = None) -> None:
        """Block until all bytes of the image below `stop` have arrived; without it, all bytes there are."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._reached(stop))
            if self._error is not None and not self._reached(stop):
                raise self._error

    def pieces(self, view: memoryview, start: int, head: int) -> Iterator[memoryview]:
        """The bytes of a file that lies at `start` of the image, each piece when it is there; the head is in the first.

        If nothing is missing it is one piece.
        """
        step = len(view) if not self._missing else -(-max(head, STEP) // STEP) * STEP
        for begin in range(0, len(view), max(1, step)):
            end = min(begin + step, len(view))
            self.wait(start + end)
            yield view[begin:end]

    def _reached(self, stop: int | None) -> bool:
        if not self._missing:
            return True
        return stop is not None and stop <= self._starts[min(self._missing)]
