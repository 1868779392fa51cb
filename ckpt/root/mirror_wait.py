"""How long a run waits for its mirror: at its start, and at its end.

A mirror that answers is waited for. One that is away is not, beyond a bound: what it lacks is safe in the root, and the
next run copies it. A local one has no server that could be away: to sync a large file takes it long, without a sign.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ckpt.errors import StorageError, TransientError
from ckpt.storage import Storage
from ckpt.storage.base import Interruptible
from ckpt.util.threads import ThreadCall

AT_START, AT_END = 5.0, 30.0  # seconds
AFTER_SIGTERM = 5.0  # seconds at most: whoever sent it will not wait for long
_LEAST = 1.0  # seconds: for a mirror that was away a moment ago, and may be back
_TO_END = 2.0  # seconds in which a request that was given up ends, where that can be done at all
_TICK = 0.1  # seconds
T = TypeVar("T")


@dataclass(eq=False)
class MirrorPatience:
    """Seconds that a run waits for a mirror that gives no sign of life.

    `at_start` is for all calls of the start together, until one succeeds: the mirror may be away in each of them.
    """

    at_start: float = AT_START
    at_end: float = AT_END
    end_by: float | None = None  # by the monotonic clock: then the end waits for nothing any more
    _spent: float = field(default=0.0, init=False)

    @property
    def left_at_start(self) -> float:
        return max(min(_LEAST, self.at_start), self.at_start - self._spent)

    @property
    def is_away(self) -> bool:
        """Whether the mirror did not answer when it was last asked at the start: that was said already."""
        return self._spent > 0

    def hurry(self, seconds: float | None) -> None:
        """The run was told to terminate: the end waits for a short time. `seconds`: the rest of its grace period."""
        self.at_end = min(self.at_end, AFTER_SIGTERM)
        if seconds is not None:
            self.end_by = time.monotonic() + seconds

    def reached(self, mirror: Storage, call: Callable[[], T]) -> T:
        """The result of a call to the mirror. Raises a `TransientError` if the mirror does not answer for too long."""
        if mirror.is_local:
            return call()
        seconds, began = self.left_at_start, time.monotonic()
        running = ThreadCall(call, "ckpt-mirror-start", daemon=True)
        wait = QuietWait(lambda: progress_of(mirror), seconds)
        try:
            if not wait.ended(running):
                end_now(mirror, running)
                raise TransientError(f"{mirror.url} has not answered for {seconds:g} s.")
            result: T = running.result()
        except StorageError:
            self._spent += time.monotonic() - began
            raise
        self._spent = 0.0
        return result

    def start_wait(self, mirror: Storage, progress: Callable[[], object]) -> QuietWait:
        return QuietWait(progress, math.inf if mirror.is_local else self.left_at_start)

    def end_wait(self, mirror: Storage, progress: Callable[[], object]) -> QuietWait:
        return QuietWait(progress, math.inf if mirror.is_local else self.at_end, self.end_by)

    def note_away(self, seconds: float) -> None:
        """The mirror has not answered for so long at the start."""
        self._spent += seconds


class Call(Protocol):
    """A call in another thread."""

    def done_within(self, seconds: float) -> bool: ...


class QuietWait:
    """Waits for calls as long as `progress` changes, at most `seconds` without a change, and not beyond `end_by`."""

    def __init__(self, progress: Callable[[], object], seconds: float, end_by: float | None = None) -> None:
        self._progress = progress
        self._seconds = seconds
        self._end_by = end_by
        self._last, self._since = progress(), time.monotonic()

    def ended(self, call: Call) -> bool:
        """Wait for a call. Returns whether it has ended."""
        while not call.done_within(min(_TICK, self._left())):
            if self._left() <= 0:
                return False
        return True

    def _left(self) -> float:
        now, last = time.monotonic(), self._progress()
        if last != self._last:
            self._last, self._since = last, now
        left = self._since + self._seconds - now
        return left if self._end_by is None else min(left, self._end_by - now)


def progress_of(storage: Storage) -> int:
    """Grows while a storage answers, if it says so."""
    return storage.progress if isinstance(storage, Interruptible) else 0


def end_now(storage: Storage, call: Call) -> bool:
    """End the requests of a call whose time is over, where the storage can do that. Returns whether it has ended."""
    with storage.giving_up() if isinstance(storage, Interruptible) else nullcontext():
        return call.done_within(_TO_END)
