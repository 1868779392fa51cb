"""Notes which functions of the library a process calls, for the test that runs then. Imports nothing of the project.

A process learns the test from a file that pytest's worker keeps: when it starts, and when it is forked. Each function
is written down at its first call, so that a process that is killed has told what it did.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PARTS = tuple(os.path.join(_ROOT, part) + os.sep for part in ("ckpt", "formats", "storage"))
_OF_FUNCTIONS = inspect.CO_OPTIMIZED  # the bodies of modules and classes run once, for whatever test comes first


class Tracer:
    """One in a process."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._test = ""
        self._seen: set[CodeType] = set()
        self._output = -1
        self.forked()
        os.register_at_fork(after_in_child=self.forked)
        if sys.version_info >= (3, 12):
            watch = sys.monitoring
            watch.use_tool_id(watch.COVERAGE_ID, "ckpt mutants")
            watch.register_callback(watch.COVERAGE_ID, watch.events.PY_START, self._started)
            watch.set_events(watch.COVERAGE_ID, watch.events.PY_START)

    def forked(self) -> None:
        """This is a new process: of the test that runs now, and with a file of its own."""
        path = os.path.join(self.folder, f"reached-{os.getpid()}")
        self._output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            with open(os.path.join(self.folder, f"current-{os.environ['CKPT_REACH_WORKER']}")) as file:
                self.test(file.read())
        except (KeyError, OSError):
            self.test("")  # before the first test

    def test(self, name: str) -> None:
        """From now on, what is called is called by this test."""
        self._test, self._seen = name, set()
        if sys.version_info >= (3, 12):
            sys.monitoring.restart_events()
        else:  # for each test: whatever sets a tracer of its own, and takes it out again, takes this one out with it
            threading.settrace(self._called)
            sys.settrace(self._called)

    def _started(self, code: CodeType, offset: int) -> Any:
        self._note(code)
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        self._note(frame.f_code)

    def _note(self, code: CodeType) -> None:
        if code not in self._seen and code.co_flags & _OF_FUNCTIONS and code.co_filename.startswith(_PARTS):
            self._seen.add(code)
            if self._test:
                path = os.path.relpath(os.path.realpath(code.co_filename), _ROOT)
                os.write(self._output, f"{self._test}\t{path}::{getattr(code, 'co_qualname', code.co_name)}\n".encode())


def begin() -> None:
    global tracer
    if tracer is None:
        tracer = sys.__dict__["_ckpt_tracer"] = Tracer(os.environ["CKPT_REACH"])


tracer: Tracer | None = None
