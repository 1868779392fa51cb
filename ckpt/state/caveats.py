"""Warnings about state that checkpoints cannot restore: given once, and repeated by a resume from such a checkpoint."""

from __future__ import annotations

import logging

_log = logging.getLogger("ckpt")


class Caveats:
    """A manager's warnings, each given once, by the main rank. What the report of a resume has named is not repeated.

    `lasting` are those that apply to its checkpoints. A resume from one names them in `Restored.approximated`.
    """

    def __init__(self, *, aloud: bool) -> None:
        self.lasting: dict[str, str] = {}
        self._aloud = aloud
        self._given: set[str] = set()
        self._approximated: dict[str, str] = {}

    def resumed(self, approximated: dict[str, str]) -> None:
        """A checkpoint was loaded: later findings are added to `approximated`, which its `Restored` holds."""
        self._approximated = approximated
        self.lasting.clear()

    def tell(self, key: str, text: str, *, what: str = "") -> None:
        """Warn, once for each key, on the rank whose manager is `aloud`. `what` introduces the text."""
        if key in self._given or text in self._approximated.values():
            return
        self._given.add(key)
        if self._aloud:
            _log.warning("%s%s", what, text)

    def differs(self, key: str, text: str) -> None:
        """Warn that the resumed run differs from an uninterrupted one."""
        self.tell(f"differs/{key}", text)
        self._approximated.setdefault(key, text)

    def note(self, key: str, text: str) -> None:
        """Note that a resume from later checkpoints will not be exact. The warning is given at the next save."""
        self.lasting.setdefault(key, text)

    def tell_lasting(self) -> None:
        for key, text in self.lasting.items():
            self.tell(f"lasting/{key}", text)
