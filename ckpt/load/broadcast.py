"""What all ranks of a host need is read by one of them, and passed on to the others.

Worth it where every byte comes over a network. From a local disk every rank reads for itself: what one has read, the
others find in the page cache.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ckpt.errors import AbsentError, CkptError, DeniedError, StorageError, TransientError, TruncatedError
from ckpt.formats.native.block_hash import digest
from ckpt.formats.tensor_bytes import host_bytes
from ckpt.formats.transfers import Transfer
from ckpt.load.broadcast_group import BroadcastGroup
from ckpt.ranks import hosts
from ckpt.ranks.consensus import Result, decide_together
from ckpt.ranks.group import Ranks
from ckpt.root.verified_file import VerifiedFile

_DEADLINE = timedelta(minutes=10)
# what a rank that reads for others may meet: whoever waits for it raises the same, so that all decide alike
_KINDS = (TransientError, DeniedError, AbsentError, TruncatedError, StorageError, CkptError)


@dataclass(frozen=True)
class Sharing:
    """The files that the ranks of this host read together: for each, the rank that reads."""

    rank: int
    readers: Mapping[str, int] = field(default_factory=dict)
    circle: BroadcastGroup | None = None

    def is_mine(self, transfer: Transfer) -> bool:
        """Whether this rank reads it from the storage."""
        return self.readers.get(transfer.reader.stored.key, self.rank) == self.rank

    def divided(self, transfers: list[Transfer]) -> tuple[list[Transfer], list[Transfer]]:
        """Transfers of this rank alone, and those in which all ranks of the host take part."""
        alone = [one for one in transfers if one.reader.stored.key not in self.readers]
        files: dict[int, _PassedOn] = {}
        together = []
        for one in transfers:
            key = one.reader.stored.key
            if key in self.readers:
                file = files.setdefault(id(one.reader), self._passed_on(one.reader))
                together.append(replace(one, reader=file))
        together.sort(key=lambda one: one.reader.stored.key)  # the same order of files on every rank
        return alone, together

    def phase(self) -> AbstractContextManager[None]:
        """All that is read together belongs into such a context: a rank that fails there tells the others."""
        return nullcontext() if self.circle is None else self.circle.phase()

    def _passed_on(self, file: VerifiedFile) -> _PassedOn:
        return _PassedOn(
            file.stored, file.record, circle=self.circle, reader=self.readers[file.stored.key], rank=self.rank
        )


@dataclass(frozen=True)
class _PassedOn(VerifiedFile):
    """A file that one rank reads. All ranks of the group make the same calls in the same order."""

    circle: BroadcastGroup | None = None
    reader: int = 0
    rank: int = 0

    def read_into(self, start: int, *buffers: memoryview) -> None:
        size = sum(map(len, buffers))
        memory = torch.zeros(size + 1, dtype=torch.uint8)  # the last byte says whether it failed, and with what
        error: Exception | None = None
        if self.rank == self.reader:
            try:
                super().read_into(start, host_bytes(memory[:size]))
            except Exception as failure:  # for all, when they have been told
                error = failure
                memory[size] = next((n for n, kind in enumerate(_KINDS, 1) if isinstance(failure, kind)), len(_KINDS))
        assert self.circle is not None
        self.circle.broadcast(memory, self.reader)
        if failed := int(memory[size]):
            raise error or _KINDS[failed - 1](f"rank {self.reader} could not read {self.stored.key} for this one.")
        view = host_bytes(memory[:size])
        for buffer in buffers:
            buffer[:], view = view[: len(buffer)], view[len(buffer) :]


@contextmanager
def sharing(ranks: Ranks, call: str, *phases: list[Transfer]) -> Iterator[Sharing]:
    """Find out what the ranks of each host have in common. Every rank makes this call.

    `phases` are the transfers in the order in which they will be read. A file of which ranks want other bytes, or the
    same ones in another phase, each of them reads alone: their broadcasts would not meet.
    """
    wanted = _described(phases)
    plan = decide_together(ranks, call, Result({"host": hosts.host_name(), "files": wanted}), _plan)
    mine: dict[str, int] = next((one["files"] for one in plan if ranks.rank in one["ranks"]), {})
    groups = [dist.new_group(one["ranks"], timeout=_DEADLINE, backend="gloo") for one in plan]
    circles = (
        BroadcastGroup(group, ranks, one) for group, one in zip(groups, plan, strict=True) if ranks.rank in one["ranks"]
    )
    circle = next(circles, None)
    del circles
    groups.clear()  # the circle alone holds one
    try:
        yield Sharing(ranks.rank, mine, circle)
    finally:
        if circle is not None:
            circle.dissolve()


def _described(phases: Sequence[list[Transfer]]) -> dict[str, str]:
    """For each file a digest of what is wanted of it, and when."""
    spans: dict[str, list[tuple[int, int, int]]] = {}
    for number, transfers in enumerate(phases):
        for one in transfers:
            spans.setdefault(one.reader.stored.key, []).append((number, one.start, one.size))
    return {key: digest(repr(found).encode()) for key, found in spans.items()}


def _plan(told: list[Any]) -> list[dict[str, Any]]:
    """On the main rank: for each host its ranks, and the files of which all of them want the same."""
    plan = []
    for name in sorted({one["host"] for one in told}):
        ranks = [rank for rank, one in enumerate(told) if one["host"] == name]
        first = told[ranks[0]]["files"]
        common = [key for key in sorted(first) if all(told[rank]["files"].get(key) == first[key] for rank in ranks)]
        if len(ranks) > 1 and common:
            readers = {key: ranks[n % len(ranks)] for n, key in enumerate(common)}
            plan.append({"ranks": ranks, "files": readers, "name": uuid.uuid4().hex})
    return plan
