"""The process group's store, with a deadline for every call, and the heartbeats in it.

The store's client blocks inside C++ for as long as its server is frozen, or its host lost without a TCP reset, whatever
timeout it was built with. So calls are made on a daemon thread, and the caller waits no longer than its deadline. A
rank at work counts up a key in the store, so that others wait for it beyond their timeout.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
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
                f"{_host()} runs the store: that process has stopped, or its host is overloaded or lost. Earlier "
                "checkpoints are kept. Stop all ranks and start the job again: it continues from the newest checkpoint."
            ) from None
        except RuntimeError as error:
            raise LostStoreError(
                f"the ranks have lost the connection to each other, because a rank or its launcher died ({error})"
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
            call.given_up, self._stuck = True, call  # if it has begun, the store may still carry it out
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
        self.done = threading.Lock()  # released by the thread that makes the call
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


_LONGEST = 20.0  # seconds between two checks
_SPELLED_OUT = 3  # ranks of a run, each with its number
_MOST_RUNS = 8


@dataclass
class LivenessWatch:
    """One wait for other ranks: when each rank's heartbeat count last changed."""

    timeout: float
    longest: float = _LONGEST
    _seen: dict[int, tuple[int, float]] = field(default_factory=dict)
    _next: float = 0.0

    def is_due(self) -> bool:
        """Whether to check again: not at every poll, since a check costs one request per rank."""
        now = time.monotonic()
        due = now >= self._next
        if due:
            self._next = now + min(self.timeout / 8, self.longest)
        return due

    def silent(self, counts: dict[int, int]) -> list[int]:
        """The ranks whose heartbeat count has not changed for the timeout."""
        now = time.monotonic()
        for rank, count in counts.items():
            if rank not in self._seen or self._seen[rank][0] != count:
                self._seen[rank] = (count, now)
        return [rank for rank in counts if now - self._seen[rank][1] >= self.timeout]


def ranks_by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks that have each value."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def format_ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 1, 2`, `ranks 0 to 62`; of many runs the first ones, and how many ranks more."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > _SPELLED_OUT else ", ".join(map(str, run)) for run in runs]
    more = sum(map(len, runs[_MOST_RUNS:]))
    return f"ranks {', '.join(texts[:_MOST_RUNS])}" + (f" and {more} more" if more else "")


class Heartbeat:
    """Counts up a rank's key once per interval, on a daemon thread, while any caller of this process is `running`."""

    def __init__(self, store: TimedStore, rank: int, interval: float) -> None:
        self._store = store
        self._key = f"alive/{rank}"
        self._interval = interval
        self._users = 0
        self._done = threading.Event()
        self._guard = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The first context to be entered starts the thread, the last to be left stops it."""
        with self._guard:
            self._users += 1
            if self._users == 1:
                self._done = threading.Event()  # a new one: the thread before may not have seen that its own is set
                threading.Thread(target=self._run, args=(self._done,), name="ckpt-alive", daemon=True).start()
        try:
            yield
        finally:
            with self._guard:
                self._users -= 1
                if self._users == 0:
                    self._done.set()

    def beat(self) -> None:
        self._store.add(self._key, 1)

    def _run(self, done: threading.Event) -> None:
        while not done.wait(self._interval):
            with suppress(RanksError):  # the store is gone: a call that needs it reports that
                self.beat()
