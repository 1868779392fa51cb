"""Verifies checkpoints byte by byte, also in a root that a run is writing to.

Imports no torch: a shell asks for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from ckpt.errors import AbsentError, CheckpointError, LockedError, StorageError, shows_damage
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.root import catalog, cleanup
from ckpt.storage import Storage

INTACT = "intact"
DAMAGED = "DAMAGED"
UNREADABLE = "UNREADABLE"
UNDER_WAY = "under way"
REMOVED = "removed"

_PATIENCE = 10.0  # seconds that a removal or a cleaning in another process is waited for
_PAUSE = 0.1


@dataclass(frozen=True)
class Verdict:
    """What was found: one of the five states, and the problems that speak against the checkpoint.

    `under way`: a process is just saving or removing it. `removed`: it was listed, and is gone. Neither is a fault.
    """

    name: str
    state: str
    problems: tuple[str, ...] = ()
    manifest: Manifest | None = None
    error: StorageError | None = None  # why it is unreadable

    @property
    def is_fault(self) -> bool:
        return self.state in (DAMAGED, UNREADABLE)


def verify(url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> dict[str, list[str]]:
    """What is wrong with a checkpoint, or with each checkpoint of a root, by name: an empty list means intact.

    Every file is read and compared with the hashes in its manifest; of hosts with roots of their own, those of this
    root. A run may go on meanwhile: of a root, what is just being saved or removed is left out. `storage_options` are
    those of the manager.
    """
    storage, names, pointed_at = catalog.located(url, storage_options)
    verdicts = [verdict(storage, name) for name in names]
    return {one.name: list(one.problems) for one in verdicts if pointed_at or one.is_fault or one.state == INTACT}


def verdict(storage: Storage, name: str) -> Verdict:
    """The state of one checkpoint. Looks again where another process was at work there."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        found, final = _look(storage, name)
        if final or time.monotonic() > deadline:
            return found
        time.sleep(_PAUSE)


def _look(storage: Storage, name: str) -> tuple[Verdict, bool]:
    """The state as it seems, and whether a second look is of no use."""
    manifest: Manifest | None = None
    try:
        with storage.lock(name, shared=True):  # a run that goes on meanwhile must not remove what is being read
            manifest = catalog.read_manifest(storage, name)
            wrong = catalog.problems(storage, catalog.kept_here(storage, manifest), show=True)
        if not wrong:
            return Verdict(name, INTACT, (), manifest), True
        return _explained(storage, name, manifest, tuple(wrong))
    except LockedError as error:
        return Verdict(name, UNDER_WAY, (f"another process is saving or removing it: {error}",)), False
    except StorageError as error:
        if not shows_damage(error):
            return Verdict(name, UNREADABLE, (str(error),), manifest, error), True
        return _explained(storage, name, manifest, (str(error),))
    except CheckpointError as error:
        return _explained(storage, name, manifest, (str(error),))


def _explained(
    storage: Storage, name: str, manifest: Manifest | None, problems: tuple[str, ...]
) -> tuple[Verdict, bool]:
    """Whether a checkpoint that does not verify is damaged, or was saved anew, is being saved, or has been removed."""
    present = {entry.key.removeprefix(f"{name}/") for entry in storage.list(name)}
    if not present:
        return Verdict(name, REMOVED, problems), True
    known = catalog.find(storage, name).manifest if FILE_NAME in present else None
    if known is not None and (manifest is None or known.id != manifest.id):
        return Verdict(name, DAMAGED, problems, known), False  # committed since: look at that one
    mark = cleanup.read_mark(storage, name) if FILE_NAME not in present else None
    if mark is not None and mark.under_way:
        return Verdict(name, UNDER_WAY, problems), True
    gone_since = manifest is not None and known is None and FILE_NAME not in present
    return Verdict(name, DAMAGED, problems, manifest), not gone_since


@contextmanager
def reading(storage: Storage, name: str) -> Iterator[Manifest | None]:
    """Keep a checkpoint from being removed while its manifest is used; None if it is not there, or not committed.

    Waits while another process removes or cleans it.
    """
    with ExitStack() as held:
        try:
            _lock_patiently(storage, name, held)
        except AbsentError:
            yield None
        else:
            yield catalog.find(storage, name).manifest


def _lock_patiently(storage: Storage, name: str, held: ExitStack) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            held.enter_context(storage.lock(name, shared=True))
            return
        except LockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE)
