"""Before a rank ends, it waits until the others have read its last broadcast.

Rank 0 often hosts the store, which ends with its process; ranks that had not read its last decision would then report a
lost store instead of the decision.
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


class UnreadBroadcast:
    """The last broadcast of a group, and how many ranks must confirm that they have read it."""

    def __init__(self, store: TimedStore, unread: set[UnreadBroadcast]) -> None:
        self._store = store
        self._all_unread = unread  # keeps it alive until exit, also in a program that has dropped its manager
        self._key, self._readers = "", 0
        self._process = os.getpid()
        _all.add(self)

    def expect(self, key: str, readers: int) -> None:
        self._key, self._readers = key, readers
        self._all_unread.add(self)

    def confirm(self, key: str) -> None:
        """Called by a rank that has read the broadcast."""
        self._store.add(key, 1)

    def clear(self) -> None:
        self._readers = 0
        self._all_unread.discard(self)

    def is_read(self) -> bool:
        if os.getpid() != self._process:  # a forked child: the connection to the store is its parent's
            return True
        return self._readers == 0 or self._store.add(self._key, 0) >= self._readers


_all: WeakSet[UnreadBroadcast] = WeakSet()


def linger(broadcasts: Iterable[UnreadBroadcast], timeout: float) -> None:
    """Return when the other ranks have read all broadcasts, or after the timeout. Raises nothing."""
    waiting = list(broadcasts)
    deadline = time.monotonic() + min(timeout, _LONGEST)
    with suppress(RanksError):  # without a store no rank can read
        while not all(broadcast.is_read() for broadcast in waiting) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
    for broadcast in waiting:
        broadcast.clear()


@atexit.register
def _at_exit() -> None:
    linger(_all, _LONGEST)
