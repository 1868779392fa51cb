"""When to try again, and when to give up."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckpt.errors import ConfigError

FIRST_CONTACT = 10.0  # seconds: a server that was never reached is more likely misspelt than restarting
_dice = random.SystemRandom()  # the global generator is part of what is trained


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """For how many seconds a request is tried again (`deadline`), and one that moves no byte is borne (`stall`)."""

    deadline: float = 300.0
    stall: float = 60.0
    shortest: float = 0.1
    longest: float = 20.0

    def __post_init__(self) -> None:
        if not (self.deadline >= 0 and self.stall > 0):
            raise ConfigError(f"deadline={self.deadline!r} and stall={self.stall!r} must be numbers of seconds.")

    def until_reached(self) -> RetryPolicy:
        """The same for a server that was never reached."""
        return replace(self, deadline=min(FIRST_CONTACT, self.deadline))

    def pauses(self) -> Iterator[float]:
        """Seconds to wait before each further try, longer and longer, and random: clients that failed together must not
        come back together. They end when the deadline is near, which is counted from this call.
        """
        return self._pauses_until(time.monotonic() + self.deadline)

    def _pauses_until(self, end: float) -> Iterator[float]:
        most = self.shortest
        while (left := end - time.monotonic()) > 0:
            yield min(left, _dice.uniform(most / 2, most))
            most = min(self.longest, 2 * most)
