"""The files of a checkpoint: its manifest, the copy of that, the marker of a save under way, and how others are named.

`manifest.json` is the commit. `manifest.copy.json` has the same bytes. It is written right after the commit and, where
a checkpoint is replaced, deleted right before it, so that a copy always says what the last commit there said. A damaged
or missing manifest is read from its copy, with a warning, and the next run that locks the root writes it again.

`.saving` lists the files that a crash would leave behind, and keeps saves and removals of one checkpoint apart. Imports
no torch: the command `ckpt` starts without it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from ckpt.errors import (
    AbsentError,
    CheckpointError,
    ConflictError,
    DamagedError,
    LockedError,
    MissingError,
    VersionError,
)
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, Manifest
from ckpt.formats.native.manifest import MARKER as MARKER
from ckpt.storage import Entry, Staging, Storage
from ckpt.storage.base import read_document
from ckpt.util.checked_json import Rule, broken_rules, is_key, is_list, is_moment, is_text, joined, parse_json
from ckpt.util.console import utc_now
from ckpt.util.threads import is_identity, process_identity, start_time

_log = logging.getLogger("ckpt")
_PATIENCE = 60.0  # seconds that a save waits for a removal of the checkpoint that it replaces
_PAUSE = 0.05
_ATTEMPTS = 20  # to write a marker while other processes write one
DAY = 24 * 3600.0
_LARGEST = 16 << 20  # bytes: the names of a hundred thousand files
_KEYS = Rule(is_list(is_key), "a list of relative paths, without '..'")
_RULES = {
    "files": _KEYS,
    "replaces": _KEYS,
    "id": Rule(is_text, "text", required=False),
    "since": Rule(lambda value: value == "" or is_moment(value), "a time with its zone, in ISO 8601", required=False),
    "removing": Rule(lambda value: isinstance(value, bool), "true or false", required=False),
    "writer": Rule(is_identity, "the identity of a process", required=False),
}


@dataclass(frozen=True)
class SaveMarker:
    """What a save or a removal has announced: the files that it writes and replaces, and the checkpoint's id.

    A removal sets `removing`. Each is written over the version of the marker that was read, so that only one of the
    two is under way: a removal never deletes what a save is writing, and a save never begins in the middle of a
    removal.
    """

    files: tuple[str, ...]
    id: str = ""
    since: str = ""
    removing: bool = False
    writer: tuple[
        str | int | None, ...
    ] = ()  # the identity of the process that wrote it; empty in those of older versions

    @property
    def age(self) -> float:
        """Seconds since it was written, by this host's clock; infinite if it does not say when."""
        if not self.since:
            return math.inf
        return (datetime.now(timezone.utc) - datetime.fromisoformat(self.since)).total_seconds()

    @property
    def under_way(self) -> bool:
        """Whether its writer may still be at work. A writer on another machine counts as alive for a day."""
        mine = _own_identity()
        if not self.writer or not mine:
            return False
        if self.writer[:2] != mine[:2]:
            return self.age < DAY
        return bool(start_time(int(self.writer[2] or 0)) == self.writer[3])


def mark_save(storage: Storage, name: str, files: Iterable[str], replaces: Iterable[str], id: str) -> None:
    """Announce a save in a checkpoint's folder, so that the next save can remove what a crash of this one leaves.

    Waits while another process removes the checkpoint of that name. Once the marker is written, none removes it.
    """
    new, old = list(files), list(replaces)
    for _ in range(_ATTEMPTS):
        left, version = marker_and_version(storage, name)  # of an attempt whose files could not be removed yet
        if left is not None and left.removing:
            _wait_for_removal(storage, name)
        with suppress(ConflictError):  # another process has written or removed a marker since it was read: try again
            _write(storage, name, new, [*old, *(left.files if left else ())], id, over=version)
            return
    raise ConflictError(f"{storage.url}/{name}/{MARKER}: other processes write it again and again. Save once more.")


def mark_removal(storage: Storage, name: str, paths: Iterable[str], id: str, *, over: str | None) -> None:
    """Announce a removal over the `over` version of the marker. A save that has begun since raises a ConflictError."""
    _write(storage, name, [], list(paths), id, over=over, removing=True)


