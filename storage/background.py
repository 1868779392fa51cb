"""One piece of work at a time, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Background:
    """Runs one call at a time in a thread of its own.

    The thread is no daemon: when the program ends, in whatever orderly way, what is under way is finished first. And it
    is no executor: those refuse work while the interpreter shuts down.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, call: Callable[[], object]) -> None:
        """Begin a call. The one before must be done."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(call,), name=self._name)
        self._thread.start()

    def wait(self) -> None:
        """Until the call is done. What it raised is raised here, once."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise what the last call has raised, if it is done and nobody has been told yet."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # for whoever asks
            self._error = error


class Beside:
    """A call that is made in a thread beside this one."""

    def __init__(self, call: Callable[[], Any], name: str) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), name=name)
        self._thread.start()

    def has_failed(self) -> bool:
        """Whether the call has raised, when it is done."""
        self._thread.join()
        return self._error is not None

    def result(self) -> Any:
        """What the call has returned, when it is done; or raised."""
        if self.has_failed():
            raise self._error  # type: ignore[misc]
        return self._result

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._result = call()
        except BaseException as error:  # for whoever asks
            self._error = error
