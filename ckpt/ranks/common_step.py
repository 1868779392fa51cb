"""A step to come after which all ranks do the same, found while they train on."""

from __future__ import annotations

import math
import time

from ckpt.ranks.group import MAIN, Ranks
from ckpt.ranks.store import LostStoreError

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
