"""How the ranks of a job come to an agreement.

They talk through the process group's store and never through a collective: a rank that does not call `save_state` is
then named after the deadline, where a collective would hang, or be mistaken for one of the training's own.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol

import torch.distributed as dist

from ckpt.errors import RanksError
from ckpt.ranks.built_managers import BuiltManagers, built_here
from ckpt.ranks.heartbeat import Heartbeat
from ckpt.ranks.liveness import LivenessWatch, format_ranks
from ckpt.ranks.shutdown import Unread, linger
from ckpt.ranks.store import TimedStore

MAIN = 0
OWN_ROOTS = "own roots"  # the name under which managers meet whose hosts may have roots of their own
_FAILURES = "failures"


class Ranks(Protocol):
    """The processes of one job. One process and many look alike."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def timeout(self) -> float:
        """Seconds to wait for a rank that shows nothing."""

    def channel(self, name: str) -> Ranks:
        """The same ranks, for talks that do not get in the way of others: another thread may hold them."""

    def gather(self, call: str, data: str) -> list[str]:
        """On the main rank: what every rank gave, in the order of ranks. On the others: nothing, at once."""

    def broadcast(self, call: str, data: str) -> str:
        """What the main rank gave, on every rank."""

    def working(self, *, job_wide: bool = False) -> AbstractContextManager[None]:
        """Send heartbeats while the context lasts, so that the other ranks wait for this one beyond their timeout.

        With `job_wide`, ranks that wait in a call of another manager see them too. The block must not wait for any
        rank itself: two ranks that waited for each other would then wait forever.
        """

    def note(self, key: str, value: str) -> None:
        """Leave a note for all, once under each key. Waits for nobody."""

    def notes(self, key: str) -> dict[int, str]:
        """The notes left so far under a key, by rank. Waits for nobody; costs one question while there are none."""

    def publish(self, key: str, value: str) -> None:
        """Tell all ranks something, in place of what was told under that key before. Waits for nobody."""

    def published(self, key: str) -> str | None:
        """What was last told under a key, if anything was. Waits for nobody."""

    def first_wins(self, key: str, value: str) -> str:
        """The value of whoever comes first; the same for all. Waits for nobody."""

    def silent(self, ranks: list[int], watched: LivenessWatch) -> list[int]:
        """Those of the ranks that have not shown for the timeout that they are at work. Waits for nobody."""

    def linger(self) -> None:
        """Return when the others have read what this rank told them last, or after a while. Raises nothing.

        To be called before the process ends: the main rank may host the store, and would take it along.
        """


