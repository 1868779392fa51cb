"""Warnings about state that checkpoints cannot restore: given once, and repeated by a resume from such a checkpoint."""

from __future__ import annotations

import logging

from ckpt.util.console import say

_log = logging.getLogger("ckpt")


class Caveats:
    """A manager's warnings, each given once: in the log, and on the console if the log goes elsewhere.

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

    def tell(self, key: str, text: str) -> None:
        """Warn, once for each key, on the rank whose manager is `aloud`."""
        if key in self._given:
            return
        self._given.add(key)
        if self._aloud:
            if _log.hasHandlers():  # without handlers, Python itself writes warnings to standard error
                say(f"ckpt: {text}")
            _log.warning("%s", text)

    def differs(self, key: str, text: str) -> None:
        """Warn that the resumed run differs from an uninterrupted one."""
        self._approximated.setdefault(key, text)
        self.tell(f"differs/{key}", text)

    def note(self, key: str, text: str) -> None:
        """Note that a resume from later checkpoints will not be exact. The warning is given at the next save."""
        self.lasting.setdefault(key, text)

    def tell_lasting(self) -> None:
        for key, text in self.lasting.items():
            self.tell(f"lasting/{key}", text)
