"""After which steps a run saves by itself: every so many steps, or so often by the clock of rank 0."""

from __future__ import annotations

import time

from ckpt.ranks.common_step import CommonStep
from ckpt.ranks.group import MAIN, Ranks
from ckpt.util.durations import parse_duration


class SaveSchedule:
    """Says after which steps to save, the same on every rank.

    `every`: a number of steps, or a time as text. Time is that of rank 0's clock since the last save or load; the other
    ranks learn of it, and all save after the same step, which is one of the next.
    """

    def __init__(self, ranks: Ranks, every: int | str | None) -> None:
        self._main = ranks.rank == MAIN
        self._steps = every if isinstance(every, int) else None
        self._seconds = parse_duration(every)
        self._common = CommonStep(ranks, "save") if self._seconds is not None else None
        self._since = time.monotonic()

    def restart(self) -> None:
        """Count the time from now on."""
        self._since = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether to save after this step. Every rank asks after every step."""
        return self._is_due_by_steps(step) or self._is_due_by_time(step)

    def _is_due_by_steps(self, step: int) -> bool:
        return bool(self._steps and step and step % self._steps == 0)

    def _is_due_by_time(self, step: int) -> bool:
        if self._common is None:
            return False
        if self._main and self._seconds is not None and time.monotonic() - self._since >= self._seconds:
            self._common.asked = True
        return self._common.due(step)
