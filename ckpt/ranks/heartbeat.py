"""Heartbeats: a rank at work counts up a key in the store, so that others wait for it beyond their timeout."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckpt.errors import RanksError
from ckpt.ranks.store import TimedStore


class Heartbeat:
    """Counts up a rank's key once per interval, on a daemon thread, while any caller of this process is `running`."""

    def __init__(self, store: TimedStore, rank: int, interval: float) -> None:
        self._store = store
        self._key = f"alive/{rank}"
        self._interval = interval
        self._users = 0
        self._done = threading.Event()
        self._guard = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The first context to be entered starts the thread, the last to be left stops it."""
        with self._guard:
            self._users += 1
            if self._users == 1:
                self._done = threading.Event()
                threading.Thread(target=self._run, args=(self._done,), name="ckpt-alive", daemon=True).start()
        try:
            yield
        finally:
            with self._guard:
                self._users -= 1
                if self._users == 0:
                    self._done.set()

    def beat(self) -> None:
        self._store.add(self._key, 1)

    def _run(self, done: threading.Event) -> None:
        while not done.wait(self._interval):
            with suppress(RanksError):  # the store is gone: a call that needs it reports that
                self.beat()
