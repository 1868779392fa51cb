"""Which ranks see the same root: on a shared filesystem all of them, otherwise those of each host."""

from __future__ import annotations

import logging
import os
import uuid
from dataclasses import dataclass

from ckpt import sharing
from ckpt.agreement import Outcome, agree, together
from ckpt.errors import AbsentError
from ckpt.formats.manifest import Host
from ckpt.ranks import MAIN, Ranks
from ckpt.storage import Storage

_log = logging.getLogger("ckpt")
_CALL = "StateManager(...)"


@dataclass(frozen=True)
class Hosts:
    """For each rank the first one that sees the same root, and the name of its host.

    The first rank of each root keeps it: it holds the lock, writes what all ranks have in common, and the manifest.
    """

    first: tuple[int, ...] = (MAIN,)
    names: tuple[str, ...] = ("",)

    @property
    def apart(self) -> bool:
        """Whether some hosts have roots of their own."""
        return any(one != MAIN for one in self.first)

    def keeps(self, rank: int) -> bool:
        return rank == MAIN or (self.apart and self.first[rank] == rank)

    def listed(self) -> tuple[Host, ...]:
        """Every root by the name of its host, with the ranks that see it."""
        roots = sorted(set(self.first))
        return tuple(
            Host(self.names[one], tuple(r for r, first in enumerate(self.first) if first == one)) for one in roots
        )

    def __str__(self) -> str:
        return "; ".join(f"{one.name} (ranks {', '.join(map(str, one.ranks))})" for one in self.listed())


EVERYWHERE = Hosts()


def find_hosts(ranks: Ranks, storage: Storage, *, shared: bool | None) -> Hosts:
    """Every rank leaves a mark in its root, and looks whose marks it sees there.

    If not told whether the root is `shared`, ranks look only where the launcher says that there are several hosts.
    """
    several = shared is False or (shared is None and _several_hosts(ranks.world_size))
    if ranks.world_size == 1 or not storage.near or not several:
        return EVERYWHERE
    nonce = agree(ranks, _CALL, Outcome(), lambda _: uuid.uuid4().hex)
    marks = [f".host-{nonce}-{rank}" for rank in range(ranks.world_size)]
    together(ranks, _CALL, lambda: storage.write(marks[ranks.rank], [sharing.host().encode()]))
    seen = Outcome.of(lambda: {"first": _first(storage, marks), "host": sharing.host()})
    told = agree(ranks, _CALL, seen, lambda told: told)
    storage.delete([marks[ranks.rank]])
    hosts = Hosts(tuple(one["first"] for one in told), tuple(one["host"] for one in told))
    if hosts.apart and ranks.rank == MAIN:
        _log.warning("%s is not shared: each of these keeps what its ranks save: %s", storage.url, hosts)
    return hosts if hosts.apart else EVERYWHERE


def _several_hosts(world_size: int) -> bool:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size


def _first(storage: Storage, marks: list[str]) -> int:
    for rank, mark in enumerate(marks):
        if storage.version(mark) is not None:
            return rank
    raise AbsentError(f"{storage.url} does not show what was just written there.")
