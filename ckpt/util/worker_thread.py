"""A thread that runs one call after the other, for as long as it is open."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

_Call = Callable[[], object]


class WorkerThread:
    """Runs one call at a time. To start a thread for every block of a file takes the GIL from training too often.

    The thread begins with the first call. It is not a daemon, so it must be closed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    def start(self, call: _Call) -> None:
        """Wait for the previous call, then start this one. Raises the previous one's error."""
        self.wait()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name)
            thread.start()
            self._thread = thread
        self._idle.clear()
        try:
            self._calls.put(call)
        except BaseException:  # an interrupt: nothing would ever be done
            self._idle.set()
            raise

    def wait(self) -> None:
        """Wait for the call. Raises its error, once."""
        self._idle.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the call, and end the thread. An error that nobody waited for is dropped."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # raised by `wait`
                self._error = error
            finally:
                del call  # or what it refers to would live until the next one
                self._idle.set()
