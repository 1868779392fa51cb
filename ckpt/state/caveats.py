"""What a run does that its checkpoints cannot bring back: told once, and named by whoever resumes from one of them."""

from __future__ import annotations

import logging

from ckpt.util.console import say

_log = logging.getLogger("ckpt")


class Caveats:
    """Warnings of one manager, each told once: in the log, and on the console where the log goes elsewhere.

    `lasting` holds those that are true of its checkpoints. A resume from one names them in `Restored.approximated`.
    """

    def __init__(self, *, aloud: bool) -> None:
        self.lasting: dict[str, str] = {}
        self._aloud = aloud
        self._told: set[str] = set()
        self._approximated: dict[str, str] = {}

    def resumed(self, approximated: dict[str, str]) -> None:
        """A checkpoint was loaded: `approximated` is what its `Restored` names, also what is found out later."""
        self._approximated = approximated
        self.lasting.clear()

    def tell(self, key: str, text: str) -> None:
        """Warn, once for each key. The main rank speaks for all."""
        if key in self._told:
            return
        self._told.add(key)
        if self._aloud:
            if _log.hasHandlers():  # without one, Python writes warnings to standard error itself
                say(f"ckpt: {text}")
            _log.warning("%s", text)

    def differs(self, key: str, text: str) -> None:
        """The resumed run is not what the uninterrupted one would be."""
        self._approximated.setdefault(key, text)
        self.tell(f"differs/{key}", text)

    def note(self, key: str, text: str) -> None:
        """A resume from the checkpoints that are saved from now on will not be exact; told at the next save."""
        self.lasting.setdefault(key, text)

    def tell_lasting(self) -> None:
        for key, text in self.lasting.items():
            self.tell(f"lasting/{key}", text)
