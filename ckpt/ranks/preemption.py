"""Preemption: SIGTERM may come at any time; all ranks stop after the same training step."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ckpt.ranks.common_step import CommonStep
from ckpt.ranks.group import Ranks
from ckpt.ranks.signals import SignalListener
from ckpt.util.fork_safety import OwnerProcess

_log = logging.getLogger("ckpt")

EXIT_STATUS = 128 + signal.SIGTERM
_TICK = 0.1  # seconds


class Preemption:
    """Remembers SIGTERM, or Ctrl-C with `sigint`, and finds a step after which all ranks can stop.

    `grace`: seconds after which the process ends, whatever it waits for, if it has not saved by then.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        sigint: bool = False,
        grace: float | None = None,
        on_told: Callable[[float | None], None] = lambda left: None,
    ) -> None:
        """`on_told`: called, from a signal's handler too, with what is left of the grace period, if there is one."""
        self._on_told = on_told
        self.exit_status = EXIT_STATUS
        self._stop = CommonStep(ranks, "stop")
        self._stopped = False
        self._sigterm = SignalListener(signal.SIGTERM, lambda: self._told(EXIT_STATUS))
        self._sigint = SignalListener(signal.SIGINT, lambda: self._told(128 + signal.SIGINT)) if sigint else None
        self._grace = _Grace(grace) if grace is not None else None

    @property
    def asked(self) -> bool:
        """Whether this rank, or, as far as it knows, another was told to terminate."""
        return self._stop.asked

    @asked.setter
    def asked(self, value: bool) -> None:
        self._stop.asked = value

    def listen(self) -> None:
        """Answer SIGTERM from now on. Does nothing outside the main thread."""
        self._sigterm.listen()
        self._watch()

    def listen_early(self) -> None:
        """Answer Ctrl-C, if that is wanted, before loader workers are started."""
        if self._sigint is not None:
            self._sigint.listen()
            self._watch()

    def close(self) -> None:
        """Restore the previous handlers, unless others were installed since. The grace period is over."""
        self._sigterm.close()
        if self._sigint is not None:
            self._sigint.close()
        self.saved()

    def saved(self) -> None:
        """The last save is done: the grace period is over."""
        if self._grace is not None:
            self._grace.is_over = True

    def due(self, step: int) -> bool:
        """Whether to stop after this step. Once it is, it is after every other."""
        self._stopped = self._stopped or self._stop.due(step)
        if self._stopped or self.asked:
            self._begin_end(self.exit_status)  # another rank was told, and it may have been this one's save
        return self._stopped

    def _told(self, status: int) -> None:
        self.asked, self.exit_status = True, status
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
                "told to terminate, and not saved within the grace period of %g s: ending. The last save is given up; "
                "earlier checkpoints are kept.", self._seconds,
            )  # fmt: skip
            sys.stdout.flush()
        os._exit(self._status)
