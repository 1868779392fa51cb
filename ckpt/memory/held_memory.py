"""What the runs of this user hold in the memory of this machine: for `ckpt memory`.

Imports no torch: the command starts without it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.errors import CkptError, LockedError
from ckpt.formats.native.manifest import Manifest
from ckpt.memory.keeper_process import KeeperProcess, last_log_line, living_keeper
from ckpt.memory.place import ALIVE, MemoryPlace
from ckpt.memory.slot_storage import REPLICA, slot_storage
from ckpt.root.catalog import scan
from ckpt.storage import open_storage, place_of

_FLOCK = re.compile(r"\d+: FLOCK +\w+ +READ +(\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ")
_PATIENCE = 10.0  # seconds for a keeper to notice that its folder is gone


@dataclass(frozen=True)
class HeldMemory:
    """The folder of a run in memory: its snapshots, newest first, and who lives there."""

    place: MemoryPlace
    snapshots: tuple[Manifest, ...]
    size: int  # of all files, spare ones too
    processes: tuple[int, ...]  # of the run; empty where it is deserted, or their numbers are not known here
    is_deserted: bool
    keeper: KeeperProcess | None
    log: str

    @classmethod
    def of(cls, place: MemoryPlace) -> HeldMemory:
        deserted = place.is_deserted() or place.is_deserted()  # again: a keeper that looks holds it for an instant
        return cls(
            place,
            tuple(_snapshots(place)),
            sum(_sizes(place.slots)) + sum(_sizes(place.path / REPLICA)),
            () if deserted else tuple(_holders(place.path / ALIVE)),
            deserted,
            living_keeper(place),
            last_log_line(place),
        )

    @property
    def root(self) -> str:
        return str(self.place.facts.get("root", "?"))

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.place.path),
            "root": self.root,
            "created": self.place.facts.get("created"),
            "snapshots": [
                {"name": found.name, "step": found.step, "size": found.size, "created": found.created}
                for found in self.snapshots
            ],
            "size": self.size,
            "deserted": self.is_deserted,
            "idle_seconds": round(self.place.idle_seconds, 1),
            "processes": list(self.processes),
            "keeper": self.keeper.process if self.keeper else None,
            "log": self.log,
        }

    def clear(self) -> None:
        """Remove the folder, and wait until its keeper has ended. Refused while a process of the run lives."""
        if not self.place.remove_if_deserted() and not self.place.remove_if_deserted():
            named = ", ".join(map(str, _holders(self.place.path / ALIVE)))
            raise LockedError(
                f"a run still uses the snapshots of {self.root} (process {named or 'unknown'}). Nothing was removed. "
                "Stop the run first."
            )
        if self.keeper is not None and not self.keeper.wait(_PATIENCE):
            raise LockedError(
                f"the keeper process {self.keeper.process} of {self.root} did not end. Stop that process."
            )


def list_memory() -> list[HeldMemory]:
    """What this user's runs hold in memory here, the newest first."""
    found = sorted(MemoryPlace.list_places(), key=lambda place: str(place.facts.get("created")), reverse=True)
    return [HeldMemory.of(place) for place in found]


def memory_of(root: str) -> list[HeldMemory]:
    """What is held for a root, given by its URL or path, or by the path of the folder in memory."""
    names = {root, os.path.realpath(root)}
    with suppress(CkptError):
        storage = open_storage(root)
        names |= {storage.url, place_of(storage)}
    return [held for held in list_memory() if {held.root, str(held.place.path)} & names]


def _snapshots(place: MemoryPlace) -> Iterator[Manifest]:
    with suppress(CkptError):  # removed while it is read
        yield from (found.manifest for found in scan(slot_storage(place)) if found.manifest is not None)


def _sizes(folder: Path) -> Iterator[int]:
    for above, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                yield os.stat(os.path.join(above, name)).st_size


def _holders(path: Path) -> Iterator[int]:
    """The processes that hold a shared flock on a file, as far as this one may see them."""
    try:
        there, locks = os.lstat(path), Path("/proc/locks").read_text()
    except OSError:
        return
    for process, major, minor, inode in _FLOCK.findall(locks):
        device = os.makedev(int(major, 16), int(minor, 16))
        if (device, int(inode)) == (there.st_dev, there.st_ino) and int(process) > 0:
            yield int(process)
