"""SIGTERM, heard at any time and answered between two steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ckpt.ranks import Ranks

EXIT_STATUS = 128 + signal.SIGTERM
_KEY = "preempted"


class Preemption:
    """Remembers that the process was told to stop, and finds a step at which all ranks can."""

    def __init__(self, ranks: Ranks) -> None:
        self.asked = False
        self._ranks = ranks
        self._heard_at: int | None = None
        self._ask_next = 0.0
        self._previous: Any = None
        self._installed: Callable[[int, FrameType | None], None] | None = None

    def listen(self) -> None:
        """Take SIGTERM. A handler that was there before is called as well. Only the main thread can do this."""
        if threading.current_thread() is not threading.main_thread() or self._installed is not None:
            return
        previous = signal.getsignal(signal.SIGTERM)

        def handler(number: int, frame: FrameType | None) -> None:
            self.asked = True
            if callable(previous):
                previous(number, frame)

        self._previous, self._installed = previous, handler
        signal.signal(signal.SIGTERM, handler)

    def close(self) -> None:
        """Put back the handler that was there before."""
        if self._installed is not None and signal.getsignal(signal.SIGTERM) is self._installed:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
        self._installed = None

    def due(self, step: int) -> bool:
        """Whether to stop after this step: the one after the last rank has heard.

        Nobody waits here. The ranks are at most one step apart, since each step of training brings them together; a
        rank that waited for the others would keep them from ever getting here.
        """
        self.asked = self.asked or self._others_were_asked()
        if not self.asked:
            return False
        if self._heard_at is None:
            self._heard_at = step
            self._ranks.note(_KEY, str(step))
        heard = self._ranks.notes(_KEY)
        later = self._ranks.world_size > 1
        return len(heard) == self._ranks.world_size and step >= max(map(int, heard.values())) + later

    def _others_were_asked(self) -> bool:
        """A signal may reach one rank alone. Asking costs a round trip, so it is done once a second."""
        if self._ranks.world_size == 1 or time.monotonic() < self._ask_next:
            return False
        self._ask_next = time.monotonic() + 1.0
        return bool(self._ranks.notes(_KEY))
