"""Several ranks that exchange data through the process group's store, never through a collective.

A rank that does not make a call is then named after the timeout. A collective would hang, or be mistaken for one of the
training's own. Ranks meet by the order in which they build managers: one that builds another one, or in another order,
waits in vain, and the error says so. Rank 0 often hosts the store, which ends with its process: before a rank ends, it
waits until the others have read its last broadcast.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from ckpt.errors import RanksError
from ckpt.formats.layout import Members
from ckpt.ranks.consensus import MAIN, Ranks
from ckpt.ranks.store_and_heartbeats import Heartbeat, LivenessWatch, TimedStore, format_ranks, ranks_by_value
from ckpt.shown import few

_LONGEST_LINGER = 30.0  # seconds
_PAUSE = 0.01


class UnreadBroadcast:
    """The last broadcast of a group, and how many ranks must confirm that they have read it."""

    def __init__(self, store: TimedStore, unread: set[UnreadBroadcast]) -> None:
        self._store = store
        self._all_unread = unread  # keeps it alive until exit, also in a program that has dropped its manager
        self._key, self._readers = "", 0
        self._process = os.getpid()
        _all.add(self)

    def expect(self, key: str, readers: int) -> None:
        self._key, self._readers = key, readers
        self._all_unread.add(self)

    def confirm(self, key: str) -> None:
        """Called by a rank that has read the broadcast."""
        self._store.add(key, 1)

    def clear(self) -> None:
        self._readers = 0
        self._all_unread.discard(self)

    def is_read(self) -> bool:
        if os.getpid() != self._process:  # a forked child: the connection to the store is its parent's
            return True
        return self._readers == 0 or self._store.add(self._key, 0) >= self._readers


_all: WeakSet[UnreadBroadcast] = WeakSet()


def linger(broadcasts: Iterable[UnreadBroadcast], timeout: float) -> None:
    """Return when the other ranks have read all broadcasts, or after the timeout. Raises nothing."""
    waiting = list(broadcasts)
    deadline = time.monotonic() + min(timeout, _LONGEST_LINGER)
    with suppress(RanksError):  # without a store no rank can read
        while not all(broadcast.is_read() for broadcast in waiting) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
    for broadcast in waiting:
        broadcast.clear()


@atexit.register
def _at_exit() -> None:
    linger(_all, _LONGEST_LINGER)


_SHOWN = 5  # managers of a rank that an error lists


class BuiltManagers:
    """The managers of this rank, in order. Every rank publishes its list, and reads the others' only for an error."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._labels: dict[str, str] = {}  # by the key under which the ranks meet
        self.unread: set[UnreadBroadcast] = set()  # broadcasts that other ranks are to read before this process ends

    def add(self, name: str, label: str) -> str:
        """Count one more manager of that name. Returns the key under which the n-th of each rank meet."""
        self._counts[name] += 1
        key = f"{self._counts[name]}/{name}"
        self._labels[key] = label
        return key

    def labels(self, name: str) -> list[str]:
        """The labels of this rank's managers of that name, in order."""
        return [self._labels[f"{number}/{name}"] for number in range(1, self._counts[name] + 1)]

    def publish(self, store: TimedStore, rank: int) -> None:
        store.set(f"built/{rank}", json.dumps(self._labels))

    def difference(self, store: TimedStore, rank: int, others: list[int]) -> str:
        """A sentence about what this rank and the others have built; empty where it is the same, or not known."""
        built = {rank: self._labels}
        with suppress(RanksError):
            built |= {other: _read(store, other) for other in others}
        if all(labels.keys() == self._labels.keys() for labels in built.values()):
            return ""
        opened = ranks_by_value({number: _listed(labels) for number, labels in sorted(built.items())})
        listed = "; ".join(f"{format_ranks(found)} opened {labels}" for labels, found in opened.items())
        return (
            f" The ranks have opened different roots: {listed}. Build the same managers on every rank, for the same "
            "root; where every host has a root of its own, give them ranks=ckpt.RankOptions(shared=False)."
        )


def _read(store: TimedStore, rank: int) -> dict[str, str]:
    key = f"built/{rank}"
    found: dict[str, str] = json.loads(store.get(key)) if store.check([key]) else {}
    return found


def _listed(labels: dict[str, str]) -> str:
    return few([repr(label) for label in labels.values()], _SHOWN) or "none"


_by_process_group: WeakKeyDictionary[dist.ProcessGroup, BuiltManagers] = WeakKeyDictionary()


def built_here() -> BuiltManagers:
    """The managers that this process has built since it joined the default process group."""
    assert dist.group.WORLD is not None
    return _by_process_group.setdefault(dist.group.WORLD, BuiltManagers())


