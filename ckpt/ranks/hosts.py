"""Which ranks see the same root: on a shared filesystem all of them, with separate roots those of each host.

And over which network hosts reach each other.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypedDict

import torch.distributed as dist

from ckpt.errors import AbsentError, RanksError
from ckpt.formats.native.manifest import Host
from ckpt.ranks.consensus import MAIN, Ranks, Result, decide_together, run_on_all_ranks
from ckpt.ranks.find import OWN_ROOTS, meeting_name, ranks_per_host
from ckpt.ranks.store_and_heartbeats import format_ranks, ranks_by_value
from ckpt.ranks.store_group import built_here
from ckpt.storage import Storage

_log = logging.getLogger("ckpt")
_CALL = "StateManager(...)"


def host_name() -> str:
    """The name of this machine. Ranks with the same name run on the same host."""
    return socket.gethostname()


@dataclass(frozen=True)
class Hosts:
    """For each rank the first rank that sees the same root, and the name of its host.

    That first rank owns the root: it holds the lock, and writes the manifest and the files that all ranks share.
    """

    first: tuple[int, ...] = (MAIN,)
    names: tuple[str, ...] = ("",)

    @property
    def separate_roots(self) -> bool:
        """Whether hosts have separate roots, each with the files of its own ranks."""
        return any(first != MAIN for first in self.first)

    def owns_root(self, rank: int) -> bool:
        """True on rank 0 of a shared root, and on the first rank of each separate one."""
        return rank == MAIN or (self.separate_roots and self.first[rank] == rank)

    def records(self) -> tuple[Host, ...]:
        """The hosts as the manifest lists them: for each root its host's name, and the ranks that see it."""
        ranks: dict[int, list[int]] = {}
        for rank, owner in enumerate(self.first):
            ranks.setdefault(owner, []).append(rank)
        return tuple(Host(self.names[owner], tuple(ranks[owner])) for owner in sorted(ranks))

    def __str__(self) -> str:
        return "; ".join(f"{host.name} (ranks {', '.join(map(str, host.ranks))})" for host in self.records())


ONE_SHARED_ROOT = Hosts()


def find_hosts(ranks: Ranks, storage: Storage, *, shared: bool | None) -> Hosts:
    """Find out which ranks share a root: each writes a probe file into its own, and looks for the others' there.

    With `shared=None`, they do so only where the launcher says that there are several hosts.
    """
    if ranks.world_size == 1 or not may_have_separate_roots(storage, shared=shared):
        return ONE_SHARED_ROOT
    opened = built_here().labels(meeting_name(OWN_ROOTS, ranks.members))
    mine = Result(_OpenedRoot(url=storage.url, opened=opened))
    nonce = decide_together(ranks, _CALL, mine, lambda roots: _agree_on_root(roots, shared=shared))
    probes = [f".host-{nonce}-{rank}" for rank in range(ranks.world_size)]
    run_on_all_ranks(ranks, _CALL, lambda: storage.write(probes[ranks.rank], [host_name().encode()]))
    seen = Result.capture(lambda: (_first_seen(storage, probes), host_name()))
    views = decide_together(ranks, _CALL, seen, lambda views: views)
    storage.delete([probes[ranks.rank]])
    hosts = Hosts(tuple(first for first, _ in views), tuple(name for _, name in views))
    if hosts.separate_roots and ranks.rank == MAIN:
        _log.warning(
            "the hosts do not share %s, so each host keeps only the files of its own ranks: %s", storage.url, hosts
        )
    return hosts if hosts.separate_roots else ONE_SHARED_ROOT


def may_have_separate_roots(storage: Storage, *, shared: bool | None) -> bool:
    """Whether hosts may have separate roots: the user says so, or the launcher that there are several hosts."""
    return storage.is_local and (shared is False or (shared is None and _several_hosts()))


def _several_hosts() -> bool:
    return count_hosts() > 1


def count_hosts() -> int:
    """The machines of the job, as its launcher says; 1 if it does not."""
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return -(-world_size // (ranks_per_host() or world_size))


class _OpenedRoot(TypedDict):
    """The root of a rank's manager, and those of all its managers that may have separate roots, in order."""

    url: str
    opened: list[str]


def _agree_on_root(roots: list[_OpenedRoot], *, shared: bool | None) -> str:
    """On the main rank: refuse roots that are not all of one run. Returns a nonce for the names of the probe files.

    Paths may differ between hosts. But a rank that has opened another rank's root with another of its managers has
    built them in another order; and roots with different names may be of different runs, unless the user has said
    otherwise with `RankOptions(shared=False)`.
    """
    urls = [root["url"] for root in roots]
    mixed = any(url in root["opened"] and url != root["url"] for url in urls for root in roots)
    names = {url.rstrip("/").rpartition("/")[2] for url in urls}
    if mixed or (len(names) > 1 and shared is not False):
        opened = ranks_by_value({rank: ", ".join(root["opened"]) for rank, root in enumerate(roots)})
        listed = "; ".join(f"{format_ranks(found)} opened {urls}" for urls, found in opened.items())
        raise RanksError(
            f"the ranks have opened different roots: {listed}. Every rank must build the same managers in the same "
            "order. If one run should have a separate root on each host, give the managers "
            "ranks=ckpt.RankOptions(shared=False)."
        )
    return uuid.uuid4().hex


def _first_seen(storage: Storage, probes: list[str]) -> int:
    """The first rank whose probe file is in this rank's root."""
    for rank, probe in enumerate(probes):
        if storage.version(probe) is not None:
            return rank
    raise AbsentError(f"ckpt has just written a file to {storage.url}, but can't find it there.")


_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_LOOPBACK = 127  # the first byte of such an address


@contextmanager
def on_the_interface_of_the_job() -> Iterator[None]:
    """Gloo listens where this host reaches the others of the job, unless `GLOO_SOCKET_IFNAME` says where.

    By itself it listens on whatever address the host's name has, which may be a public one.
    """
    name = "" if os.environ.get(_INTERFACE_VARIABLE) else interface_to(os.environ.get("MASTER_ADDR", ""))
    if name:
        os.environ[_INTERFACE_VARIABLE] = name
    try:
        yield
    finally:
        if name:
            del os.environ[_INTERFACE_VARIABLE]


def interface_to(host: str) -> str:
    """The network interface from which a host is reached; empty if it is not known, or is the loopback."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))  # sends nothing: the kernel chooses a route
            mine = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # it has no address
                    asked = struct.pack("256s", name.encode())
                    if fcntl.ioctl(probe.fileno(), _GET_ADDRESS, asked)[20:24] == mine and mine[0] != _LOOPBACK:
                        return name
    except OSError:
        pass
    return ""
