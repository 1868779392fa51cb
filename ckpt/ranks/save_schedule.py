"""After which steps a run saves by itself: every so many steps, so often by the clock of rank 0, or after SIGUSR1."""

from __future__ import annotations

import signal
import time

from ckpt.ranks.group import MAIN, Ranks
from ckpt.ranks.preemption import CommonStep, SignalListener
from ckpt.util.option_values import parse_duration


class SaveSchedule:
    """Says after which steps to save, the same on every rank.

    `steps`, `time`: after how many, and how much, as text. Time is that of rank 0's clock since the last save or load;
    the other ranks learn of it, and all save after the same step, which is one of the next. `on_sigusr1`: so they do
    when any of them gets that signal.
    """

    def __init__(self, ranks: Ranks, steps: int | None, time: str | None = None, *, on_sigusr1: bool = False) -> None:
        self._main = ranks.rank == MAIN
        self._steps = steps
        self._seconds = parse_duration(time)
        self._common = CommonStep(ranks, "save") if self._seconds is not None or on_sigusr1 else None
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
        asked = self._is_asked_for(step)
        return asked or self._is_due_by_steps(step)

    def _is_due_by_steps(self, step: int) -> bool:
        return bool(self._steps and step and step % self._steps == 0)

    def _is_asked_for(self, step: int) -> bool:
        if self._common is None:
            return False
        if self._main and self._seconds is not None and time.monotonic() - self._since >= self._seconds:
            self._common.asked = True
        return self._common.due(step)

    def _told(self) -> None:
        if self._common is not None:
            self._common.asked = True
