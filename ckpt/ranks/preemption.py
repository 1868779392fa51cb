"""SIGTERM, heard at any time and answered between two steps."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ckpt.ranks.group import MAIN, Ranks
from ckpt.ranks.store import LostStoreError
from ckpt.util.fork_safety import Owner

EXIT_STATUS = 128 + signal.SIGTERM
_ASKED, _TARGET = "preempted", "stop-after"


class Preemption:
    """Remembers that the process was told to stop, and finds a step at which all ranks can.

    Nobody waits for anybody: training brings the ranks together, and one that waited here would keep the others from
    ever getting here. The main rank names a step to come; each rank that has not got there says so; the first to get
    there looks whether all have said so, and what it finds holds for all. If somebody was past it already, the main
    rank names another one, farther ahead.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.asked = False
        self._ranks = ranks
        self._told = False
        self._acknowledged = self._target = 0
        self._ahead = 1
        self._ask_next = 0.0
        self._previous: Any = None
        self._installed: Callable[[int, FrameType | None], None] | None = None

    def listen(self) -> None:
        """Take SIGTERM. A handler that was there before is called as well. Only the main thread can do this."""
        if threading.current_thread() is not threading.main_thread() or self._installed is not None:
            return
        self._previous = previous = signal.getsignal(signal.SIGTERM)
        owner = Owner()

        def handler(number: int, frame: FrameType | None) -> None:
            self.asked = True
            if not callable(previous) and not owner.is_here:  # nobody would answer it in a forked child
                signal.signal(number, previous or signal.SIG_DFL)
                os.kill(os.getpid(), number)
            elif callable(previous):
                previous(number, frame)
            elif self._installed is None:  # closed, but put back by a handler that came after
                signal.signal(number, previous or signal.SIG_DFL)
                os.kill(os.getpid(), number)

        self._installed = handler
        signal.signal(signal.SIGTERM, handler)

    def close(self) -> None:
        """Put back the handler that was there before."""
        if self._installed is not None and signal.getsignal(signal.SIGTERM) is self._installed:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
        self._installed = None

    def due(self, step: int) -> bool:
        """Whether to stop after this step."""
        self.asked = self.asked or self._others_were_asked()
        if not self.asked:
            return False
        if self._ranks.world_size == 1:
            return True
        if not self._told:
            self._told = True
            self._ranks.note(_ASKED, "")
        return self._agreed(step)

    def _agreed(self, step: int) -> bool:
        target = self._named_target(step)
        if step < target and self._acknowledged < target:
            self._acknowledged = target
            self._ranks.note(f"{_TARGET}/{target}", "")
        if step != target:
            return False
        ready = len(self._ranks.notes(f"{_TARGET}/{target}")) == self._ranks.world_size
        return self._ranks.first_wins(f"{_TARGET}/{target}/settled", "stop" if ready else "go on") == "stop"

    def _named_target(self, step: int) -> int:
        if self._ranks.rank == MAIN and step > self._target:
            self._ahead *= 2
            self._target = step + self._ahead
            self._ranks.publish(_TARGET, str(self._target))
        return int(self._ranks.published(_TARGET) or 0)

    def _others_were_asked(self) -> bool:
        """A signal may reach one rank alone. Asking costs a round trip, so it is done once a second."""
        if self._ranks.world_size == 1 or time.monotonic() < self._ask_next:
            return False
        self._ask_next = time.monotonic() + 1.0
        try:
            return bool(self._ranks.notes(_ASKED))
        except (
            LostStoreError
        ):  # whoever hosted it has left: at the end of training that is no fault; a save would say so
            self._ask_next = math.inf
            return False