class SingleProcess:
    """One process."""

    rank = MAIN
    world_size = 1
    timeout = math.inf

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    def channel(self, name: str) -> Ranks:
        return SingleProcess()

    def gather(self, call: str, data: str) -> list[str]:
        return [data]

    def broadcast(self, call: str, data: str) -> str:
        return data

    def working(self, *, job_wide: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def silent(self, ranks: list[int], watched: LivenessWatch) -> list[int]:
        return []

    def linger(self) -> None:
        """Nobody waits for anything."""

    def note(self, key: str, value: str) -> None:
        self._told[key] = value

    def notes(self, key: str) -> dict[int, str]:
        return {MAIN: self._told[key]} if key in self._told else {}

    def publish(self, key: str, value: str) -> None:
        self._told[key] = value

    def published(self, key: str) -> str | None:
        return self._told.get(key)

    def first_wins(self, key: str, value: str) -> str:
        return self._told.setdefault(key, value)


class StoreGroup:
    """Several processes, through the store of the default process group.

    `job` holds what is not one manager's alone: what each rank has built, and its signs of life.
    """

    def __init__(
        self, store: TimedStore, rank: int, world_size: int, timeout: float, job: TimedStore, built: BuiltManagers
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self.timeout = timeout
        self._job = job
        self._built = built
        self._turn = 0
        self._attempt = 0  # how often the main rank has given up waiting for others
        self._used: list[str] = []
        self._unread = Unread(store, built.unread)
        self._family = [self]
        interval = min(1.0, timeout / 4)
        self._alive = Heartbeat(store, rank, interval)
        self._alive_in_job = Heartbeat(job, rank, interval)

    def channel(self, name: str) -> Ranks:
        store = self._store.below(name)
        child = StoreGroup(store, self.rank, self.world_size, self.timeout, self._job, self._built)
        self._family.append(child)
        return child

    def gather(self, call: str, data: str) -> list[str]:
        if self.rank != MAIN:
            self._attempt = self._store.add(_FAILURES, 0)
            self._store.set(self._from(self.rank), data)
            self._turn += 1
            return []
        keys = [self._from(rank) for rank in range(self.world_size)]
        self._store.set(keys[self.rank], data)
        try:
            self._await(dict(enumerate(keys)), call)
        except RanksError as error:
            self._give_up(str(error), keys)
            raise
        answers = [self._store.get(key) for key in keys]
        for key in [*keys, *self._used]:  # whoever answered has read what was shared before
            self._store.delete_key(key)
        self._used.clear()
        self._unread.clear()
        self._turn += 1
        return answers

    def broadcast(self, call: str, data: str) -> str:
        key = f"{self._turn}/all"
        if self.rank == MAIN:
            self._store.set(key, data)
            self._used += [key, f"{key}/read"]
            self._unread.expect(f"{key}/read", self.world_size - 1)
        else:
            try:
                self._await({MAIN: key}, call)
            except RanksError:
                self._step_back()
                raise
            data = self._store.get(key)
            self._unread.confirm(f"{key}/read")
        self._turn += 1
        return data

    def working(self, *, job_wide: bool = False) -> AbstractContextManager[None]:
        return (self._alive_in_job if job_wide else self._alive).going()

    def note(self, key: str, value: str) -> None:
        self._store.set(f"{key}/{self.rank}", value)
        self._store.add(f"{key}/count", 1)

    def notes(self, key: str) -> dict[int, str]:
        if self._store.add(f"{key}/count", 0) == 0:
            return {}
        keys = {rank: f"{key}/{rank}" for rank in range(self.world_size)}
        return {rank: self._store.get(one) for rank, one in keys.items() if self._store.check([one])}

    def publish(self, key: str, value: str) -> None:
        self._store.set(f"{key}/published", value)

    def published(self, key: str) -> str | None:
        key = f"{key}/published"
        return self._store.get(key) if self._store.check([key]) else None

    def first_wins(self, key: str, value: str) -> str:
        return self._store.compare_set(key, "", value)

    def silent(self, ranks: list[int], watched: LivenessWatch) -> list[int]:
        places = (self._store, self._job)
        return watched.silent({rank: sum(place.add(f"alive/{rank}", 0) for place in places) for rank in ranks})

    def linger(self) -> None:
        linger([one._unread for one in self._family], self.timeout)

    def _from(self, rank: int) -> str:
        return f"{self._turn}.{self._attempt}/from/{rank}"

    def _give_up(self, text: str, keys: list[str]) -> None:
        """Tell the ranks that did answer whom this one has waited for in vain; or each of them would blame this one."""
        with suppress(RanksError):
            there = sum(self._store.check([key]) for key in keys)
            self._attempt += 1
            self._store.set(f"{_FAILURES}/{self._attempt}", text)
            self._store.add(_FAILURES, 1)
            self._unread.expect(f"{_FAILURES}/{self._attempt}/read", there - 1)

    def _step_back(self) -> None:
        """The gather before was not answered: a later call meets the main rank there.

        Unless the main rank has taken the answer: then it goes on without this rank.
        """
        self._turn -= 1
        with suppress(RanksError):
            if not self._store.delete_key(self._from(self.rank)):
                self._turn += 2

    def _await(self, keys: dict[int, str], call: str) -> None:
        """Wait for the keys of ranks, as long as those that are missing show that they are at work.

        By asking again and again: a store that is told to wait keeps the thread that shows we are alive from it.
        """
        pause = _SHORTEST
        watched = LivenessWatch(self.timeout) if self.rank == MAIN else LivenessWatch(self.timeout, longest=1.0)
        while not self._store.check(list(keys.values())):
            if watched.is_due():
                self._look(keys, call, watched)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST, _LONGEST_PER_RANK * self.world_size)

    def _look(self, keys: dict[int, str], call: str, watched: LivenessWatch) -> None:
        """Raise if ranks are silent. The main rank, which others wait for, shows that it waits itself."""
        if self.rank == MAIN:
            self._alive.beat()
        elif self._store.add(_FAILURES, 0) > self._attempt:
            failure = f"{_FAILURES}/{self._attempt + 1}"
            text = self._store.get(failure)
            self._unread.confirm(f"{failure}/read")
            raise RanksError(text)
        silent = self.silent([rank for rank, key in keys.items() if not self._store.check([key])], watched)
        if silent:
            raise RanksError(
                f"{call}: {format_ranks(silent)} did not answer within {self.timeout:g} s."
                f"{self._built.compared(self._job, self.rank, silent) or f' {_ADVICE}'} "
                f"{'Nothing was committed; earlier' if self.rank == MAIN else 'Earlier'} checkpoints stand."
            )


_SHORTEST, _LONGEST = 0.0002, 0.1  # seconds between two questions
_LONGEST_PER_RANK = 0.002  # few ranks may ask more often than a thousand

_ADVICE = (
    "Every rank must make this call: take it out of 'if rank == 0:' (or is_main_process). "
    "If they do, look at their logs: they may have died, or be slower than timeout= allows."
)


def find_ranks(root: str, timeout: float, *, own_root: bool = False) -> Ranks:
    """The ranks of this job, for a manager of `root`.

    Managers of one root meet: the n-th of each rank. Where hosts may have roots of their own (`own_root`), paths may
    differ between ranks, so the n-th such manager of each rank meets the others' n-th.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            raise RanksError(
                f"this is one of {os.environ['WORLD_SIZE']} processes, but they have no process group yet: every one "
                "would write on its own. Call torch.distributed.init_process_group() before StateManager(...)."
            )
        return SingleProcess()
    job = TimedStore(dist.distributed_c10d._get_default_store(), timeout).below("ckpt")
    built = built_here()
    key = built.add(OWN_ROOTS if own_root else root, root)
    built.publish(job, dist.get_rank())
    return StoreGroup(job.below(key), dist.get_rank(), dist.get_world_size(), timeout, job, built)
