"""Verifies checkpoints byte by byte, also in a root that a run is writing to.

Imports no torch: a shell asks for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ckpt.errors import AbsentError, CheckpointError, LockedError, StorageError, shows_damage
from ckpt.formats.native.manifest import FILE_NAME, FileRecord, Host, Manifest
from ckpt.root import catalog
from ckpt.root.file_names import rank_of
from ckpt.root.save_marker import read_marker
from ckpt.root.verified_file import WINDOW, StoredFile, VerifiedFile
from ckpt.storage import Storage
from ckpt.util.console import bar, size

INTACT = "intact"
DAMAGED = "DAMAGED"
UNREADABLE = "UNREADABLE"
UNDER_WAY = "under way"
REMOVED = "removed"

_PATIENCE = 10.0  # seconds that a removal or a cleaning in another process is waited for
_PAUSE = 0.1
_MOST_THREADS = 16
_THREADS = min(_MOST_THREADS, max(2, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


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
            wrong = problems(storage, without_other_hosts(storage, manifest), show=True)
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
    mark = read_marker(storage, name) if FILE_NAME not in present else None
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


def size_problems(storage: Storage, manifest: Manifest) -> list[str]:
    """Files that are missing or have another size than the manifest says. Reads no file."""
    found = _sizes(storage, manifest)
    problems = []
    for file in manifest.files:
        if file.path not in found:
            host = _host_of(file, manifest)
            problems.append(f"{file.path} is missing" + (f" ({host.name} saved it)" if host else ""))
        elif found[file.path] != file.size:
            problems.append(f"{file.path} is {size(found[file.path])} of {size(file.size)} ({found[file.path]} bytes)")
    return problems


def _sizes(storage: Storage, manifest: Manifest) -> dict[str, int]:
    return {entry.key.partition("/")[2]: entry.size for entry in storage.list(manifest.name)}


def _host_of(file: FileRecord, manifest: Manifest) -> Host | None:
    """Of hosts with roots of their own, the one that has a file; none if all have it."""
    rank = rank_of(file.name)
    return next((host for host in manifest.hosts if rank in host.ranks), None)


def files_on_other_hosts(storage: Storage, manifest: Manifest) -> dict[str, str]:
    """Files that other hosts have in roots of their own, with the names of these hosts.

    A host of whose files none is here is another one. Where no host's are, all of them should be here.
    """
    if not manifest.hosts:
        return {}
    found = _sizes(storage, manifest)
    holders = {file.path: host for file in manifest.files if (host := _host_of(file, manifest))}
    here = {host for path, host in holders.items() if path in found}
    return {path: host.name for path, host in holders.items() if here and host not in here}


def without_other_hosts(storage: Storage, manifest: Manifest) -> Manifest:
    """The manifest without the files that other hosts have."""
    others = files_on_other_hosts(storage, manifest)
    return replace(manifest, files=tuple(file for file in manifest.files if file.path not in others))


def problems(storage: Storage, manifest: Manifest, *, show: bool = False) -> list[str]:
    """Whatever is wrong with a checkpoint's files: sizes first, then every byte against its hash."""
    wrong = size_problems(storage, manifest)
    if wrong:
        return wrong
    files = [VerifiedFile(StoredFile(storage, f"{manifest.name}/{file.path}"), file) for file in manifest.files]
    blocks = [(file, index) for file in files for index in range(len(file.record.blocks))]
    with bar(f"verifying {manifest.name}", manifest.size, in_bytes=True, show=show) as advance:
        return altered(blocks, advance)


def altered(blocks: list[tuple[VerifiedFile, int]], advance: Callable[[float], None]) -> list[str]:
    """What is wrong with blocks of files. They are looked at in several threads."""
    buffers = threading.local()

    def look(block: tuple[VerifiedFile, int]) -> str | None:
        if not hasattr(buffers, "own"):
            buffers.own = memoryview(bytearray(WINDOW))
        file, index = block
        return file.look(index, buffers.own, advance)

    with ThreadPoolExecutor(reader_threads(file.stored.storage for file, _ in blocks)) as pool:
        return [problem for problem in pool.map(look, blocks) if problem]


def reader_threads(storages: Iterable[Storage]) -> int:
    """How many threads read at the same time: as many as there are cores; far away, as many as have to wait."""
    return _THREADS if all(storage.near for storage in storages) else _MOST_THREADS
