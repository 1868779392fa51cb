"""The storage in which the snapshots of a place are: a folder of its tmpfs, or the memfds of its keeper."""

from __future__ import annotations

from ckpt.memory.memfd_storage import MemfdStorage
from ckpt.memory.place import MemoryPlace
from ckpt.storage import LocalStorage, Storage

MEMFD = "memfd"  # of the fact `storage` in run.json; without it the snapshots are in the folder itself


def slot_storage(place: MemoryPlace) -> Storage:
    """The snapshots of a place, as a root of checkpoints. With a keeper that has ended, a root without any."""
    return MemfdStorage(place.path) if place.facts.get("storage") == MEMFD else LocalStorage(place.slots)
