"""Copies of snapshots on the next host, with which the loss of a machine is cured from memory too.

What hosts hold of each other's snapshots and what must be sent where is planned on the main rank. It is sent through a
process group of its own, with the gloo backend and one rank of each host: nothing waits behind the training's
collectives, and none of those is disturbed.

Gloo asks nobody who he is. So everything that is sent carries a MAC, whose key the main rank draws for each connection
and hands out through the job's store: what another process on the network sends is refused before it is committed.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from ckpt.errors import CkptError, RanksError, StorageError
from ckpt.formats.layout import Members
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.memory.meeting import Meeting
from ckpt.memory.place import MemoryPlace
from ckpt.memory.slot_storage import REPLICA, remove_files, replica_storage, slot_storage
from ckpt.ranks.consensus import MAIN, Ranks, Result, decide_together
from ckpt.ranks.hosts import Hosts, on_the_interface_of_the_job
from ckpt.root import catalog
from ckpt.root.catalog import find, rank_of
from ckpt.root.mirror import Throttle
from ckpt.storage import Storage
from ckpt.util.option_values import parse_size
from ckpt.util.threads import Worker

SLOT = "slots"  # where a host has it: among its own snapshots, or among those of another (`REPLICA`)


@dataclass(frozen=True)
class Held:
    """A committed snapshot in the memory of a host, whose first rank is `owner`, and the files of it that are there.

    `ranks`: for each file of the snapshot, on whatever host, the rank that needs it; None for one that all need.
    """

    owner: int
    place: str
    id: str
    name: str
    sequence: int
    world_size: int
    files: Sequence[str]
    ranks: Mapping[str, int | None]

    @classmethod
    def list(cls, owner: int, place: str, storage: Storage) -> list[Held]:
        """Everything that is committed there. What cannot be read is as good as absent."""
        try:
            found = [checkpoint.manifest for checkpoint in catalog.scan(storage)]
            return [cls.of(owner, place, storage, manifest) for manifest in found if manifest is not None]
        except CkptError:
            return []

    @classmethod
    def of(cls, owner: int, place: str, storage: Storage, manifest: Manifest) -> Held:
        ranks = {file.path: rank_of(file.name) for file in manifest.files}
        files = files_in(storage, manifest)
        return cls(owner, place, manifest.id, manifest.name, manifest.sequence, manifest.world_size, files, ranks)

    def has_all_for(self, ranks: Sequence[int], world_size: int) -> bool:
        """Whether nothing is missing that these ranks need. Another number of ranks may need every file."""
        every = world_size != self.world_size
        needed = {path for path, rank in self.ranks.items() if every or rank is None or rank in ranks}
        return needed <= set(self.files)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Transfer:
    """A snapshot that the first rank of one host sends to that of another."""

    sender: int
    place: str
    name: str
    receiver: int


def files_in(storage: Storage, manifest: Manifest) -> list[str]:
    """The paths of a snapshot's files that are in a storage, with the size that they must have."""
    there = {entry.key: entry.size for entry in storage.list(manifest.name)}
    return [file.path for file in manifest.files if there.get(f"{manifest.name}/{file.path}") == file.size]


def plan_transfers(held: Sequence[Held], ranks_of: Mapping[int, Sequence[int]], world_size: int) -> list[Transfer]:
    """What must be sent so that all hosts have the newest snapshot that they can have together.

    `ranks_of`: the ranks of each host, by its first. Empty where nothing is missing, or too much.
    """
    for newest in dict.fromkeys(found.id for found in sorted(held, key=lambda found: -found.sequence)):
        plan = _plan([found for found in held if found.id == newest], ranks_of, world_size)
        if plan is not None:
            return plan
    return []


def _plan(held: Sequence[Held], ranks_of: Mapping[int, Sequence[int]], world_size: int) -> list[Transfer] | None:
    """The transfers of one snapshot; None if a host cannot have its part."""
    transfers = []
    for owner, ranks in ranks_of.items():
        fitting = [found for found in held if found.has_all_for(ranks, world_size)]
        if any((found.owner, found.place) == (owner, SLOT) for found in fitting):
            continue
        if not fitting:
            return None
        source = fitting[0]
        transfers.append(Transfer(source.owner, source.place, source.name, owner))
    return transfers


