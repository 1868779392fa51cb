"""After which steps a run saves by itself, and after which it stops: the same on every rank.

It saves every so many steps, so often by the clock of rank 0, or after SIGUSR1. It stops after SIGTERM or Ctrl-C. Any
rank may get a signal at any time.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

from ckpt.ranks.consensus import MAIN, Ranks
from ckpt.ranks.store_and_heartbeats import LostStoreError
from ckpt.util.option_values import parse_duration
from ckpt.util.threads import OwnerProcess

_POLL = 1.0  # seconds


class CommonStep:
    """Finds a step that no rank has passed, once any of them has asked for one.

    No rank waits here: training synchronises the ranks, and a rank that waited would keep the others from reaching
    their next step. The main rank proposes a step to come; each rank that has not passed it acknowledges it; the first
    rank to reach it checks whether all have, and its finding holds for all (`first_wins`). If a rank had passed the
    step already, the main rank proposes another one, farther ahead.
    """

    def __init__(self, ranks: Ranks, what: str) -> None:
        self.asked = False  # by this rank, or, as far as it knows, by another
        self._ranks = ranks
        self._what = what
        self._round = 0
        self._announced = False
        self._acknowledged = self._target = 0
        self._ahead = 1
        self._next_poll = 0.0

    def due(self, step: int) -> bool:
        """Whether this is the step. The same on every rank; then the next round begins, which nobody has asked for."""
        self.asked = self.asked or self._others_have_asked()
        if not self.asked:
            return False
        found = self._ranks.world_size == 1 or self._is_common(step)
        if found:
            self._begin_round()
        return found

    def _is_common(self, step: int) -> bool:
        if not self._announced:
            self._announced = True
            self._ranks.note(self._key("asked"), "")
        target = self._proposed_target(step)
        if step < target and self._acknowledged < target:
            self._acknowledged = target
            self._ranks.note(self._key(f"after/{target}"), "")
        if step != target:
            return False
        ready = len(self._ranks.notes(self._key(f"after/{target}"))) == self._ranks.world_size
        return self._ranks.first_wins(self._key(f"after/{target}/settled"), "now" if ready else "later") == "now"

    def _proposed_target(self, step: int) -> int:
        """The step in question; 0 if none was proposed yet. Past it, the main rank proposes a new one."""
        if self._ranks.rank == MAIN and step > self._target:
            self._ahead *= 2
            self._target = step + self._ahead
            self._ranks.publish(self._key("after"), str(self._target))
        return int(self._ranks.published(self._key("after")) or 0)

    def _others_have_asked(self) -> bool:
        """One rank may have asked alone. Polling costs a request, so it is done once a second."""
        if self._ranks.world_size == 1 or time.monotonic() < self._next_poll:
            return False
        self._next_poll = time.monotonic() + _POLL
        try:
            return bool(self._ranks.notes(self._key("asked")))
        except LostStoreError:  # its host has ended: no fault at the end of training, and a save would report it
            self._next_poll = math.inf
            return False

    def _begin_round(self) -> None:
        self._round += 1
        self.asked = self._announced = False
        self._acknowledged = self._target = 0
        self._ahead = max(1, self._ahead // 2)  # what was far enough is proposed at once

    def _key(self, name: str) -> str:
        return f"{self._what}/{self._round}/{name}"


# Handlers of signals that leave those of others at work.
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
        self.is_listening = False
        self._count = 0

    def listen(self) -> None:
        """Install the handler. Does nothing outside the main thread, or if it is installed."""
        if self._installed is None and threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(self.number)
            self._installed = self._handle
            signal.signal(self.number, self._installed)
            self.is_listening = True

    def close(self) -> None:
        """Restore the previous handler, unless somebody has installed another one since."""
        if self._installed is not None and signal.getsignal(self.number) is self._installed:
            signal.signal(self.number, self._previous or signal.SIG_DFL)
        self._installed, self.is_listening = None, False

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


_log = logging.getLogger("ckpt")

EXIT_STATUS = 128 + signal.SIGTERM
_TICK = 0.1  # seconds


class Preemption:
    """Remembers SIGTERM with `sigterm`, or Ctrl-C with `sigint`, and finds a step after which all ranks can stop.

    `grace`: seconds after which the process ends, whatever it waits for, if it has not saved by then.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        sigterm: bool = True,
        sigint: bool = False,
        grace: float | None = None,
        on_told: Callable[[float | None], None] = lambda left: None,
    ) -> None:
        """`on_told`: called, from a signal's handler too, with what is left of the grace period, if there is one."""
        self._on_told = on_told
        self.exit_status = EXIT_STATUS
        self._stop = CommonStep(ranks, "stop")
        self._is_alone = ranks.world_size == 1
        self._stopped = False
        self._sigterm = SignalListener(signal.SIGTERM, lambda: self._told(EXIT_STATUS)) if sigterm else None
        self._sigint = SignalListener(signal.SIGINT, lambda: self._told(128 + signal.SIGINT)) if sigint else None
        self._grace = _Grace(grace) if grace is not None else None

    def ask(self) -> None:
        """This rank was told to terminate."""
        self._stop.asked = True

    def listen_early(self) -> None:
        """Answer Ctrl-C, if that is wanted, before loader workers are started."""
        if self._sigint is not None:
            self._sigint.listen()
            self._watch()

    def close(self) -> None:
        """Restore the previous handlers, unless somebody has installed others since, and end the grace period."""
        for listener in (self._sigterm, self._sigint):
            if listener is not None:
                listener.close()
        self.saved()

    def saved(self) -> None:
        """The last save is done: the grace period is over."""
        if self._grace is not None:
            self._grace.is_over = True

    @property
    def told(self) -> signal.Signals | None:
        """The signal after which the ranks have stopped; None if they have not."""
        return signal.Signals(self.exit_status - 128) if self._stopped else None

    def due(self, step: int) -> bool:
        """Whether to stop after this step. Once it is, it is after every other.

        From the first of these calls on SIGTERM is answered, if it is to be: only now is there somebody to do so."""
        if self._sigterm is not None and not self._sigterm.is_listening:
            self._sigterm.listen()
            self._watch()
        if self._is_alone and not self._stop.asked and not self._stopped:
            return False
        self._stopped = self._stopped or self._stop.due(step)
        if self._stopped or self._stop.asked:
            self._begin_end(self.exit_status)  # another rank was told, and it may have been this one's save
        return self._stopped

    def _told(self, status: int) -> None:
        self.ask()
        self.exit_status = status
        self._begin_end(status)

    def _begin_end(self, status: int) -> None:
        if self._grace is not None:
            self._grace.begin(status)
        self._on_told(None if self._grace is None else self._grace.left)

    def _watch(self) -> None:
        if self._grace is not None:
            self._grace.watch()


