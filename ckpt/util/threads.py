"""One piece of work at a time, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ckpt.util.fork_safety import OwnerProcess


class ThreadCall:
    """A call that is made in a thread beside this one.

    The thread is no daemon: when the program ends, in whatever orderly way, what is under way is finished first. And it
    is no executor: those refuse work while the interpreter shuts down.
    """

    def __init__(self, call: Callable[[], Any], name: str) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._owner = OwnerProcess()
        self._thread = threading.Thread(target=self._run, args=(call,), name=name)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return not self._done.is_set()

    def has_failed(self) -> bool:
        """Whether the call has raised, when it is done. A forked child, which has no such thread, is refused."""
        if self.busy:
            self._owner.require(self._thread.name)
        self._done.wait()  # before Python 3.13 a thread passes for ended once a signal has interrupted `join`
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
        finally:
            self._done.set()


class SerialWorker:
    """Runs one call at a time, each in a thread beside this one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._call: ThreadCall | None = None

    @property
    def busy(self) -> bool:
        return self._call is not None and self._call.busy

    def start(self, call: Callable[[], object]) -> None:
        """Begin a call. The one before must be done."""
        self.wait()
        self._call = ThreadCall(call, self._name)

    def wait(self) -> None:
        """Until the call is done. What it raised is raised here, once."""
        if self._call is not None:
            self._call.has_failed()
        self.check()

    def check(self) -> None:
        """Raise what the last call has raised, if it is done and nobody has been told yet."""
        if self._call is not None and not self._call.busy:
            done, self._call = self._call, None
            done.result()
