"""The process group in which the ranks of a host pass on what one of them has read."""

from __future__ import annotations

import ctypes
import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ckpt.errors import RanksError
from ckpt.ranks.consensus import FollowingError
from ckpt.ranks.group import Ranks
from ckpt.ranks.liveness import LivenessWatch, format_ranks

_log = logging.getLogger("ckpt")

_LOOK = timedelta(seconds=1)
_LATE = 60.0  # seconds after which nothing more comes from a rank that has read all it wanted
_FAREWELL = timedelta(seconds=5)


class BroadcastGroup:
    """The process group of a host's ranks, for as long as they share. Nobody else may hold it.

    What shared may be garbage that lies about when a data loader forks. A child that clears it away would end a group
    whose threads it does not have, and wait for them for ever.

    Nobody waits in a broadcast for a rank that has failed, has read everything, or gives no sign of life.
    """

    def __init__(self, group: Any, ranks: Ranks, plan: Mapping[str, Any]) -> None:
        self.group = group
        self._ranks = ranks
        self._members: list[int] = plan["ranks"]
        self._name: str = plan["name"]
        self._number = 0
        self._pending: Any = None

    @contextmanager
    def phase(self) -> Iterator[None]:
        """While the ranks read together. Each says when it is done, and what has kept it from that."""
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

    def broadcast(self, memory: torch.Tensor, reader: int) -> None:
        """Fill the memory on all ranks with what the reader has in it."""
        work = self._pending = dist.broadcast(memory, reader, group=self.group, async_op=True)
        began, watched = time.monotonic(), LivenessWatch(self._ranks.timeout, longest=_LOOK.total_seconds())
        while not _has_ended(work, _LOOK):
            self._look(watched, late=time.monotonic() - began > _LATE)
        self._pending = None

    def dissolve(self) -> None:
        """End the group. Raises nothing: what has gone wrong before comes first."""
        group, self.group = self.group, None
        try:
            if self._pending is not None and not _has_ended(self._pending, _FAREWELL):
                # a member is frozen: the group's destructor would wait for it, even at the end of the program
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            dist.destroy_process_group(group)
        except Exception as error:
            _log.warning("the group in which ranks read together could not be ended: %s", error)
        self._pending = None

    @property
    def _key(self) -> str:
        return f"sharing/{self._name}/{self._number}"

    def _look(self, watched: LivenessWatch, *, late: bool) -> None:
        others = [rank for rank in self._members if rank != self._ranks.rank]
        said = {rank: json.loads(text) for rank, text in self._ranks.notes(self._key).items() if rank in others}
        failed = {rank: why for rank, why in said.items() if why}
        if failed:
            listed = "; ".join(f"rank {rank}: {why}" for rank, why in failed.items())
            raise FollowingError(f"what the ranks of this host read together was given up. {listed}")
        if said and late:
            raise FollowingError(
                f"{format_ranks(sorted(said))} did not read the same bytes in the same order as this rank."
            )
        silent = self._ranks.silent([rank for rank in others if rank not in said], watched)
        if silent:
            raise RanksError(
                f"{format_ranks(silent)} gave no sign of life for {self._ranks.timeout:g} s while the ranks of this "
                "host read a checkpoint together: stopped, dead, or overloaded. Look at their logs, and start the job "
                "again."
            )


def _has_ended(work: Any, within: timedelta) -> bool:
    """Wait for a broadcast. Raises a FollowingError if it has failed."""
    try:
        work.wait(within)
    except RuntimeError as error:
        if not work.is_completed():
            return False
        raise FollowingError(f"a rank of this host left while it was reading for others ({error}).") from error
    return True
