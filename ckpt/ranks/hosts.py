"""Which ranks see the same root: on a shared filesystem all of them, otherwise those of each host."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ckpt.errors import AbsentError, RanksError
from ckpt.formats.native.manifest import Host
from ckpt.ranks.built_managers import built_here
from ckpt.ranks.consensus import Result, decide_together, run_on_all_ranks
from ckpt.ranks.group import MAIN, OWN_ROOTS, Ranks
from ckpt.storage import Storage

_log = logging.getLogger("ckpt")
_CALL = "StateManager(...)"


def host_name() -> str:
    """The name of this machine: ranks that have it in common run on one host."""
    return socket.gethostname()


@dataclass(frozen=True)
class Hosts:
    """For each rank the first one that sees the same root, and the name of its host.

    The first rank of each root keeps it: it holds the lock, writes what all ranks have in common, and the manifest.
    """

    first: tuple[int, ...] = (MAIN,)
    names: tuple[str, ...] = ("",)

    @property
    def separate_roots(self) -> bool:
        """Whether some hosts have roots of their own."""
        return any(one != MAIN for one in self.first)

    def owns_root(self, rank: int) -> bool:
        return rank == MAIN or (self.separate_roots and self.first[rank] == rank)

    def records(self) -> tuple[Host, ...]:
        """Every root by the name of its host, with the ranks that see it."""
        roots = sorted(set(self.first))
        return tuple(
            Host(self.names[one], tuple(r for r, first in enumerate(self.first) if first == one)) for one in roots
        )

    def __str__(self) -> str:
        return "; ".join(f"{one.name} (ranks {', '.join(map(str, one.ranks))})" for one in self.records())


ONE_SHARED_ROOT = Hosts()


def find_hosts(ranks: Ranks, storage: Storage, *, shared: bool | None) -> Hosts:
    """Every rank leaves a mark in its root, and looks whose marks it sees there.

    If not told whether the root is `shared`, ranks look only where the launcher says that there are several hosts.
    """
    if ranks.world_size == 1 or not may_have_separate_roots(storage, shared=shared):
        return ONE_SHARED_ROOT
    opened = {"url": storage.url, "opened": built_here().labels(OWN_ROOTS)}
    nonce = decide_together(ranks, _CALL, Result(opened), lambda told: _compared(told, surely_separate=shared is False))
    marks = [f".host-{nonce}-{rank}" for rank in range(ranks.world_size)]
    run_on_all_ranks(ranks, _CALL, lambda: storage.write(marks[ranks.rank], [host_name().encode()]))
    seen = Result.capture(lambda: {"first": _first(storage, marks), "host": host_name()})
    told = decide_together(ranks, _CALL, seen, lambda told: told)
    storage.delete([marks[ranks.rank]])
    hosts = Hosts(tuple(one["first"] for one in told), tuple(one["host"] for one in told))
    if hosts.separate_roots and ranks.rank == MAIN:
        _log.warning("%s is not shared: each of these keeps what its ranks save: %s", storage.url, hosts)
    return hosts if hosts.separate_roots else ONE_SHARED_ROOT


def may_have_separate_roots(storage: Storage, *, shared: bool | None) -> bool:
    """Whether hosts may have roots of their own: the user says so, or the launcher that there are several hosts."""
    return storage.near and (shared is False or (shared is None and _several_hosts()))


def _several_hosts() -> bool:
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size


def _compared(told: list[Any], *, surely_separate: bool) -> str:
    """On the main rank: refuse roots of which not every host's is the same run's. Returns a name for the marks.

    Paths may differ between hosts. But a rank that has opened this rank's root as another of its managers has built
    them in another order; and roots of other names may be different runs, unless the user has said otherwise.
    """
    urls = [one["url"] for one in told]
    mixed = any(url in one["opened"] and url != one["url"] for url in urls for one in told)
    names = {url.rstrip("/").rpartition("/")[2] for url in urls}
    if mixed or (len(names) > 1 and not surely_separate):
        listed = "; ".join(f"rank {rank} opened {', '.join(one['opened'])}" for rank, one in enumerate(told))
        raise RanksError(
            f"the ranks have not opened the same root: {listed}. Every rank must build the same managers in the same "
            "order. If these are the roots of one run, one on each host, say shared=False."
        )
    return uuid.uuid4().hex


def _first(storage: Storage, marks: list[str]) -> int:
    for rank, mark in enumerate(marks):
        if storage.version(mark) is not None:
            return rank
    raise AbsentError(f"{storage.url} does not show what was just written there.")
