"""Preemption: SIGTERM may come at any time; all ranks stop after the same training step."""

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
from ckpt.util.fork_safety import OwnerProcess

EXIT_STATUS = 128 + signal.SIGTERM
_ASKED, _TARGET = "preempted", "stop-after"
_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class Preemption:
    """Remembers SIGTERM, and finds a step after which all ranks can stop.

    No rank waits here: training synchronises the ranks, and a rank that waited would keep the others from reaching
    their next step. The main rank proposes a step to come; each rank that has not passed it acknowledges it; the first
    rank to reach it checks whether all have, and its finding holds for all (`first_wins`). If a rank had passed the
    step already, the main rank proposes another one, farther ahead.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.asked = False
        self._ranks = ranks
        self._announced = False
        self._acknowledged = self._target = 0
        self._ahead = 1
        self._next_poll = 0.0
        self._previous: _Handler = None
        self._installed: Callable[[int, FrameType | None], None] | None = None

    def listen(self) -> None:
        """Install a handler for SIGTERM, which also calls the previous one. Does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread() or self._installed is not None:
            return
        self._previous = previous = signal.getsignal(signal.SIGTERM)
        owner = OwnerProcess()

        def handler(number: int, frame: FrameType | None) -> None:
            self.asked = True
            if not callable(previous) and not owner.is_here:  # a forked child has no training loop that would stop
                signal.signal(number, previous or signal.SIG_DFL)
                os.kill(os.getpid(), number)
            elif callable(previous):
                previous(number, frame)
            elif self._installed is None:  # closed, but reinstalled by a handler that was installed later
                signal.signal(number, previous or signal.SIG_DFL)
                os.kill(os.getpid(), number)

        self._installed = handler
        signal.signal(signal.SIGTERM, handler)

    def close(self) -> None:
        """Restore the previous handler, unless another one was installed since."""
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
        if not self._announced:
            self._announced = True
            self._ranks.note(_ASKED, "")
        return self._all_stop_after(step)

    def _all_stop_after(self, step: int) -> bool:
        target = self._proposed_target(step)
        if step < target and self._acknowledged < target:
            self._acknowledged = target
            self._ranks.note(f"{_TARGET}/{target}", "")
        if step != target:
            return False
        ready = len(self._ranks.notes(f"{_TARGET}/{target}")) == self._ranks.world_size
        return self._ranks.first_wins(f"{_TARGET}/{target}/settled", "stop" if ready else "go on") == "stop"

    def _proposed_target(self, step: int) -> int:
        """The step to stop after; 0 if none was proposed yet. Past it, the main rank proposes a new one."""
        if self._ranks.rank == MAIN and step > self._target:
            self._ahead *= 2
            self._target = step + self._ahead
            self._ranks.publish(_TARGET, str(self._target))
        return int(self._ranks.published(_TARGET) or 0)

    def _others_were_asked(self) -> bool:
        """A signal may reach one rank alone. Polling costs a request, so it is done once a second."""
        if self._ranks.world_size == 1 or time.monotonic() < self._next_poll:
            return False
        self._next_poll = time.monotonic() + 1.0
        try:
            return bool(self._ranks.notes(_ASKED))
        except LostStoreError:  # its host has ended: no fault at the end of training, and a save would report it
            self._next_poll = math.inf
            return False
