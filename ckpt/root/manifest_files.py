"""The manifest of a checkpoint and its copy: reading whichever is whole, and making both alike again.

`manifest.json` is the commit. `manifest.copy.json` has the same bytes. It is written right after the commit and, where
a checkpoint is replaced, deleted right before it, so that a copy always says what the last commit there said. A damaged
or missing manifest is read from its copy, with a warning, and the next run that locks the root writes it again.
Imports no torch: the command `ckpt` starts without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace

from ckpt.errors import AbsentError, CheckpointError, DamagedError, MissingError, VersionError
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, MARKER, Manifest
from ckpt.root.save_marker import read_marker
from ckpt.storage import Staging, Storage
from ckpt.storage.base import read_document

_log = logging.getLogger("ckpt")
_warned: set[tuple[str, str]] = set()
_REPLACED = 5  # times in a row that a checkpoint may be replaced while its two manifests are compared
_REPAIR = "The next run in this root repairs it, or: ckpt verify --repair."
COPY_IS_USED = f"Its copy {COPY_NAME} is used. {_REPAIR}"


class UncommittedError(DamagedError):
    """There are files of a checkpoint whose save or removal was cut off: nothing that was committed is lost."""


def was_committed(problem: CheckpointError | None) -> bool:
    """Whether a checkpoint with that problem was committed, though its manifest may be damaged or lost."""
    return not isinstance(problem, MissingError | UncommittedError)


def without_manifest(name: str, paths: Collection[str]) -> DamagedError:
    """What is wrong with a folder that has neither a manifest nor a copy of one.

    A save writes its marker before any other file and removes it after the commit; a removal does the same. So files
    without a marker were committed once.
    """
    if MARKER in paths:
        return UncommittedError(f"{name} was never committed: its save was cut off before the manifest was written.")
    return DamagedError(
        f"{name} has lost {FILE_NAME} and {COPY_NAME}: its other files are there, and nothing says what they must be. "
        "Restore either from a backup, or move the folder away."
    )


@dataclass(frozen=True)
class FoundManifest:
    """The manifest of a checkpoint. `flaw`: what is wrong with `manifest.json`, if its copy was read in its place."""

    manifest: Manifest
    flaw: str = ""


def find_manifest(storage: Storage, name: str, known: Callable[[], str] = lambda: "") -> FoundManifest:
    """Read the manifest, or its copy where that is damaged or missing. `known`: names others if there is none."""
    try:
        return FoundManifest(_parsed(storage, name, FILE_NAME))
    except AbsentError:
        paths = {entry.key.removeprefix(f"{name}/") for entry in storage.list(name)}
        if not paths:
            newest = " Without a name, the newest is loaded." if name in ("latest", "last", "newest") else ""
            raise MissingError(f"there is no checkpoint {name!r} in {storage.url}.{known()}{newest}") from None
        if FILE_NAME in paths:
            with suppress(AbsentError, DamagedError):  # committed since it was asked for; or it is no file, but a link
                return FoundManifest(_parsed(storage, name, FILE_NAME))
        if COPY_NAME not in paths or (MARKER in paths and _is_removal(storage, name)):
            raise without_manifest(name, paths) from None
        flaw = f"{name}/{FILE_NAME} is missing."
    except DamagedError as error:
        flaw = str(error)
    try:
        found = FoundManifest(_parsed(storage, name, COPY_NAME), flaw)
    except AbsentError:  # as of every checkpoint that was written before there were copies
        raise DamagedError(flaw) from None
    except DamagedError as error:
        raise DamagedError(f"{flaw} Its copy is damaged too: {error}") from None
    if (storage.url, flaw) not in _warned:
        _warned.add((storage.url, flaw))
        _log.warning("%s/%s %s", storage.url, flaw, COPY_IS_USED)
    return found


def _parsed(storage: Storage, name: str, file: str) -> Manifest:
    where = f"{name}/{file}"
    # the folder's name counts: a user may have renamed or copied it
    return replace(Manifest.from_bytes(read_document(storage, where), where), name=name)


def _is_removal(storage: Storage, name: str) -> bool:
    """Whether a removal was cut off there: it deletes the manifest before all else."""
    marker = read_marker(storage, name)
    return marker is not None and marker.removing


def write_copy(storage: Storage, name: str, data: bytes) -> None:
    """Write the copy of a manifest that was just committed."""
    storage.write(f"{name}/{COPY_NAME}", [data])


def delete_copy(storage: Storage, name: str) -> None:
    """Before another manifest is committed over the one that has this copy: it must not outlive its original."""
    storage.delete([f"{name}/{COPY_NAME}"])


def copy_problems(storage: Storage, name: str) -> list[str]:
    """What is wrong with the two files. A checkpoint that has no copy was written before there were any: nothing is."""
    first, second = _both(storage, name)
    for _ in range(_REPLACED):  # a save of the same name may have come between the two reads
        if first == second or (again := _both(storage, name)) == (first, second):
            break
        first, second = again
    if first is None:
        return [f"{FILE_NAME} was altered or is missing; its copy {COPY_NAME} is intact. {_REPAIR}"]
    is_altered = second is not None or storage.version(f"{name}/{COPY_NAME}") is not None
    if first == second or not is_altered or (second is None and _readable(storage, name, COPY_NAME) is not None):
        return []  # the same, or there is none, or one was written just now
    return [f"{COPY_NAME} was altered; {FILE_NAME}, of which it is the copy, is intact. {_REPAIR}"]


def mend(storage: Storage, name: str, *, proven: bool = False) -> dict[str, str]:
    """Write whichever of the two files is missing or damaged from the other. Returns what was written, and its source.

    Where both can be read and differ, somebody has put another manifest there: neither is overwritten, unless the files
    have `proven` that the first is right. The caller holds the checkpoint's lock, so that nobody removes it meanwhile.
    """
    first, second = _both(storage, name)
    if first == second or (first is None and _is_removal(storage, name)):
        return {}
    if first is not None and second is not None and not proven:
        return {}
    bad, good, data = (FILE_NAME, COPY_NAME, second) if first is None else (COPY_NAME, FILE_NAME, first)
    key = f"{name}/{bad}"
    assert data is not None
    if isinstance(storage, Staging):
        storage.publish({key: storage.stage(key, [data])})
    else:
        storage.write(key, [data], over=storage.version(key))
    return {bad: f"{storage.url}/{name}/{good}"}


def are_alike(storage: Storage, name: str) -> bool:
    """Whether the manifest and its copy have the same bytes. Neither is parsed."""
    try:
        return read_document(storage, f"{name}/{FILE_NAME}") == read_document(storage, f"{name}/{COPY_NAME}")
    except (AbsentError, DamagedError):
        return False


def manifest_bytes(storage: Storage, name: str) -> bytes:
    """The bytes of the manifest, of whichever of the two files is whole."""
    found = find_manifest(storage, name)
    return read_document(storage, f"{name}/{COPY_NAME if found.flaw else FILE_NAME}")


def _both(storage: Storage, name: str) -> tuple[bytes | None, bytes | None]:
    return _readable(storage, name, FILE_NAME), _readable(storage, name, COPY_NAME)


def _readable(storage: Storage, name: str, file: str) -> bytes | None:
    """The bytes of the manifest or of its copy; None if they are not what was written. A newer version's are."""
    try:
        data = read_document(storage, f"{name}/{file}")
        Manifest.from_bytes(data, file)
    except VersionError:
        return data
    except (AbsentError, DamagedError):
        return None
    return data
