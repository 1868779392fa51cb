"""The storage in which the snapshots of a place are: a folder of its tmpfs, or the memfds of its keeper.

Imports no torch: the rescue and `ckpt memory` use it too.
"""

from __future__ import annotations

from ckpt.memory.memfd_storage import MemfdStorage
from ckpt.memory.place import MemoryPlace, memory_directory
from ckpt.storage import Storage
from ckpt.storage.local.volatile import VolatileStorage

TMPFS, MEMFD = "tmpfs", "memfd"  # the fact `storage` in run.json
ANSWER = 0.9  # seconds for an answer of the keeper while training is under way: then the tier does without it
REPLICA = "replica"  # the folder of a place with the snapshots of another host


def slot_storage(place: MemoryPlace | None, patience: float | None = None) -> Storage:
    """The snapshots of a place, as a root of checkpoints; where a host has none, a root without any.

    With a keeper that has ended, memfds are a root without any too. `patience`: seconds for an answer of the keeper.
    """
    if place is None:
        return VolatileStorage(memory_directory() / "ckpt-none")
    return MemfdStorage(place.path, patience) if is_in_memfds(place) else VolatileStorage(place.slots)


def replica_storage(place: MemoryPlace) -> Storage:
    """The snapshots of another host that this one keeps, as a root of checkpoints."""
    return VolatileStorage(place.path / REPLICA)


def is_in_memfds(place: MemoryPlace) -> bool:
    """Whether the snapshots of a place are in its keeper's memfds, and end with it."""
    return place.facts.get("storage") == MEMFD