class _Grace:
    """Ends the process when the grace period is over. A thread looks at it: a signal's handler must not start one."""

    def __init__(self, seconds: float) -> None:
        self.is_over = False
        self._seconds = seconds
        self._began: float | None = None
        self._status = EXIT_STATUS
        self._owner = OwnerProcess()
        self._thread: threading.Thread | None = None

    def begin(self, status: int) -> None:
        if self._began is None and self._owner.is_here:
            self._began, self._status = time.monotonic(), status

    @property
    def left(self) -> float:
        """Seconds."""
        return self._seconds - (0.0 if self._began is None else time.monotonic() - self._began)

    def watch(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ckpt-grace", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self.is_over:
            time.sleep(_TICK)
            if self._began is not None and time.monotonic() - self._began > self._seconds and not self.is_over:
                self._end()

    def _end(self) -> None:
        with suppress(Exception):
            _log.error(
                "after the signal to terminate, ckpt could not save within the grace period of %g s, so the process "
                "ends without that save. Earlier checkpoints are kept.", self._seconds,
            )  # fmt: skip
            sys.stdout.flush()
        os._exit(self._status)


class SaveSchedule:
    """Says after which steps to save, the same on every rank.

    `steps`, `time`: after how many, and how much, as text, or as a function that rank 0 calls after every step. Time is
    that of rank 0's clock since the last save or load; the other ranks learn of it, and all save after the same step,
    which is one of the next. `on_sigusr1`: so they do when any of them gets that signal. `what`: not the same for two.
    """

    def __init__(
        self,
        ranks: Ranks,
        steps: int | None,
        time: str | Callable[[], float] | None = None,
        *,
        on_sigusr1: bool = False,
        what: str = "save",
    ) -> None:
        self._main = ranks.rank == MAIN
        self.steps = steps
        seconds = parse_duration(time)
        self._seconds = time if callable(time) else None if seconds is None else lambda: seconds
        self._common = CommonStep(ranks, what) if self._seconds is not None or on_sigusr1 else None
        self._signal = SignalListener(signal.SIGUSR1, self._told) if on_sigusr1 else None
        self.restart()

    def restart(self) -> None:
        """Count the time from now on."""
        self._since = time.monotonic()

    def listen(self) -> None:
        """Answer SIGUSR1 from now on, if that is wanted."""
        if self._signal is not None:
            self._signal.listen()

    def close(self) -> None:
        if self._signal is not None:
            self._signal.close()

    def is_due(self, step: int) -> bool:
        """Whether to save after this step. Every rank asks after every step."""
        asked = self._common is not None and self._is_asked_for(self._common, step)
        return asked or bool(self.steps and step and step % self.steps == 0)

    def _is_asked_for(self, common: CommonStep, step: int) -> bool:
        if self._main and self._seconds is not None and time.monotonic() - self._since >= self._seconds():
            common.asked = True
        return common.due(step)

    def _told(self) -> None:
        if self._common is not None:
            self._common.asked = True
