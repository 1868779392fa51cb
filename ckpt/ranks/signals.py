"""Handlers of signals that leave those of others at work."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

from ckpt.util.fork_safety import OwnerProcess

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class SignalListener:
    """Calls `told` when a signal comes, then the handler that was there before. Ctrl-C interrupts the second time.

    A forked child has no training loop: there the signal does what it did before. But loader workers are left alone by
    Ctrl-C, and children by SIGUSR1, of which they would die.
    """

    def __init__(self, number: signal.Signals, told: Callable[[], None]) -> None:
        self.number = number
        self._told = told
        self._owner = OwnerProcess()
        self._previous: Handler = None
        self._installed: Callable[[int, FrameType | None], None] | None = None
        self._count = 0

    def listen(self) -> None:
        """Install the handler. Does nothing outside the main thread, or if it is installed."""
        if threading.current_thread() is threading.main_thread() and self._installed is None:
            self._previous = signal.getsignal(self.number)
            self._installed = self._handle
            signal.signal(self.number, self._installed)

    def close(self) -> None:
        """Restore the previous handler, unless another one was installed since."""
        if self._installed is not None and signal.getsignal(self.number) is self._installed:
            signal.signal(self.number, self._previous or signal.SIG_DFL)
        self._installed = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        previous = self._previous
        if self._owner.is_here:
            self._told()
        elif (number == signal.SIGINT and get_worker_info() is not None) or number == signal.SIGUSR1:
            return
        answers = self._owner.is_here and self._installed is not None  # or it was put back by a later handler
        if previous is signal.default_int_handler and answers and self._count == 1:
            os.write(2, b"Ctrl-C: saves after this step, and stops; once more stops at once\n")
        elif callable(previous):
            previous(number, frame)
        elif not answers:
            signal.signal(number, previous or signal.SIG_DFL)
            os.kill(os.getpid(), number)
