"""Retries of failed requests: exponential backoff with jitter until a deadline.

`Requests` makes every request to a server: of object stores, of filesystems of fsspec, of the Hub. A client says by its
errors which failures may pass. `Retries` says when to try again, for commits that others forestall too.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpt.errors import TransientError
from ckpt.util.option_values import AnySeconds, Options, Seconds

_T = TypeVar("_T")
AT_ONCE = 8  # requests that move large pieces
SMALL_AT_ONCE = 32  # whole small objects, and questions
FIRST_CONTACT = 10.0  # seconds: a server that was never reached is more likely misspelt than restarting
_log = logging.getLogger("ckpt")
_random = random.SystemRandom()  # the global generator belongs to the training
_end: ContextVar[float] = ContextVar("ckpt-requests-end", default=math.inf)  # by the monotonic clock


class UnreachedError(TransientError):
    """No server has answered, so that the address may be wrong."""


class FinalError(TransientError):
    """To make the same request again would not help, though a later one may succeed."""


class BusyError(TransientError):
    """The server has asked for a pause of so many seconds before the next try."""

    asked: float | None = None


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Requests of this context fail after so many seconds, whatever their deadline: for what must not come late."""
    mark = _end.set(min(_end.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _end.reset(mark)


def time_left() -> float:
    """Seconds until requests of this context fail; infinite outside of `within`."""
    return max(0.0, _end.get() - time.monotonic())


@dataclass(frozen=True, kw_only=True)
class RetryPolicy(Options):
    """How often and for how long a request is repeated."""

    called = "storage_options"

    deadline: AnySeconds = 300.0  # from the first try to the last
    stall: Seconds = 60.0  # without a byte moved, after which a try has failed
    tries: int | None = None  # at most
    first_pause: float = 0.1  # seconds, at most, before the second try; twice as long before each further one
    longest_pause: float = 20.0

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> RetryPolicy:
        """The policy, whose options are taken out of those of a store."""
        return cls(**{name: options.pop(name) for name in ("deadline", "stall") if name in options})

    def start(self) -> Retries:
        """The deadline of a request runs from now on."""
        return Retries(self)

    def pauses(self) -> Iterator[float]:
        """Seconds to wait before each further try, until the deadline, which is counted from this call.

        They are random, or clients that failed together would come back together. The last try is at the deadline.
        """
        return self._pauses_until(time.monotonic() + min(self.deadline, time_left()))

    def _pauses_until(self, end: float) -> Iterator[float]:
        longest = self.first_pause
        for tries in itertools.count(1):
            left = end - time.monotonic()
            if left <= 0 or tries == self.tries:
                return
            yield min(left, _random.uniform(longest / 2, longest))
            longest = min(self.longest_pause, 2 * longest)


class Retries:
    """The tries of one request."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.tries = 1
        self._began = time.monotonic()
        self._pauses = policy.pauses()

    def next_pause(self, *, reached: bool = True, asked: float | None = None) -> float | None:
        """After a failed try: seconds to wait before the next one, or None to give up.

        A server that was never `reached` is given up after `FIRST_CONTACT` seconds. What a server `asked` for is waited
        for instead of a pause of our own.
        """
        pause = next(self._pauses, None)
        if pause is None or (not reached and time.monotonic() - self._began + pause > FIRST_CONTACT):
            return None
        self.tries += 1
        return asked or pause


class Requests:
    """Requests to the server of `where`, each made again while it fails with a `TransientError`, until its deadline.

    Of those that move large pieces, `at_once` are under way at the most.
    """

    def __init__(self, policy: RetryPolicy, where: str = "", at_once: int = AT_ONCE) -> None:
        self.policy = policy
        self.at_once = at_once
        self.progress = 0  # see `Interruptible`
        self._where = where
        self._reached = False
        self._large = threading.Semaphore(at_once)
        self._small = threading.Semaphore(max(at_once, SMALL_AT_ONCE))
        self._under_way: set[threading.Event] = set()  # what stops each
        self._given_up = 0  # contexts of `giving_up` that were not left
        self._problem = ""  # of a request that is made again

    def make(self, attempt: Callable[[], _T], stopped: threading.Event | None = None, *, is_large: bool = False) -> _T:
        """Its result. No further try is made when `stopped` is set."""
        stopped = stopped or threading.Event()
        self._under_way.add(stopped)
        try:
            return self._make(attempt, stopped, self._large if is_large else self._small)
        finally:
            self._under_way.discard(stopped)

    def _make(self, attempt: Callable[[], _T], stopped: threading.Event, slots: threading.Semaphore) -> _T:
        retries: Retries | None = None
        while True:
            with slots:
                self._refuse_given_up()
                retries = retries or self.policy.start()  # time in the queue for a slot does not count
                try:
                    result = attempt()
                except TransientError as error:
                    problem = error
                else:
                    self._reached = True
                    self.note_progress()
                    return result
            self._refuse_given_up()
            self._reached = self._reached or not isinstance(problem, UnreachedError)
            if isinstance(problem, FinalError):
                raise problem
            asked = problem.asked if isinstance(problem, BusyError) else None
            tries, pause = retries.tries, retries.next_pause(reached=self._reached, asked=asked)
            self._problem = str(problem)
            if pause is not None and asked:
                _log.warning(
                    "the server asked ckpt to wait; trying %s again in %.1f s: %s", self._where, pause, problem
                )
            if pause is None or stopped.wait(pause):
                self._refuse_given_up()
                raise TransientError(f"{problem} Tried {tries} times.")

    def note_progress(self) -> None:
        """The server has answered, or bytes have moved for the first time."""
        self.progress += 1
        self._problem = ""

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Until the context is left, no request is made, and none made again."""
        self._given_up += 1
        try:
            for stopped in list(self._under_way):
                stopped.set()
            yield
        finally:
            self._given_up -= 1

    def _refuse_given_up(self) -> None:
        if self._given_up:
            raise TransientError(f"given up: {self._problem or f'the server of {self._where} did not answer.'}")
