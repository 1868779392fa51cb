"""How the ranks of a job come to an agreement.

They talk through the process group's store and never through a collective: a rank that does not call `save_state` is
then named after the deadline, where a collective would hang, or be mistaken for one of the training's own.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
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

    def gather(self, call: str, data: str) -> list[str]:
        """On the main rank: what every rank gave, in the order of ranks. On the others: nothing, at once."""

    def share(self, call: str, data: str) -> str:
        """What the main rank gave, on every rank. Waits for as long as the main rank shows that it is alive."""

    def alive(self) -> None:
        """The main rank is still at work: those who wait for it go on waiting."""

    def note(self, key: str, value: str) -> None:
        """Leave a note for all, once under each key. Waits for nobody."""

    def notes(self, key: str) -> dict[int, str]:
        """The notes left so far under a key, by rank. Waits for nobody; costs one question while there are none."""


class Alone:
    """One process."""

    rank = MAIN
    world_size = 1

    def __init__(self) -> None:
        self._notes: dict[str, dict[int, str]] = {}

    def gather(self, call: str, data: str) -> list[str]:
        return [data]

    def share(self, call: str, data: str) -> str:
        return data

    def alive(self) -> None:
        """Nobody waits."""

    def note(self, key: str, value: str) -> None:
        self._notes[key] = {MAIN: value}

    def notes(self, key: str) -> dict[int, str]:
        return self._notes.get(key, {})


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RanksError(
            f"the ranks cannot reach each other any more: {error}. A rank or its launcher died."
        ) from error


class Together:
    """Several processes, through the store of the default process group."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._timeout = timeout
        self._turn = 0
        self._beat = 0.0
        self._used: list[str] = []

    @_reachable()
    def gather(self, call: str, data: str) -> list[str]:
        keys = [f"{self._turn}/from/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], data)
        if self.rank != MAIN:
            self._turn += 1
            return []
        self._await_all(keys, call)
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
            self._await_main(key, call)
            data = self._store.get(key).decode()
        self._turn += 1
        return data

    @_reachable()
    def alive(self) -> None:
        if time.monotonic() - self._beat > min(1.0, self._timeout / 4):
            self._beat = time.monotonic()
            self._store.add("alive", 1)

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

    def _await_all(self, keys: list[str], call: str) -> None:
        if self._wait(keys, self._timeout):
            return
        silent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        if silent:
            raise RanksError(
                f"{call}: {_ranks(silent)} did not answer within {self._timeout:g} s. {_ADVICE} "
                f"Nothing was committed; earlier checkpoints stand."
            )

    def _await_main(self, key: str, call: str) -> None:
        seen = self._store.add("alive", 0)
        while not self._wait([key], self._timeout):
            beat = self._store.add("alive", 0)
            if beat == seen:
                self._turn -= 1  # the gather before it was not answered: a later call meets the main rank there
                raise RanksError(f"{call}: rank {MAIN} did not answer within {self._timeout:g} s. {_ADVICE}")
            seen = beat

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Whether the keys came in time."""
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError as error:  # what a store raises differs between stores; what it says does not
            if "timeout" in str(error).lower():
                return False
            raise
        return True


_ADVICE = (
    "Every rank must make this call: take it out of 'if rank == 0:' (or is_main_process). "
    "If they do, look at their logs: they may have died, or be slower than timeout= allows."
)


def _ranks(names: list[str]) -> str:
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"


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
