"""A limit on the time of a test that would otherwise wait for ever, such as for the other end of a named pipe."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError in the main thread after so many seconds."""

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
