"""The storages in which the snapshots of a place are: its own, and those of another host.

Where the tmpfs is too small, their large files are links to memory that the keeper holds: the writer makes a memfd, and
asks the keeper to hold it too. Nobody else asks the keeper for anything: it may be stopped, and what it holds is read
all the same. Imports no torch: `ckpt memory` uses it too.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from ckpt.errors import StorageError, TransientError
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME
from ckpt.memory.keeper import ASKED, HELD
from ckpt.memory.place import SLOTS, MemoryPlace, memory_directory
from ckpt.storage import Storage
from ckpt.storage.local.volatile import VolatileStorage

REPLICA = "replica"  # the folder of a place with the snapshots of another host
_PATIENCE = 3.0  # seconds for the keeper to take a file, which takes it a quarter of one
_PAUSE = 0.005


def slot_storage(place: MemoryPlace | None, folder: str = SLOTS) -> VolatileStorage:
    """The snapshots of a place, as a root of checkpoints; where a host has none, a root without any."""
    if place is None:
        return VolatileStorage(memory_directory() / "ckpt-none")
    return VolatileStorage(place.path / folder, partial(_hold, place.path / HELD) if is_held(place) else None)


def replica_storage(place: MemoryPlace) -> VolatileStorage:
    """The snapshots of another host that this one keeps, as a root of checkpoints."""
    return slot_storage(place, REPLICA)


def remove_files(storage: Storage, name: str) -> None:
    """Remove a snapshot, its manifest and the copy of that first. Nobody may be reading it."""
    storage.delete([f"{name}/{FILE_NAME}", f"{name}/{COPY_NAME}"])
    storage.delete([entry.key for entry in storage.list(name)])


def hold_memory(place: MemoryPlace) -> None:
    """From now on the keeper holds the memory of what is written in a place."""
    (place.path / HELD).mkdir(mode=0o700)


def is_held(place: MemoryPlace) -> bool:
    """Whether the memory of a place's snapshots is held by its keeper, and ends with it."""
    return (place.path / HELD).is_dir()


def _hold(folder: Path, path: Path) -> int:
    """Make a file whose memory the keeper holds, and return its descriptor. The link goes before the request does: the
    keeper frees what has no name and is not asked for."""
    descriptor = os.memfd_create("ckpt", os.MFD_CLOEXEC)
    held = folder / secrets.token_hex(8)
    asked = held.with_suffix(ASKED)
    try:
        os.fchmod(descriptor, 0o600)
        os.symlink(f"/proc/{os.getpid()}/fd/{descriptor}", asked)
        try:
            _wait_for(held)
            os.link(held, path, follow_symlinks=False)
            _check(path, descriptor)
        finally:
            asked.unlink(missing_ok=True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _wait_for(held: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not os.path.lexists(held):
        if time.monotonic() > deadline:
            raise TransientError(f"the keeper process did not answer for {_PATIENCE:g} s. Is it stopped?")
        time.sleep(_PAUSE)


def _check(path: Path, descriptor: int) -> None:
    """Refuse where this process may not look into the keeper's: nobody could read the file."""
    with suppress(OSError):
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return
    where = os.readlink(path)
    path.unlink()
    raise StorageError(f"could not open the keeper process's memory through {where}.")
