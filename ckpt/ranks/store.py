"""The process group's store, with a deadline for every call.

The store's client blocks inside C++ for as long as its server is frozen, or its host lost without a TCP reset, whatever
timeout it was built with. So calls are made on a daemon thread, and the caller waits no longer than its deadline.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, and not listed

from ckpt.errors import RanksError

T = TypeVar("T")
_LEAST = 3.0  # seconds: a store on a busy machine may be slow to answer
_AT_ONCE = 256  # keys in one call
_AGAIN = 1.0  # seconds for a store that did not answer the call before


class LostStoreError(RanksError):
    """The connection to the store has ended: the process that hosts it is gone."""


class TimedStore:
    """A store on which no call lasts longer than `timeout` seconds: after that it raises a RanksError."""

    def __init__(self, store: Store, timeout: float, calls: _CallThread | None = None) -> None:
        self._store = store
        self._timeout = max(timeout, _LEAST)
        self._calls = calls or _CallThread()

    def below(self, prefix: str) -> TimedStore:
        """The same store, with keys below a prefix of their own."""
        return TimedStore(PrefixStore(prefix, self._store), self._timeout, self._calls)

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> str:
        return self._call(lambda: self._store.get(key)).decode()

    def get_all(self, keys: list[str]) -> list[str]:
        """The values of many keys, all of which are there: a few requests, however many keys."""
        return [value.decode() for value in self._chunked(keys, self._store.multi_get)]

    def check(self, keys: list[str]) -> bool:
        return self._call(lambda: self._store.check(keys))

    def check_each(self, keys: list[str]) -> list[bool]:
        """Whether each of many keys is there."""
        return self._each(keys, lambda key: self._store.check([key]))

    def add_each(self, keys: list[str], amount: int) -> list[int]:
        return self._each(keys, lambda key: self._store.add(key, amount))

    def delete_each(self, keys: list[str]) -> None:
        self._each(keys, self._store.delete_key)

    def add(self, key: str, amount: int) -> int:
        return self._call(lambda: self._store.add(key, amount))

    def delete_key(self, key: str) -> bool:
        return self._call(lambda: self._store.delete_key(key))

    def compare_set(self, key: str, expected: str, value: str) -> str:
        return self._call(lambda: self._store.compare_set(key, expected, value)).decode()

    def _each(self, keys: list[str], do: Callable[[str], T]) -> list[T]:
        """One request for each key. The thread that makes them is woken once for many: that costs more than they do."""
        return self._chunked(keys, lambda some: [do(key) for key in some])

    def _chunked(self, keys: list[str], do: Callable[[list[str]], list[T]]) -> list[T]:
        """As many keys in one call as are sure to be done within its deadline."""
        found: list[T] = []
        for start in range(0, len(keys), _AT_ONCE):
            found += self._call(partial(do, keys[start : start + _AT_ONCE]))
        return found

    def _call(self, do: Callable[[], T]) -> T:
        try:
            return self._calls.make(do, self._timeout)
        except TimeoutError:
            raise RanksError(
                f"the process group's store{_address(self._store)} did not answer within {self._timeout:g} s. "
                f"{_host()} hosts it: that process is stopped, or its host is overloaded or lost. Earlier "
                "checkpoints are kept. End all ranks and start the job again: it continues from the newest checkpoint."
            ) from None
        except RuntimeError as error:
            raise LostStoreError(
                f"the ranks cannot reach each other any more: a rank or its launcher died ({error})"
            ) from error


class _CallThread:
    """A daemon thread that makes calls in the order in which they are submitted.

    Being a daemon, it does not keep the interpreter from ending when it is stuck in the store's client. A forked child
    starts a thread of its own.
    """

    def __init__(self) -> None:
        self._process = 0
        self._stuck: _Call | None = None
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._guard = threading.Lock()

    def make(self, do: Callable[[], T], timeout: float) -> T:
        call = _Call(do)
        self._started().put(call)
        if not call.done.acquire(timeout=min(timeout, _AGAIN) if self._stuck else timeout):
            call.given_up, self._stuck = True, call
            raise TimeoutError
        self._stuck = None
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def __del__(self) -> None:
        self._queue.put(None)

    def _started(self) -> SimpleQueue[_Call | None]:
        if self._process != os.getpid():
            with self._guard:
                if self._process != os.getpid():
                    self._queue = SimpleQueue()
                    threading.Thread(target=_serve, args=(self._queue,), name="ckpt-store", daemon=True).start()
                    self._process = os.getpid()
        return self._queue


class _Call:
    def __init__(self, do: Callable[[], Any]) -> None:
        self.do = do
        self.given_up = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()


def _serve(queue: SimpleQueue[_Call | None]) -> None:
    while (call := queue.get()) is not None:
        if not call.given_up:
            try:
                call.result = call.do()
            except BaseException as error:  # raised where the call was made
                call.error = error
        call.done.release()
        del call  # or the last call, and what it refers to, would live until the next


def _address(store: Any) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return f" at {store.host}:{store.port}" if hasattr(store, "port") else ""


def _host() -> str:
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return "torchrun's agent on the first host" if launched else "The process of rank 0 (or your launcher)"
