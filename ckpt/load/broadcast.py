"""Broadcast reads: what all ranks of a host need is read by one of them, and broadcast to the others.

Worth it where every byte comes over a network. From a local disk every rank reads for itself: what one has read, the
others find in the page cache.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from ckpt.errors import AbsentError, CkptError, DeniedError, StorageError, TransientError, TruncatedError
from ckpt.formats.native.block_hash import digest
from ckpt.formats.tensor_bytes import host_bytes
from ckpt.formats.transfers import Transfer
from ckpt.load.broadcast_group import BroadcastGroup, HostPlan, RankReads
from ckpt.ranks import hosts
from ckpt.ranks.consensus import Result, decide_together
from ckpt.ranks.group import Ranks
from ckpt.root.verified_file import VerifiedFile

_DEADLINE = timedelta(minutes=10)
# Errors of the reading rank, sent by their position: the receiving ranks raise the same kind, so that all decide alike.
_KINDS = (TransientError, DeniedError, AbsentError, TruncatedError, StorageError, CkptError)


@dataclass(frozen=True)
class Broadcasts:
    """The files that the ranks of this host broadcast among them: for each key, the rank that reads it."""

    rank: int
    readers: Mapping[str, int] = field(default_factory=dict)
    group: BroadcastGroup | None = None

    def reads_here(self, transfer: Transfer) -> bool:
        """Whether this rank reads it from the storage."""
        return self.readers.get(transfer.reader.stored.key, self.rank) == self.rank

    def split(self, transfers: list[Transfer]) -> tuple[list[Transfer], list[Transfer]]:
        """Transfers of this rank alone, and those in which all ranks of the host take part."""
        alone = [transfer for transfer in transfers if transfer.reader.stored.key not in self.readers]
        files: dict[int, _BroadcastFile] = {}
        common = []
        for transfer in transfers:
            if transfer.reader.stored.key in self.readers:
                file = files.setdefault(id(transfer.reader), self._broadcast_file(transfer.reader))
                common.append(replace(transfer, reader=file))
        common.sort(key=lambda transfer: transfer.reader.stored.key)  # the same order of files on every rank
        return alone, common

    def phase(self) -> AbstractContextManager[None]:
        """The context for reads with broadcasts: the error of a rank that fails inside is raised on the others."""
        return nullcontext() if self.group is None else self.group.phase()

    def _broadcast_file(self, file: VerifiedFile) -> _BroadcastFile:
        source = self.readers[file.stored.key]
        return _BroadcastFile(file.stored, file.record, file.sha256, group=self.group, source=source, rank=self.rank)


@dataclass(frozen=True)
class _BroadcastFile(VerifiedFile):
    """A file that the `source` rank reads. All ranks of the group must make the same calls in the same order."""

    group: BroadcastGroup | None = None
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
        assert self.group is not None
        self.group.broadcast(memory, self.source)
        if failed := int(memory[size]):
            raise error or _KINDS[failed - 1](f"rank {self.source} could not read {self.stored.key} for this rank.")
        view = host_bytes(memory[:size])
        for buffer in buffers:
            buffer[:], view = view[: len(buffer)], view[len(buffer) :]


@contextmanager
def planned_broadcasts(ranks: Ranks, call: str, *phases: list[Transfer]) -> Iterator[Broadcasts]:
    """Plan what the ranks of each host read for each other. Every rank makes this call.

    `phases` are the transfers in the order in which they will be read. A file of which ranks want different bytes, or
    the same bytes in different phases, is read by each rank for itself: its broadcasts would not match.
    """
    wanted: RankReads = {"host": hosts.host_name(), "files": _described(phases)}
    plan: list[HostPlan] = decide_together(ranks, call, Result(wanted), _plan)
    readers = next((host["files"] for host in plan if ranks.rank in host["ranks"]), {})
    group = _make_group(ranks, plan)
    try:
        yield Broadcasts(ranks.rank, readers, group)
    finally:
        if group is not None:
            group.dissolve()


def _make_group(ranks: Ranks, plan: list[HostPlan]) -> BroadcastGroup | None:
    """The group of this rank's host. Every rank creates all groups, and keeps a reference to none but its own."""
    some = ranks.members is not None  # then no other rank of the job takes part
    members = [_in_job(ranks, host["ranks"]) for host in plan]
    groups = [dist.new_group(each, _DEADLINE, "gloo", use_local_synchronization=some) for each in members]
    for group, host in zip(groups, plan, strict=True):
        if ranks.rank in host["ranks"]:
            return BroadcastGroup(group, ranks, host)
    return None


def _in_job(ranks: Ranks, numbers: list[int]) -> list[int]:
    return numbers if ranks.members is None else [ranks.members[number] for number in numbers]


def _described(phases: Sequence[list[Transfer]]) -> dict[str, str]:
    """For each file a digest of the bytes that are wanted of it, and in which phase."""
    spans: dict[str, list[tuple[int, int, int]]] = {}
    for number, transfers in enumerate(phases):
        for transfer in transfers:
            spans.setdefault(transfer.reader.stored.key, []).append((number, transfer.start, transfer.size))
    return {key: digest(repr(found).encode()) for key, found in spans.items()}


def _plan(wanted: list[RankReads]) -> list[HostPlan]:
    """On the main rank: for each host its ranks, and the files of which all of them want the same bytes."""
    plan: list[HostPlan] = []
    for name in sorted({rank["host"] for rank in wanted}):
        ranks = [number for number, rank in enumerate(wanted) if rank["host"] == name]
        first = wanted[ranks[0]]["files"]
        common = [key for key in sorted(first) if all(wanted[rank]["files"].get(key) == first[key] for rank in ranks)]
        if len(ranks) > 1 and common:
            readers = {key: ranks[n % len(ranks)] for n, key in enumerate(common)}
            plan.append({"ranks": ranks, "files": readers, "name": uuid.uuid4().hex})
    return plan