BANDWIDTH_VARIABLE = "CKPT_MEMORY_BANDWIDTH"
_BANDWIDTH = 1e9  # bytes per second
_BLOCK = 8 << 20
_PATIENCE = timedelta(seconds=30)  # with a host that sends or takes nothing
_MOST_HEADER = 64 << 20  # bytes
_DATA, _DONE = 1, 2  # tags of gloo: two hosts may send to each other at the same time, and confirm
_TAG = 32  # bytes of a MAC, and of the key that it is made with


class LinkError(StorageError):
    """The other host is gone, or this run ends."""


class Conversation:
    """What one rank has sent another, in a MAC that grows with it: nothing can be altered, repeated or left out."""

    def __init__(self, key: bytes, sender: int, receiver: int, kind: int) -> None:
        self._mac = blake2b(f"{kind}: {sender} to {receiver}".encode(), key=key, digest_size=_TAG)

    def add(self, data: torch.Tensor) -> None:
        self._mac.update(data.numpy().data)

    @property
    def tag(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self._mac.digest()), dtype=torch.uint8)

    def check(self, tag: torch.Tensor, sender: int) -> None:
        if not hmac.compare_digest(self._mac.digest(), tag.numpy().tobytes()):
            raise LinkError(
                f"a message claims to be from rank {sender}, but is not: somebody else on the network sent it."
            )


@dataclass
class HostLink:
    """A connection between the first ranks of all hosts. `key`: a secret of them, with which they know each other."""

    group: Any
    rank: int
    key: bytes = field(repr=False)
    members: Members = None  # the numbers in the job of the ranks that are connected here, if they are not all
    bandwidth: float = field(default_factory=lambda: bandwidth())
    closing: bool = False
    _conversations: dict[tuple[int, int, int], Conversation] = field(default_factory=dict, repr=False)
    _block: torch.Tensor = field(default_factory=lambda: torch.empty(_BLOCK, dtype=torch.uint8), repr=False)

    @classmethod
    def connect(cls, owners: Sequence[int], ranks: Ranks) -> HostLink | None:
        """Every rank makes this call. Returns None on those that are not first on their host."""
        key = decide_together(ranks, _CALL, Result(), lambda _: secrets.token_hex(_TAG))
        some = ranks.members is not None  # then no other rank of the job takes part
        numbers = [ranks.members[owner] for owner in owners] if ranks.members is not None else [*owners]
        try:
            with on_the_interface_of_the_job():
                group = dist.new_group(numbers, _PATIENCE, "gloo", use_local_synchronization=some)
        except (RuntimeError, ValueError) as error:
            raise LinkError(f"the hosts can't connect to each other: {error}") from error
        return cls(group, ranks.rank, bytes.fromhex(key), ranks.members) if ranks.rank in owners else None

    def _said(self, sender: int, receiver: int, kind: int = _DATA) -> Conversation:
        """What was said so far. A confirmation is about all data that came the other way."""
        which = (sender, receiver, kind)
        found = self._conversations.setdefault(which, Conversation(self.key, *which))
        if kind == _DONE:
            found.add(self._said(receiver, sender).tag)
        return found

    def send(self, storage: Storage, name: str, receiver: int) -> None:
        """Send a snapshot: its files that are here, and the manifest last. Returns when the other host has committed
        it."""
        manifest = Manifest.from_bytes(storage.read(f"{name}/{FILE_NAME}"), name)
        keys = [f"{name}/{path}" for path in (*files_in(storage, manifest), FILE_NAME)]
        sizes = {entry.key: entry.size for entry in storage.list(name)}
        header = {"name": name, "id": manifest.id, "files": [(key, sizes[key]) for key in keys]}
        self._send_header(header, receiver)
        throttle, block = Throttle(self.bandwidth), torch.empty(_BLOCK, dtype=torch.uint8)
        for key in keys:
            for start in range(0, sizes[key], _BLOCK):
                part = block[: min(_BLOCK, sizes[key] - start)]
                storage.read_into(key, start, part.numpy().data)
                self._send(part, receiver)
                throttle.passed(len(part))
            self._send_tag(receiver)
        self._check_tag(receiver, _DONE)

    def receive(self, storage: Storage, sender: int) -> str:
        """Take a snapshot, and commit it: its manifest comes last. Returns its name.

        Another part of the same snapshot is kept, for it may be what a third host needs; another of that name is not.
        """
        header = self._receive_header(sender)
        there = find(storage, header["name"]).manifest
        if there is None or there.id != header["id"]:
            remove_files(storage, header["name"])
        for key, size in header["files"]:
            storage.write(key, self._pieces(size, sender))
        self._send_tag(sender, _DONE)
        return str(header["name"])

    def _pieces(self, size: int, sender: int) -> Iterator[memoryview]:
        for start in range(0, size, _BLOCK):
            part = self._block[: min(_BLOCK, size - start)]
            self._receive(part, sender)
            yield part.numpy().data
        self._check_tag(sender)  # before the file is complete, and so before the manifest commits all of them

    def _send_header(self, header: dict[str, Any], receiver: int) -> None:
        data = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        self._send(torch.tensor([len(data)]), receiver)
        self._send(data, receiver)
        self._send_tag(receiver)

    def _receive_header(self, sender: int) -> dict[str, Any]:
        length = torch.zeros(1, dtype=torch.int64)
        self._receive(length, sender)
        if not 0 < int(length) <= _MOST_HEADER:
            raise LinkError(f"rank {sender} sent something that is not a snapshot.")
        data = torch.empty(int(length), dtype=torch.uint8)
        self._receive(data, sender)
        self._check_tag(sender)
        header: dict[str, Any] = json.loads(data.numpy().tobytes())
        return header

    def _send(self, data: torch.Tensor, receiver: int) -> None:
        self._said(self.rank, receiver).add(data)
        self._wait(lambda: dist.isend(data, self._in_job(receiver), self.group, _DATA), receiver)

    def _receive(self, data: torch.Tensor, sender: int) -> None:
        self._wait(lambda: dist.irecv(data, self._in_job(sender), self.group, _DATA), sender)
        self._said(sender, self.rank).add(data)

    def _send_tag(self, receiver: int, kind: int = _DATA) -> None:
        """Show that all that was sent so far is from here."""
        tag = self._said(self.rank, receiver, kind).tag
        self._wait(lambda: dist.isend(tag, self._in_job(receiver), self.group, kind), receiver)

    def _check_tag(self, sender: int, kind: int = _DATA) -> None:
        tag = torch.empty(_TAG, dtype=torch.uint8)
        self._wait(lambda: dist.irecv(tag, self._in_job(sender), self.group, kind), sender)
        self._said(sender, self.rank, kind).check(tag, sender)

    def _in_job(self, rank: int) -> int:
        return rank if self.members is None else self.members[rank]

    def _wait(self, begin: Callable[[], Any], other: int) -> None:
        if self.closing:
            raise LinkError("this run ends.")
        try:
            begin().wait()
        except RuntimeError as error:
            raise LinkError(f"the host of rank {other} does not answer: {error}") from error