_FAILURES = "failures"
_SHORTEST, _LONGEST = 0.0002, 0.1  # seconds between two polls
_LONGEST_PER_RANK = 0.002  # so that few ranks poll more often than a thousand would

_ADVICE = (
    "Every rank must make this call: take it out of 'if rank == 0:' (or is_main_process). "
    "If they do, look at their logs: they may have died, or be slower than "
    "ranks=ckpt.RankOptions(timeout=...) allows."
)


class StoreGroup:
    """The ranks of a manager. `job` is the store that all managers share: what each rank has built, and its heartbeats.
    There, and in messages, a rank has its number in the job, which `members` has where they are some of its ranks.

    Gathers and broadcasts are numbered (`_turn`), the same on every rank, and so are the gathers that the main rank has
    given up (`_failed_gathers`): a rank that comes too late finds neither an old answer nor one of another call.
    """

    def __init__(
        self,
        store: TimedStore,
        rank: int,
        world_size: int,
        timeout: float,
        job: TimedStore,
        built: BuiltManagers,
        members: Members = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.members = members
        self.timeout = timeout
        self._store = store
        self._job = job
        self._built = built
        self._turn = 0
        self._failed_gathers = 0
        self._abandoned = False
        self._used_keys: list[str] = []
        self._answered = ""  # the key of this rank's answer that is still in the store
        self._spoken_for: list[str] = []  # keys of what this rank was the first to ask about
        self._unread = UnreadBroadcast(store, built.unread)
        self._channels = [self]
        interval = min(1.0, timeout / 4)
        self._heartbeat = Heartbeat(store, rank, interval)
        self._job_heartbeat = Heartbeat(job, self._in_job(rank), interval)

    def channel(self, name: str) -> Ranks:
        store = self._store.below(name)
        channel = StoreGroup(store, self.rank, self.world_size, self.timeout, self._job, self._built, self.members)
        self._channels.append(channel)
        return channel

    def gather(self, call: str, data: str) -> list[str]:
        passed = [key for key in self._spoken_for if not key.startswith(f"{self._turn}.")]
        if passed:  # every rank has answered the gather before this one, and so has asked
            self._store.delete_each(passed)
            self._spoken_for = [key for key in self._spoken_for if key not in passed]
        if self.rank != MAIN:
            self._failed_gathers = self._store.add(_FAILURES, 0)
            self._answered = self._answer_key(self.rank)
            self._store.set(self._answered, data)
            self._turn += 1
            return []
        keys = [self._answer_key(rank) for rank in range(1, self.world_size)]
        try:
            self._await(dict(enumerate(keys, 1)), call)
        except RanksError as error:
            self._give_up(str(error), keys)
            raise
        self._store.delete_each(self._used_keys)  # a rank that has answered has read the broadcasts before
        self._used_keys = [self._taken_key]
        self._store.set(self._taken_key, "")
        self._unread.clear()
        answers = self._store.get_all(keys)
        self._turn += 1
        return [data, *answers]

    def broadcast(self, call: str, data: str) -> str:
        key = f"{self._turn}/all"
        if self.rank == MAIN:
            self._store.set(key, data)
            self._used_keys += [key, f"{key}/read"]
            self._unread.expect(f"{key}/read", self.world_size - 1)
        else:
            try:
                self._await({MAIN: key}, call)
            except RanksError:
                self._step_back()
                raise
            data = self._store.get(key)
            if self._answered:  # each deletes its own answer: for thousands, the main rank would take a second
                self._store.delete_key(self._answered)
                self._answered = ""
            self._unread.confirm(f"{key}/read")
        self._turn += 1
        return data

    def working(self, *, job_wide: bool = False) -> AbstractContextManager[None]:
        return (self._job_heartbeat if job_wide else self._heartbeat).running()

    def note(self, key: str, value: str) -> None:
        self._store.set(f"{key}/{self.rank}", value)
        self._store.add(f"{key}/count", 1)

    def notes(self, key: str) -> dict[int, str]:
        if self._store.add(f"{key}/count", 0) == 0:
            return {}
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        noted = [rank for rank, there in enumerate(self._store.check_each(keys)) if there]
        return dict(zip(noted, self._store.get_all([keys[rank] for rank in noted]), strict=True))

    def publish(self, key: str, value: str) -> None:
        self._store.set(f"{key}/published", value)

    def published(self, key: str) -> str | None:
        key = f"{key}/published"
        return self._store.get(key) if self._store.check([key]) else None

    def first_wins(self, key: str, value: str) -> str:
        return self._store.compare_set(key, "", value)

    def leave(self, key: str, value: str) -> None:
        self._store.set(f"{key}/{self.rank}", value)

    def take(self, key: str, ranks: list[int]) -> list[str]:
        keys = [f"{key}/{rank}" for rank in ranks]
        values = self._store.get_all(keys)
        self._store.delete_each(keys)
        return values

    def speaks_for(self, text: str) -> bool:
        if self.rank != MAIN:
            self._failed_gathers = self._store.add(_FAILURES, 0)  # as `gather` will find it, too
        key, mine = f"{self._turn}.{self._failed_gathers}/first/{text}", str(self.rank)
        is_first = self._store.compare_set(key, "", mine) == mine
        self._spoken_for += [key] if is_first else []
        return is_first

    def silent(self, ranks: list[int], watch: LivenessWatch) -> list[int]:
        own = self._store.add_each([f"alive/{rank}" for rank in ranks], 0)
        job_wide = self._job.add_each([f"alive/{self._in_job(rank)}" for rank in ranks], 0)
        return watch.silent({rank: sum(both) for rank, *both in zip(ranks, own, job_wide, strict=True)})

    def abandon(self) -> None:
        self._abandoned = True

    def linger(self) -> None:
        linger([channel._unread for channel in self._channels], self.timeout)

    def _in_job(self, rank: int) -> int:
        return rank if self.members is None else self.members[rank]

    def _answer_key(self, rank: int) -> str:
        return f"{self._turn}.{self._failed_gathers}/from/{rank}"

    @property
    def _taken_key(self) -> str:
        """Set when the main rank has seen all answers, before it reads them."""
        return f"{self._turn}.{self._failed_gathers}/taken"

    def _give_up(self, text: str, keys: list[str]) -> None:
        """Send the error to the ranks that did answer; or each of them would report the main rank as silent."""
        with suppress(RanksError):
            answered = sum(self._store.check_each(keys))
            self._failed_gathers += 1
            self._store.set(f"{_FAILURES}/{self._failed_gathers}", text)
            self._store.add(_FAILURES, 1)
            self._unread.expect(f"{_FAILURES}/{self._failed_gathers}/read", answered)

    def _step_back(self) -> None:
        """Return to the turn of the gather that was not answered, where a later call meets the main rank.

        If the main rank has read this rank's answer after all, it has moved on: then so does this rank.
        """
        self._turn -= 1
        with suppress(RanksError):
            is_taken = self._store.check([self._taken_key])
            if not is_taken:
                self._store.delete_key(self._answer_key(self.rank))
                is_taken = self._store.check([self._taken_key])
            if is_taken:
                self._turn += 2

    def _await(self, keys: dict[int, str], call: str) -> None:
        """Wait for the keys of ranks, for as long as those that are missing send heartbeats.

        By polling: a store's client that waits inside a call would block this rank's own heartbeats.
        """
        pause = _SHORTEST
        watch = LivenessWatch(self.timeout) if self.rank == MAIN else LivenessWatch(self.timeout, longest=1.0)
        while not self._store.check(list(keys.values())):
            if watch.is_due():
                self._check_liveness(keys, call, watch)
            if self._abandoned:
                raise RanksError(f"{call}: this rank ended without waiting for the others.")
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST, _LONGEST_PER_RANK * self.world_size)

    def _check_liveness(self, keys: dict[int, str], call: str, watch: LivenessWatch) -> None:
        """Raise if ranks are silent. The main rank, which others wait for, sends a heartbeat while it waits itself."""
        if self.rank == MAIN:
            self._heartbeat.beat()
        else:
            self._raise_failed_gather()
        answered = self._store.check_each(list(keys.values()))
        silent = self.silent([rank for rank, there in zip(keys, answered, strict=True) if not there], watch)
        if silent:
            numbers = [self._in_job(rank) for rank in silent]
            raise RanksError(
                f"{call}: {format_ranks(numbers)} did not answer within {self.timeout:g} s."
                f"{self._built.difference(self._job, self._in_job(self.rank), numbers) or f' {_ADVICE}'} "
                f"{'Nothing was committed; earlier' if self.rank == MAIN else 'Earlier'} checkpoints are kept."
            )

    def _raise_failed_gather(self) -> None:
        """Raise the error with which the main rank has given up the gather that this rank has answered."""
        if self._store.add(_FAILURES, 0) > self._failed_gathers:
            failure = f"{_FAILURES}/{self._failed_gathers + 1}"
            text = self._store.get(failure)
            self._unread.confirm(f"{failure}/read")
            raise RanksError(text)
