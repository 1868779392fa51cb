"""Broadcast reads: what all ranks of a host, or of the job, need is read by one of them, and broadcast to the others.

Worth it where every byte comes over a network. From a local disk every rank reads for itself: what one has read, the
others find in the page cache.

What is read once for the job goes from its reader to the first ranks of all hosts, and from each of those to the other
ranks on its host. It goes in pieces: a rank holds the one that it reads or receives, and those before it that it is
still sending.
"""

from __future__ import annotations

import ctypes
import json
import logging
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TypedDict

import torch
import torch.distributed as dist

from ckpt.errors import AbsentError, CkptError, DeniedError, RanksError, StorageError, TransientError, TruncatedError
from ckpt.formats.native.manifest import digest
from ckpt.formats.tensors import Transfer, host_bytes
from ckpt.load.verified_read import plan_reads as plan_reads_of_blocks
from ckpt.ranks import hosts
from ckpt.ranks.consensus import FollowingError, Ranks
from ckpt.ranks.store_and_heartbeats import LivenessWatch, format_ranks
from ckpt.root.verify import VerifiedFile

_log = logging.getLogger("ckpt")

_POLL = timedelta(seconds=1)
_LATE = 60.0  # seconds after which nothing more comes from a rank that has read all it wanted
_LAST_WAIT = timedelta(seconds=5)


class RankReads(TypedDict):
    """What a rank tells the main one: its host, and for each file a digest of the bytes that it wants.

    `once_per_job`: whether what all ranks of the job want is to be read once for all hosts.
    """

    host: str
    files: dict[str, str]
    once_per_job: bool


class GroupPlan(TypedDict):
    """The ranks of a host, for each file they read together the rank that reads it, and a name unique to the load.

    `leaders`: these are the first ranks of all hosts instead, and all ranks of the job need the files.
    """

    ranks: list[int]
    files: dict[str, int]
    name: str
    leaders: bool


