"""Preemption: SIGTERM may come at any time; all ranks stop after the same training step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from ckpt.ranks.common_step import CommonStep
from ckpt.ranks.group import Ranks
from ckpt.util.fork_safety import OwnerProcess

EXIT_STATUS = 128 + signal.SIGTERM
_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class Preemption:
    """Remembers SIGTERM, and finds a step after which all ranks can stop."""

    def __init__(self, ranks: Ranks) -> None:
        self._stop = CommonStep(ranks, "stop")
        self._stopped = False
        self._previous: _Handler = None
        self._installed: Callable[[int, FrameType | None], None] | None = None

    @property
    def asked(self) -> bool:
        """Whether this rank, or, as far as it knows, another was told to terminate."""
        return self._stop.asked

    @asked.setter
    def asked(self, value: bool) -> None:
        self._stop.asked = value

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
        """Whether to stop after this step. Once it is, it is after every other."""
        self._stopped = self._stopped or self._stop.due(step)
        return self._stopped
