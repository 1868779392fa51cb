"""Saves in the background: one is being written, and at most one waits for its turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from ckpt.util.threads import SerialWorker


class QueuedSave(NamedTuple):
    """A save that was captured: its name, what writes it, and what gives it up."""

    name: str
    run: Callable[[], None]
    discard: Callable[[], None]


class SaveQueue:
    """Runs saves one after the other in the save thread. `wait` or `check` raises the error of one that failed."""

    def __init__(self) -> None:
        self._worker = SerialWorker("ckpt-save", caller_first=True)
        self._turn = threading.Condition()
        self._is_running = False
        self._waiting: QueuedSave | None = None
        self._earlier: BaseException | None = None  # an error that nobody has been told yet

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._worker.busy

    def add(self, save: QueuedSave) -> None:
        """Begin this save, after the one under way if there is one. Blocks while another waits for its turn.

        If the one before has failed, that is raised, and this one is not begun.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._waiting is None)
            self._put(save)

    def withdraw(self) -> QueuedSave | None:
        """Take back the save that waits for its turn, if there is one."""
        with self._turn:
            save, self._waiting = self._waiting, None
            return save

    def restore(self, save: QueuedSave) -> None:
        """Put a save back that was withdrawn. None was added meanwhile."""
        with self._turn:
            try:
                self._worker.check()
            except BaseException as error:  # of the one before: raised later, as this one must be written all the same
                self._earlier = error
            self._put(save)

    def wait(self) -> None:
        """Until no save is under way. Raises the error of a failed one, once."""
        self._worker.wait()
        self._raise_earlier()

    def check(self) -> None:
        """Raise the error of a failed save, if none is under way. Does not wait."""
        self._worker.check()
        self._raise_earlier()

    def _raise_earlier(self) -> None:
        error, self._earlier = self._earlier, None
        if error is not None:
            raise error

    def _put(self, save: QueuedSave) -> None:
        if self._is_running:
            self._waiting = save
        else:
            self._worker.start(lambda: self._run_all(save))
            self._is_running = True  # the thread needs the lock to end

    def _run_all(self, save: QueuedSave) -> None:
        """Run a save, and every one that waits when it is done, though it may have failed."""
        error: BaseException | None = None
        following: QueuedSave | None = save
        while following is not None:
            try:
                following.run()
            except BaseException as failure:
                error = error or failure
            following = self._next()
        if error is not None:
            raise error

    def _next(self) -> QueuedSave | None:
        with self._turn:
            save, self._waiting = self._waiting, None
            self._is_running = save is not None
            self._turn.notify_all()
            return save