class BroadcastGroup:
    """The process group of a host's ranks, or of all hosts' first ranks, during one load.

    Nothing else may hold a reference to the process group. An object that holds one could be garbage when a data loader
    forks. A child that collects it would destroy a group whose threads it does not have, and wait for them for ever.

    No rank waits in a broadcast for one that has failed, has read everything, or gives no sign of life.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Ranks, plan: GroupPlan, failure: str = "") -> None:
        self.group = group
        self._failure = failure  # why there is no group
        self._ranks = ranks
        self._members = plan["ranks"]
        self._whose = "the first ranks of all hosts" if plan["leaders"] else "the ranks on this host"
        self._name = plan["name"]
        self._number = 0
        self._pending: dist.Work | None = None

    @contextmanager
    def phase(self) -> Iterator[None]:
        """The context for reads with broadcasts. Each rank notes its end in the store, with the error if it failed."""
        self._number += 1
        why = ""
        try:
            yield
            self.finish()
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            raise
        finally:
            with suppress(RanksError):  # if the store is gone, others notice that too
                self._ranks.note(self._key, json.dumps(why))

    def broadcast(self, memory: torch.Tensor, reader: int) -> None:
        """Fill the memory on all ranks with the contents that it has on the reader.

        What a rank outside this group has read, the first rank of the group has received from it. The source returns at
        once, so that it reads or receives the next piece while this one is under way.
        """
        if self._failure:
            raise RanksError(
                f"{self._whose} could not connect to each other with gloo ({self._failure}). Set GLOO_SOCKET_IFNAME to "
                "the network interface that connects them, or give the manager ranks=ckpt.RankOptions(broadcast=False)."
            )
        source = reader if reader in self._members else self._members[0]
        (in_job,) = _in_job(self._ranks, [source])
        self.finish()
        self._pending = dist.broadcast(memory, in_job, group=self.group, async_op=True)
        if source != self._ranks.rank:
            self.finish()

    def finish(self) -> None:
        """Wait until the last broadcast is complete on this rank."""
        if self._pending is None:
            return
        began, watched = time.monotonic(), LivenessWatch(self._ranks.timeout, longest=_POLL.total_seconds())
        while not _has_ended(self._pending, _POLL):
            self._check_members(watched, late=time.monotonic() - began > _LATE)
        self._pending = None

    def dissolve(self) -> None:
        """Destroy the group. Raises nothing: an earlier error takes precedence."""
        group, self.group = self.group, None
        if group is None:
            return
        try:
            if self._pending is not None and not _has_ended(self._pending, _LAST_WAIT):
                # a member is frozen: the group's destructor would wait for it, even at the end of the program
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            dist.destroy_process_group(group)
        except Exception as error:
            _log.debug("ckpt could not destroy the process group for broadcast reads: %s", error)
        self._pending = None

    @property
    def _key(self) -> str:
        return f"broadcast/{self._name}/{self._number}"

    def _check_members(self, watched: LivenessWatch, *, late: bool) -> None:
        """Raise if the broadcast cannot complete: a member has failed, has ended its reads, or is silent."""
        others = [rank for rank in self._members if rank != self._ranks.rank]
        ended = {rank: json.loads(text) for rank, text in self._ranks.notes(self._key).items() if rank in others}
        failed = {rank: why for rank, why in ended.items() if why}
        if failed:
            listed = "; ".join(f"rank {rank}: {why}" for rank, why in failed.items())
            raise FollowingError(f"{self._whose} stopped reading the checkpoint together. {listed}")
        if ended and late:
            raise FollowingError(
                f"{format_ranks(sorted(ended))} and this rank read different bytes, or read them in a different order."
            )
        silent = self._ranks.silent([rank for rank in others if rank not in ended], watched)
        if silent:
            raise RanksError(
                f"while {self._whose} were reading a checkpoint together, {format_ranks(silent)} gave "
                f"no sign of life for {self._ranks.timeout:g} s (stopped, dead or overloaded). Look at the logs, and "
                "start the job again."
            )


def _has_ended(work: dist.Work, within: timedelta) -> bool:
    """Wait for a broadcast. Raises a FollowingError if it has failed."""
    try:
        work.wait(within)
    except RuntimeError as error:
        if not work.is_completed():
            return False
        raise FollowingError(
            f"a rank ended while it was reading the checkpoint together with this one ({error})."
        ) from error
    return True


_DEADLINE = timedelta(minutes=10)
# Errors of the reading rank, sent by their position: the receiving ranks raise the same kind, so that all decide alike.
_KINDS = (TransientError, DeniedError, AbsentError, TruncatedError, StorageError, CkptError)


@dataclass(frozen=True)
class Broadcasts:
    """The files that this rank reads together with others: for each key, the rank that reads it.

    `groups`: that of the hosts' first ranks, if this rank is one, and that of this host. `once`: the files that are
    read once for the job, which pass through both.
    """

    rank: int
    readers: Mapping[str, int] = field(default_factory=dict)
    groups: tuple[BroadcastGroup, ...] = ()
    once: Collection[str] = ()

    def reads_here(self, transfer: Transfer) -> bool:
        """Whether this rank reads it from the storage."""
        return self.readers.get(transfer.reader.stored.key, self.rank) == self.rank

    def split(self, transfers: list[Transfer]) -> tuple[list[Transfer], list[Transfer]]:
        """Transfers of this rank alone, and those in which other ranks take part, too."""
        alone = [transfer for transfer in transfers if transfer.reader.stored.key not in self.readers]
        files: dict[int, _BroadcastFile] = {}
        common = []
        for transfer in transfers:
            if transfer.reader.stored.key in self.readers:
                file = files.setdefault(id(transfer.reader), self._broadcast_file(transfer.reader))
                common.append(replace(transfer, reader=file))
        common.sort(key=lambda transfer: transfer.reader.stored.key)  # the same order of files on every rank
        return alone, common

    @contextmanager
    def phase(self) -> Iterator[None]:
        """The context for reads with broadcasts: the error of a rank that fails inside is raised on the others."""
        with ExitStack() as phases:
            for group in self.groups:
                phases.enter_context(group.phase())
            yield

    def _broadcast_file(self, file: VerifiedFile) -> _BroadcastFile:
        key = file.stored.key
        groups = self.groups if key in self.once else self.groups[-1:]
        return _BroadcastFile(
            file.stored, file.record, file.sha256, file.shared, groups=groups, source=self.readers[key], rank=self.rank
        )


@dataclass(frozen=True)
class _BroadcastFile(VerifiedFile):
    """A file that the `source` rank reads. All ranks of the groups must make the same calls in the same order."""

    groups: tuple[BroadcastGroup, ...] = ()
    source: int = 0
    rank: int = 0

    def read_into(self, start: int, *buffers: memoryview) -> None:
        size = sum(map(len, buffers))
        memory = torch.zeros(size + 1, dtype=torch.uint8)  # the last byte: 0, or the kind of error, counted from 1
        error: Exception | None = None
        if self.rank == self.source:
            try:
                super().read_into(start, host_bytes(memory[:size]))
            except Exception as failure:  # raised after the broadcast, on all ranks
                error = failure
                memory[size] = next((n for n, kind in enumerate(_KINDS, 1) if isinstance(failure, kind)), len(_KINDS))
        for group in self.groups:
            group.broadcast(memory, self.source)
        if failed := int(memory[size]):
            for group in self.groups:
                group.finish()  # before this rank notes its end: the others are to get this error
            raise error or _KINDS[failed - 1](f"rank {self.source} could not read {self.stored.key} for this rank.")
        view = host_bytes(memory[:size])
        for buffer in buffers:
            buffer[:], view = view[: len(buffer)], view[len(buffer) :]


def described_reads(*phases: list[Transfer], once_per_job: bool = False) -> RankReads:
    """What this rank reads: the transfers, in the order in which they will be read."""
    return {"host": hosts.host_name(), "files": _described(phases), "once_per_job": once_per_job}


@contextmanager
def planned_broadcasts(ranks: Ranks, plan: list[GroupPlan]) -> Iterator[Broadcasts]:
    """The broadcasts in which this rank takes part, as `plan_reads` has planned them. Every rank makes this call."""
    once = {key: reader for group in plan if group["leaders"] for key, reader in group["files"].items()}
    readers = {key: reader for group in plan if ranks.rank in group["ranks"] for key, reader in group["files"].items()}
    with ExitStack() as made:
        groups = _make_groups(ranks, plan)
        for group in groups:
            made.callback(group.dissolve)
        yield Broadcasts(ranks.rank, readers | once, tuple(reversed(groups)), once.keys())


def _make_groups(ranks: Ranks, plan: list[GroupPlan]) -> list[BroadcastGroup]:
    """The groups of this rank. Every rank creates all groups, and keeps a reference to none but its own."""
    some = ranks.members is not None  # then no other rank of the job takes part
    mine = []
    for planned in plan:
        group, failure = None, ""
        try:
            members = _in_job(ranks, planned["ranks"])
            with hosts.on_the_interface_of_the_job():
                group = dist.new_group(members, _DEADLINE, "gloo", use_local_synchronization=some)
        except (RuntimeError, ValueError) as error:  # raised by `broadcast`, where the other ranks learn of it
            failure = str(error)
        if ranks.rank in planned["ranks"]:
            mine.append(BroadcastGroup(group, ranks, planned, failure))
    return mine


def _in_job(ranks: Ranks, numbers: list[int]) -> list[int]:
    return numbers if ranks.members is None else [ranks.members[number] for number in numbers]


def _described(phases: Sequence[list[Transfer]]) -> dict[str, str]:
    """For each file a digest of the bytes that are wanted of it, and in which phase; of a shared file, of the blocks:
    it is read block by block, whatever is wanted of them."""
    spans: dict[str, list[tuple[int, ...]]] = {}
    for number, transfers in enumerate(phases):
        for transfer in transfers:
            if not transfer.reader.shared:
                spans.setdefault(transfer.reader.stored.key, []).append((number, transfer.start, transfer.size))
        for block in plan_reads_of_blocks([transfer for transfer in transfers if transfer.reader.shared]):
            spans.setdefault(block.file.stored.key, []).append((number, block.index))
    return {key: digest(repr(found).encode()) for key, found in spans.items()}


def plan_reads(wanted: list[RankReads]) -> list[GroupPlan]:
    """On the main rank: for each host its ranks, and the files of which all of them want the same bytes.

    A file of which ranks want different bytes, or the same bytes in different phases, is read by each rank for itself:
    its broadcasts would not match. What is read once per job comes last: where some ranks of the job make groups,
    PyTorch expects that the members of each have made as many before, so a host of one rank has a group too.
    """
    hosts = [
        [number for number, rank in enumerate(wanted) if rank["host"] == name]
        for name in sorted({rank["host"] for rank in wanted})
    ]
    per_job = len(hosts) > 1 and all(rank["once_per_job"] for rank in wanted)
    once = _alike(wanted, list(range(len(wanted)))) if per_job else []
    plan = []
    for ranks in hosts:
        common = [key for key in _alike(wanted, ranks) if key not in once] if len(ranks) > 1 else []
        if once or common:
            plan.append(_group(ranks, common))
    return [*plan, _group([ranks[0] for ranks in hosts], once, leaders=True)] if once else plan


def _alike(wanted: list[RankReads], ranks: list[int]) -> list[str]:
    """The files of which these ranks want the same bytes."""
    first = wanted[ranks[0]]["files"]
    return [key for key in sorted(first) if all(wanted[rank]["files"].get(key) == first[key] for rank in ranks)]


def _group(ranks: list[int], keys: list[str], *, leaders: bool = False) -> GroupPlan:
    readers = {key: ranks[n % len(ranks)] for n, key in enumerate(keys)}
    return {"ranks": ranks, "files": readers, "name": uuid.uuid4().hex, "leaders": leaders}