def _write(
    storage: Storage,
    name: str,
    files: list[str],
    replaces: list[str],
    id: str,
    *,
    over: str | None,
    removing: bool = False,
) -> None:
    new = set(files)
    marker = {
        "files": files,
        "replaces": [path for path in dict.fromkeys(replaces) if path not in new],
        "id": id,
        "since": utc_now(),
        "removing": removing,
        "process": os.getpid(),
        "host": socket.gethostname(),
        "writer": _own_identity(),
    }
    storage.write(f"{name}/{MARKER}", [json.dumps(marker).encode()], over=over)


def marker_and_version(storage: Storage, name: str) -> tuple[SaveMarker | None, str | None]:
    """The marker in a checkpoint's folder, and the version to write over: None if there is none."""
    key = f"{name}/{MARKER}"
    try:
        read_document(storage, key, _LARGEST)
    except AbsentError:  # the usual case, for which one request is enough
        return None, None
    except DamagedError:
        pass
    version = storage.version(key)  # before the content: the write then notices a change in between
    return read_marker(storage, name), version


def read_marker(storage: Storage, name: str) -> SaveMarker | None:
    """The marker in a checkpoint's folder; None if there is none, or none that ckpt wrote."""
    where = f"{name}/{MARKER}"
    try:
        marker = parse_json(read_document(storage, where, _LARGEST))
        problems = broken_rules(marker, _RULES)
    except AbsentError:
        return None
    except (ValueError, DamagedError) as error:
        problems = [str(error)]
    if problems:
        _log.warning(
            "%s/%s is no save marker that ckpt can read: %s. Files that it may list are kept.",
            storage.url, where, joined(problems).rstrip("."),
        )  # fmt: skip
        return None
    return SaveMarker(
        (*marker["files"], *marker["replaces"]),
        id=marker.get("id", ""),
        since=marker.get("since", ""),
        removing=marker.get("removing", False),
        writer=tuple(marker.get("writer", ())),
    )


def marked_names(entries: Iterable[Entry]) -> list[str]:
    """The names of the checkpoints whose folders have a marker."""
    keys = (entry.key for entry in entries)
    return [key.partition("/")[0] for key in keys if key.count("/") == 1 and key.endswith(f"/{MARKER}")]


def _wait_for_removal(storage: Storage, name: str) -> None:
    """Return when no process holds the folder's exclusive lock: its removal has finished, or its process is dead."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            with storage.lock(name, shared=True):
                return
        except AbsentError:
            return
        except LockedError as error:
            if time.monotonic() > deadline:
                raise LockedError(f"{storage.url}/{name} is being removed by another process: {error}") from error
            time.sleep(_PAUSE)


def _own_identity() -> tuple[str | int | None, ...]:
    try:
        return tuple(process_identity(os.getpid()))
    except OSError:  # a system without /proc
        return ()


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


_FROZEN = "+frozen"  # no part is named so
_RANK_SUFFIX = re.compile(rf"[/-](\d{{5}})(?:{re.escape(_FROZEN)})?(?:\.[0-9a-f]{{8}})?{re.escape(SUFFIX)}$")


def whole_file(key: str, *, frozen: bool = False) -> str:
    """The file with all of a part's tensors: `model.safetensors`, or `model+frozen.safetensors`."""
    return f"{key}{_FROZEN if frozen else ''}{SUFFIX}"


def spread_file(key: str, rank: int, *, frozen: bool = False) -> str:
    """The file with a rank's shards of a part: `model/00003.safetensors`."""
    return whole_file(f"{key}/{rank:05d}", frozen=frozen)


def own_key(key: str, rank: int) -> str:
    """The key, and thereby the file name, of what a rank alone holds of a part whose state differs between ranks."""
    return f"{key}-own-{rank:05d}"


def rank_of(name: str) -> int | None:
    """The rank whose tensors a file holds; None if it holds what all ranks have in common."""
    found = _RANK_SUFFIX.search(name)
    return int(found.group(1)) if found else None


def part_of(name: str) -> str:
    """The part that a tensor file belongs to."""
    return name.partition("/")[0].removesuffix(SUFFIX).removesuffix(_FROZEN)
