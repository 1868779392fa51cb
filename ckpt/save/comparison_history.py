"""What the ranks of a job have learned about each other's state in earlier saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from ckpt.save.captured_state import CapturedState
from ckpt.save.checksums import fingerprints


@dataclass
class ComparisonHistory:
    """The same on every rank. What should be equal is compared in full at its first save, and by turns from then on.

    Once some of it has differed, no rank trusts in it any more: all of it is compared in full at every save, and each
    rank keeps its own.
    """

    turn: int = 0  # counts the captures, which all ranks make together
    trusted: bool = True
    equal: dict[str, set[str]] = field(default_factory=dict)  # by part: tensors that were compared in full
    reported: set[str] = field(default_factory=set)  # parts whose differences have been logged

    def fingerprints(self, captured: CapturedState, turn: int) -> dict[str, Callable[[], dict[str, str]]]:
        """Those of what should be equal: in full where it is new, else those of this turn."""
        readers: dict[str, Callable[[], dict[str, str]]] = {}
        for key, tensors in captured.should_be_equal():
            known = self.equal.get(key, set())
            first = fingerprints({name: tensor for name, tensor in tensors.items() if name not in known})
            again = fingerprints({name: tensor for name, tensor in tensors.items() if name in known}, turn)
            readers[key] = _both(first, again)
        return readers

    def distrust(self) -> None:
        """Some of what should be equal differs."""
        self.trusted = False
        self.reported.clear()  # what differs now is more than was logged

    def record_equal(self, captured: CapturedState) -> None:
        """The ranks have compared what should be equal."""
        for key, read in captured.fingerprints.items():
            self.equal.setdefault(key, set()).update(read())


def _both(one: Callable[[], dict[str, str]], other: Callable[[], dict[str, str]]) -> Callable[[], dict[str, str]]:
    return cache(lambda: one() | other())
