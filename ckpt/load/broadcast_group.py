"""The process group in which the ranks of a host broadcast what one of them has read."""

from __future__ import annotations

import ctypes
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypedDict

import torch
import torch.distributed as dist

from ckpt.errors import RanksError
from ckpt.ranks.consensus import FollowingError
from ckpt.ranks.group import Ranks
from ckpt.ranks.liveness import LivenessWatch, format_ranks

_log = logging.getLogger("ckpt")

_POLL = timedelta(seconds=1)
_LATE = 60.0  # seconds after which nothing more comes from a rank that has read all it wanted
_LAST_WAIT = timedelta(seconds=5)


class RankReads(TypedDict):
    """What a rank tells the main one: its host, and for each file a digest of the bytes that it wants."""

    host: str
    files: dict[str, str]


class HostPlan(TypedDict):
    """The ranks of a host, for each file they read together the rank that reads it, and a name unique to the load."""

    ranks: list[int]
    files: dict[str, int]
    name: str


class BroadcastGroup:
    """The process group of a host's ranks during one load. Nothing else may hold a reference to it.

    An object that holds one could be garbage when a data loader forks. A child that collects it would destroy a group
    whose threads it does not have, and wait for them for ever.

    No rank waits in a broadcast for one that has failed, has read everything, or gives no sign of life.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Ranks, plan: HostPlan) -> None:
        self.group: dist.ProcessGroup | None = group
        self._ranks = ranks
        self._members = plan["ranks"]
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
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            raise
        finally:
            with suppress(RanksError):  # if the store is gone, others notice that too
                self._ranks.note(self._key, json.dumps(why))

    def broadcast(self, memory: torch.Tensor, source: int) -> None:
        """Fill the memory on all ranks with the contents that it has on the source rank."""
        in_job = source if self._ranks.members is None else self._ranks.members[source]
        work = self._pending = dist.broadcast(memory, in_job, group=self.group, async_op=True)
        began, watched = time.monotonic(), LivenessWatch(self._ranks.timeout, longest=_POLL.total_seconds())
        while not _has_ended(work, _POLL):
            self._check_members(watched, late=time.monotonic() - began > _LATE)
        self._pending = None

    def dissolve(self) -> None:
        """Destroy the group. Raises nothing: an earlier error takes precedence."""
        group, self.group = self.group, None
        try:
            if self._pending is not None and not _has_ended(self._pending, _LAST_WAIT):
                # a member is frozen: the group's destructor would wait for it, even at the end of the program
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            dist.destroy_process_group(group)
        except Exception as error:
            _log.warning("the process group for broadcast reads could not be destroyed: %s", error)
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
            raise FollowingError(f"what the ranks of this host read together was given up. {listed}")
        if ended and late:
            raise FollowingError(
                f"{format_ranks(sorted(ended))} did not read the same bytes in the same order as this rank."
            )
        silent = self._ranks.silent([rank for rank in others if rank not in ended], watched)
        if silent:
            raise RanksError(
                f"{format_ranks(silent)} gave no sign of life for {self._ranks.timeout:g} s while the ranks of this "
                "host read a checkpoint together: stopped, dead, or overloaded. Look at their logs, and start the job "
                "again."
            )


def _has_ended(work: dist.Work, within: timedelta) -> bool:
    """Wait for a broadcast. Raises a FollowingError if it has failed."""
    try:
        work.wait(within)
    except RuntimeError as error:
        if not work.is_completed():
            return False
        raise FollowingError(f"a rank of this host left while it was reading for others ({error}).") from error
    return True