def bandwidth() -> float:
    """Bytes per second that copies may take of the network: `CKPT_MEMORY_BANDWIDTH`, as '500MB', or 1 GB."""
    given = os.environ.get(BANDWIDTH_VARIABLE)
    return float((parse_size(given) if given else None) or _BANDWIDTH)


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
        sending = Worker("ckpt-replica").start(lambda: link.send(slot_storage(place), name, following))
        try:
            self._take(link, place, previous)
            sending.wait()
        except (CkptError, OSError) as error:
            self._turn_off(str(error))
            link.closing = True
        finally:
            sending.close()  # waits

    def _take(self, link: HostLink, place: MemoryPlace, previous: int) -> None:
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
        """Stop the transfer that is under way."""
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

        def plan(views: list[list[dict[str, object]]]) -> list[tuple[int, str, str, int]]:
            held = [Held(**found) for view in views for found in view]  # type: ignore[arg-type]
            found = plan_transfers(held, ranks_of, self.ranks.world_size)
            return [(one.sender, one.place, one.name, one.receiver) for one in found]

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
            _log.warning("ckpt can't use the snapshots in the memory of other hosts: %s", problem)
        else:
            _log.info("the hosts exchanged their snapshots in memory: %s", sent)

    def _turn_off(self, why: str) -> None:
        self.is_off = True
        _log.warning("Memory(replicas=%d) has no effect: %s. Each host keeps only its own snapshots.", self.count, why)


def _keep_newest(storage: Storage) -> None:
    """Leave one copy, the newest: there are two while the next arrives."""
    newest = next((checkpoint.name for checkpoint in catalog.scan(storage) if checkpoint.committed), None)
    names = {entry.key.partition("/")[0] for entry in storage.list()}
    for name in names - {newest}:
        remove_files(storage, name)
