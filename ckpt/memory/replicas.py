"""Copies of snapshots on the next host, with which the loss of a machine is cured from memory too."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ckpt.errors import CkptError, RanksError
from ckpt.memory.host_link import HostLink, LinkError, remove_files
from ckpt.memory.meeting import Meeting
from ckpt.memory.place import MemoryPlace
from ckpt.memory.replica_plan import SLOT, Held, Transfer, plan_transfers
from ckpt.memory.slot_storage import REPLICA, is_in_memfds, replica_storage, slot_storage
from ckpt.ranks.consensus import Result, decide_together
from ckpt.ranks.group import MAIN, Ranks
from ckpt.ranks.hosts import Hosts
from ckpt.root import catalog
from ckpt.storage import Storage
from ckpt.util.threads import WorkerThread

_log = logging.getLogger("ckpt")
_CALL = "StateManager(..., memory=...)"


@dataclass
class Replicas:
    """Has each host keep the snapshots of the host before it, and gives a host back what the next one keeps for it.

    `count`: how many other hosts keep a copy, 0 or 1. Whatever goes wrong with a copy is one line in the log: the
    snapshot itself is there.
    """

    ranks: Ranks
    count: int = 0
    is_off: bool = False
    _link: HostLink | None = None
    _owners: tuple[int, ...] = ()

    def prepare(self, hosts: Hosts) -> None:
        """Connect the hosts, before the first snapshot. Every rank makes this call."""
        if not self.count or self.is_off:
            return
        if not hosts.separate_roots:
            self._turn_off("all ranks are on one host")
            return
        try:
            self._connect(hosts)
        except LinkError as error:
            self._turn_off(str(error))

    def exchange(self, name: str, place: MemoryPlace | None) -> None:
        """Send this host's snapshot to the next host, and take that of the host before. On first ranks, after a commit.

        The next snapshot waits for it: then each host has in memory what all others have a copy of.
        """
        link = self._link
        if link is None or self.is_off or place is None:
            return
        at = self._owners.index(self.ranks.rank)
        following, previous = self._owners[(at + 1) % len(self._owners)], self._owners[at - 1]
        sending = WorkerThread("ckpt-replica")
        try:
            sending.start(lambda: link.send(slot_storage(place), name, following))
            self._take(link, place, previous)
            sending.wait()
        except (CkptError, OSError) as error:
            self._turn_off(str(error))
            link.closing = True
        finally:
            sending.close()

    def _take(self, link: HostLink, place: MemoryPlace, previous: int) -> None:
        if is_in_memfds(place):
            raise LinkError(f"{place.path.parent} is too small for the snapshots of another host.")
        storage = replica_storage(place)
        _keep_newest(storage)
        link.receive(storage, previous)

    def restore(self, meeting: Meeting) -> bool:
        """Give each host what it lacks of the newest snapshot, if other hosts have it. Every rank makes this call.

        Folders that are missing are made. Returns whether this host has received something.
        """
        hosts = meeting.hosts
        transfers = self._plan(hosts, meeting.place)
        if not transfers:
            return False
        try:
            problem = meeting.make()
            self._connect(hosts)
        except RanksError:
            raise
        except (CkptError, OSError) as error:
            problem = str(error)
        problem = problem or self._carry_out(transfers, meeting.place)
        problems = decide_together(self.ranks, _CALL, Result(problem), lambda each: each)
        self._report(hosts, transfers, next(filter(None, problems), ""))
        if any(problems):  # what was sent, and not taken, may still be on its way
            self._link, self._owners = None, ()
        return any(transfer.receiver == self.ranks.rank for transfer in transfers)

    def close(self) -> None:
        """End the transfer under way."""
        if self._link is not None:
            self._link.closing = True

    def _connect(self, hosts: Hosts) -> None:
        owners = tuple(sorted(set(hosts.first)))
        if owners != self._owners:
            self._link, self._owners = HostLink.connect(owners, self.ranks), owners

    def _plan(self, hosts: Hosts, place: MemoryPlace | None) -> list[Transfer]:
        if not hosts.separate_roots:
            return []
        owner = hosts.owns_root(self.ranks.rank)
        mine = Result.capture(lambda: [held.to_json() for held in self._held(place)] if owner else [])
        ranks_of = {record.ranks[0]: record.ranks for record in hosts.records()}

        def plan(views: list[list[dict[str, object]]]) -> list[list[object]]:
            held = [Held(**found) for view in views for found in view]  # type: ignore[arg-type]
            found = plan_transfers(held, ranks_of, self.ranks.world_size)
            return [[one.sender, one.place, one.name, one.receiver] for one in found]

        return [Transfer(*one) for one in decide_together(self.ranks, _CALL, mine, plan)]

    def _held(self, place: MemoryPlace | None) -> list[Held]:
        if place is None:
            return []
        rank = self.ranks.rank
        return [*Held.list(rank, SLOT, slot_storage(place)), *Held.list(rank, REPLICA, replica_storage(place))]

    def _carry_out(self, transfers: list[Transfer], place: MemoryPlace | None) -> str:
        """All transfers, in one order on all hosts. Returns what went wrong."""
        link = self._link
        if link is None or place is None:
            return ""
        try:
            for transfer in transfers:
                if transfer.sender == self.ranks.rank:
                    source = slot_storage(place) if transfer.place == SLOT else replica_storage(place)
                    link.send(source, transfer.name, transfer.receiver)
                elif transfer.receiver == self.ranks.rank:
                    link.receive(slot_storage(place), transfer.sender)
        except (CkptError, OSError) as error:
            return str(error)
        return ""

    def _report(self, hosts: Hosts, transfers: list[Transfer], problem: str) -> None:
        if self.ranks.rank != MAIN:
            return
        sent = "; ".join(
            f"{hosts.names[one.receiver]} has {one.name} from {hosts.names[one.sender]}" for one in transfers
        )
        if problem:
            _log.warning("snapshots in the memory of other hosts cannot be used: %s", problem)
        else:
            _log.info("snapshots in memory were sent between hosts: %s", sent)

    def _turn_off(self, why: str) -> None:
        self.is_off = True
        _log.warning("Memory(replicas=%d) has no effect: %s. Snapshots are kept by their own host.", self.count, why)


def _keep_newest(storage: Storage) -> None:
    """Leave one copy, the newest: there are two while the next arrives."""
    newest = next((checkpoint.name for checkpoint in catalog.scan(storage) if checkpoint.committed), None)
    names = {entry.key.partition("/")[0] for entry in storage.list()}
    for name in names - {newest}:
        remove_files(storage, name)
