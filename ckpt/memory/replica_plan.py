"""What the hosts of a job hold of each other's snapshots, and what must be sent where before all can resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckpt.errors import CkptError
from ckpt.formats.native.manifest import Manifest
from ckpt.root import catalog
from ckpt.root.file_names import rank_of
from ckpt.storage import Storage

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
