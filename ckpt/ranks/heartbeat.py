"""Signs of life that a rank gives while it is at work, so that others wait for it beyond their timeout."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckpt.errors import RanksError
from ckpt.ranks.store import TimedStore


class Heartbeat:
    """Counts up a rank's key in a store, once an interval, while anybody in this process asks for it."""

    def __init__(self, store: TimedStore, rank: int, interval: float) -> None:
        self._store = store
        self._key = f"alive/{rank}"
        self._interval = interval
        self._wanted = 0
        self._done = threading.Event()
        self._guard = threading.Lock()

    @contextmanager
    def going(self) -> Iterator[None]:
        """From the first who asks to the last who has done, one thread counts."""
        with self._guard:
            self._wanted += 1
            if self._wanted == 1:
                self._done = threading.Event()
                threading.Thread(target=self._run, args=(self._done,), name="ckpt-alive", daemon=True).start()
        try:
            yield
        finally:
            with self._guard:
                self._wanted -= 1
                if self._wanted == 0:
                    self._done.set()

    def beat(self) -> None:
        self._store.add(self._key, 1)

    def _run(self, done: threading.Event) -> None:
        while not done.wait(self._interval):
            with suppress(RanksError):  # the store is gone: whoever needs it will say so
                self.beat()
