"""The ranks of a job, as everything above sees them: `Ranks`, and its implementation for a single process."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from ckpt.formats.layout import Members
from ckpt.ranks.store import LivenessWatch

MAIN = 0  # the rank that gathers, decides and broadcasts


class Ranks(Protocol):
    """The processes of one job. A single process has the same interface."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def members(self) -> Members:
        """Their numbers in the job, where they are some of its ranks: in messages, and for PyTorch's own calls."""

    @property
    def timeout(self) -> float:
        """Seconds to wait for a rank that sends no heartbeat."""

    def channel(self, name: str) -> Ranks:
        """The same ranks with keys of their own, for a thread that must not get in the way of other exchanges."""

    def gather(self, call: str, data: str) -> list[str]:
        """On the main rank: every rank's `data`, in the order of ranks. On the others: an empty list, at once."""

    def broadcast(self, call: str, data: str) -> str:
        """The main rank's `data`, on every rank."""

    def working(self, *, job_wide: bool = False) -> AbstractContextManager[None]:
        """Send heartbeats while the context lasts, so that the other ranks wait for this one beyond their timeout.

        With `job_wide`, ranks that wait in a call of another manager see them too. The block must not wait for any
        rank itself: two ranks that waited for each other would then wait forever.
        """

    def note(self, key: str, value: str) -> None:
        """Leave a note of this rank under a key, once. Does not wait."""

    def notes(self, key: str) -> dict[int, str]:
        """The notes left so far under a key, by rank. Does not wait; costs one request while there are none."""

    def publish(self, key: str, value: str) -> None:
        """Set the value of a key for all ranks. Does not wait."""

    def published(self, key: str) -> str | None:
        """The value that was last published under a key; None if there is none. Does not wait."""

    def first_wins(self, key: str, value: str) -> str:
        """Compare-and-set: the value of the first rank that calls this, on every rank. Does not wait."""

    def silent(self, ranks: list[int], watch: LivenessWatch) -> list[int]:
        """Those of `ranks` that have sent no heartbeat for the timeout. Does not wait."""

    def abandon(self) -> None:
        """Let what waits for other ranks in this channel, on another thread, fail at once: this rank ends."""

    def linger(self) -> None:
        """Return when the other ranks have read this rank's last broadcast, or after a while. Raises nothing.

        Must be called before the process ends: the main rank may host the store, which ends with it.
        """


class SingleProcess:
    """A job of one process: every exchange is with itself."""

    rank = MAIN
    world_size = 1
    timeout = math.inf

    def __init__(self, members: Members = None) -> None:
        self.members = members
        self._values: dict[str, str] = {}

    def channel(self, name: str) -> Ranks:
        return SingleProcess(self.members)

    def gather(self, call: str, data: str) -> list[str]:
        return [data]

    def broadcast(self, call: str, data: str) -> str:
        return data

    def working(self, *, job_wide: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def silent(self, ranks: list[int], watch: LivenessWatch) -> list[int]:
        return []

    def abandon(self) -> None:
        """No other rank is waited for."""

    def linger(self) -> None:
        """No other rank has anything to read."""

    def note(self, key: str, value: str) -> None:
        self._values[key] = value

    def notes(self, key: str) -> dict[int, str]:
        return {MAIN: self._values[key]} if key in self._values else {}

    def publish(self, key: str, value: str) -> None:
        self._values[key] = value

    def published(self, key: str) -> str | None:
        return self._values.get(key)

    def first_wins(self, key: str, value: str) -> str:
        return self._values.setdefault(key, value)
