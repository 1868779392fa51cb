"""How the ranks of a job come to an agreement.

They talk through the process group's store and never through a collective: a rank that does not call `save_state` is
then named after the deadline, where a collective would hang, or be mistaken for one of the training's own.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ckpt.errors import RanksError

MAIN = 0


class Ranks(Protocol):
    """The processes of one job. One process and many look alike."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def apart(self, name: str) -> Ranks:
        """The same ranks, for talks that do not get in the way of others: another thread may hold them."""

    def gather(self, call: str, data: str) -> list[str]:
        """On the main rank: what every rank gave, in the order of ranks. On the others: nothing, at once."""

    def share(self, call: str, data: str) -> str:
        """What the main rank gave, on every rank."""

    def working(self) -> AbstractContextManager[None]:
        """While this context lasts, the others know that this rank is at work, and wait for it without end."""

    def note(self, key: str, value: str) -> None:
        """Leave a note for all, once under each key. Waits for nobody."""

    def notes(self, key: str) -> dict[int, str]:
        """The notes left so far under a key, by rank. Waits for nobody; costs one question while there are none."""

    def publish(self, key: str, value: str) -> None:
        """Tell all ranks something, in place of what was told under that key before. Waits for nobody."""

    def published(self, key: str) -> str | None:
        """What was last told under a key, if anything was. Waits for nobody."""

    def settle(self, key: str, value: str) -> str:
        """The value of whoever comes first; the same for all. Waits for nobody."""


class Alone:
    """One process."""

    rank = MAIN
    world_size = 1

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    def apart(self, name: str) -> Ranks:
        return Alone()

    def gather(self, call: str, data: str) -> list[str]:
        return [data]

    def share(self, call: str, data: str) -> str:
        return data

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def note(self, key: str, value: str) -> None:
        self._told[key] = value

    def notes(self, key: str) -> dict[int, str]:
        return {MAIN: self._told[key]} if key in self._told else {}

    def publish(self, key: str, value: str) -> None:
        self._told[key] = value

    def published(self, key: str) -> str | None:
        return self._told.get(key)

    def settle(self, key: str, value: str) -> str:
        return self._told.setdefault(key, value)


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RanksError(
            f"the ranks cannot reach each other any more: a rank or its launcher died ({error})"
        ) from error


class Together:
    """Several processes, through the store of the default process group."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._timeout = timeout
        self._turn = 0
        self._used: list[str] = []

    def apart(self, name: str) -> Ranks:
        return Together(PrefixStore(name, self._store), self.rank, self.world_size, self._timeout)

    @_reachable()
    def gather(self, call: str, data: str) -> list[str]:
        keys = [f"{self._turn}/from/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], data)
        if self.rank != MAIN:
            self._turn += 1
            return []
        self._await(dict(enumerate(keys)), call)
        answers = [self._store.get(key).decode() for key in keys]
        for key in [*keys, *self._used]:  # whoever answered has read what was shared before
            self._store.delete_key(key)
        self._used.clear()
        self._turn += 1
        return answers

    @_reachable()
    def share(self, call: str, data: str) -> str:
        key = f"{self._turn}/all"
        if self.rank == MAIN:
            self._store.set(key, data)
            self._used.append(key)
        else:
            try:
                self._await({MAIN: key}, call)
            except RanksError:
                self._turn -= 1  # the gather before it was not answered: a later call meets the main rank there
                raise
            data = self._store.get(key).decode()
        self._turn += 1
        return data

    @contextmanager
    def working(self) -> Iterator[None]:
        done = threading.Event()
        thread = threading.Thread(target=self._beat_until, args=(done,), name="ckpt-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    @_reachable()
    def note(self, key: str, value: str) -> None:
        self._store.set(f"{key}/{self.rank}", value)
        self._store.add(f"{key}/count", 1)

    @_reachable()
    def notes(self, key: str) -> dict[int, str]:
        if self._store.add(f"{key}/count", 0) == 0:
            return {}
        keys = {rank: f"{key}/{rank}" for rank in range(self.world_size)}
        return {rank: self._store.get(one).decode() for rank, one in keys.items() if self._store.check([one])}

    @_reachable()
    def publish(self, key: str, value: str) -> None:
        self._store.set(f"{key}/published", value)

    @_reachable()
    def published(self, key: str) -> str | None:
        key = f"{key}/published"
        return self._store.get(key).decode() if self._store.check([key]) else None

    @_reachable()
    def settle(self, key: str, value: str) -> str:
        return self._store.compare_set(key, "", value).decode()

    def _beat_until(self, done: threading.Event) -> None:
        while not done.wait(min(1.0, self._timeout / 4)):
            with suppress(RuntimeError):  # the store is gone: the main thread will notice and say so
                self._store.add(f"alive/{self.rank}", 1)

    def _await(self, keys: dict[int, str], call: str) -> None:
        """Wait for the keys of ranks, as long as those that are missing show that they are at work.

        By asking again and again: a store that is told to wait keeps the thread that shows we are alive from it.
        """
        pause = _SHORTEST
        watched = _Watched(self._timeout)
        while not self._store.check(list(keys.values())):
            silent = watched.silent(self._beats(keys)) if watched.look_now() else []
            if silent:
                raise RanksError(
                    f"{call}: {_ranks(silent)} did not answer within {self._timeout:g} s. {_ADVICE} "
                    "Nothing was committed; earlier checkpoints stand."
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST, _LONGEST_PER_RANK * self.world_size)

    def _beats(self, keys: dict[int, str]) -> dict[int, int]:
        """How often each rank that is missing has shown that it is at work."""
        missing = [rank for rank, key in keys.items() if not self._store.check([key])]
        return {rank: self._store.add(f"alive/{rank}", 0) for rank in missing}


@dataclass
class _Watched:
    """Ranks that are waited for: when each was last seen to be alive."""

    timeout: float
    _seen: dict[int, tuple[int, float]] = field(default_factory=dict)
    _next: float = 0.0

    def look_now(self) -> bool:
        """Whether it is time to look again: not at every turn, since it costs a question for each rank."""
        now = time.monotonic()
        due = now >= self._next
        if due:
            self._next = now + self.timeout / 8
        return due

    def silent(self, beats: dict[int, int]) -> list[int]:
        """The ranks that have shown nothing for as long as the timeout."""
        now = time.monotonic()
        for rank, beat in beats.items():
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = (beat, now)
        return [rank for rank in beats if now - self._seen[rank][1] >= self.timeout]


_SHORTEST, _LONGEST = 0.0002, 0.1  # seconds between two questions
_LONGEST_PER_RANK = 0.002  # few ranks may ask more often than a thousand

_ADVICE = (
    "Every rank must make this call: take it out of 'if rank == 0:' (or is_main_process). "
    "If they do, look at their logs: they may have died, or be slower than timeout= allows."
)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


_managers: Counter[str] = Counter()


def find_ranks(root: str, timeout: float) -> Ranks:
    """The ranks of this job, for a manager of `root`."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            raise RanksError(
                f"this is one of {os.environ['WORLD_SIZE']} processes, but they have no process group yet: every one "
                "would write on its own. Call torch.distributed.init_process_group() before StateManager(...)."
            )
        return Alone()
    _managers[root] += 1
    store = dist.distributed_c10d._get_default_store()
    own = PrefixStore(f"ckpt/{_managers[root]}/{root}", store)
    return Together(own, dist.get_rank(), dist.get_world_size(), timeout)
