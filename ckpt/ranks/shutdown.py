"""What a rank has told the others and they may not have read yet: it does not leave before they have.

Rank 0 often hosts the store and takes it along when it ends; ranks that were still to read its last decision would then
report a lost store instead of the decision.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from weakref import WeakSet

from ckpt.errors import RanksError
from ckpt.ranks.store import TimedStore

_LONGEST = 30.0  # seconds
_PAUSE = 0.01


class Unread:
    """The last thing that was told, and how many ranks must confirm that they have read it."""

    def __init__(self, store: TimedStore, kept: set[Unread]) -> None:
        self._store = store
        self._kept = kept  # or nobody would wait at the end of a program that has dropped its manager
        self._key, self._readers = "", 0
        self._process = os.getpid()
        _all.add(self)

    def expect(self, key: str, readers: int) -> None:
        self._key, self._readers = key, readers
        self._kept.add(self)

    def confirm(self, key: str) -> None:
        """By a rank that has read it."""
        self._store.add(key, 1)

    def clear(self) -> None:
        self._readers = 0
        self._kept.discard(self)

    def is_read(self) -> bool:
        if os.getpid() != self._process:  # the connection to the store is the parent's
            return True
        return self._readers == 0 or self._store.add(self._key, 0) >= self._readers


_all: WeakSet[Unread] = WeakSet()


def linger(told: Iterable[Unread], timeout: float) -> None:
    """Return when the others have read all of it, or after the timeout. Raises nothing."""
    told = list(told)
    deadline = time.monotonic() + min(timeout, _LONGEST)
    with suppress(RanksError):  # without a store nobody reads
        while not all(one.is_read() for one in told) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
    for one in told:
        one.clear()


@atexit.register
def _at_exit() -> None:
    linger(_all, _LONGEST)
