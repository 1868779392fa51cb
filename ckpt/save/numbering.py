"""Sequence numbers: one count for all checkpoints of a run, wherever they are written."""

from __future__ import annotations

import threading

from ckpt.formats.native.manifest import LARGEST_SEQUENCE


class Numbering:
    """Hands out sequence numbers in the order in which states are captured, though several saves may be under way."""

    def __init__(self) -> None:
        self._last = 0
        self._guard = threading.Lock()

    def note(self, known: int) -> None:
        """Record a number that is in use: those that are handed out from now on are above it."""
        with self._guard:
            self._last = max(self._last, known)

    def reserve(self, known: int) -> int:
        """The next number, above `known` and above all that were handed out."""
        with self._guard:
            self._last = next_sequence(max(self._last, known))
            return self._last


def next_sequence(known: int) -> int:
    """The number after `known`. At the end of all numbers it is `known` again, and the time of the commit decides."""
    return min(known + 1, LARGEST_SEQUENCE)
