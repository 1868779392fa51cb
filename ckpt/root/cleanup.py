"""What is removed: checkpoints that are not to be kept, and what crashed saves left.

Imports no torch: a shell clears up too.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Container, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ckpt.errors import AbsentError, ConflictError, FullError, LockedError, VersionError
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.root.catalog import LOCK, MARKER, Checkpoint, find, scan
from ckpt.root.retention import Keep
from ckpt.storage import Entry, Staging, Storage
from ckpt.storage.base import check_key
from ckpt.util.process_identity import process_identity, start_time

_log = logging.getLogger("ckpt")
_PATIENCE = 60.0  # seconds that a save waits for a removal of the checkpoint that it replaces
_PAUSE = 0.05
_PRUNE = "ckpt prune, "  # in the note of the lock on a root
_TRIES = 20  # to write a mark beside others who write one
DAY = 24 * 3600.0
_TRACE = re.compile(r"\.(?:host-[0-9a-f]{32}-\d+|try-[0-9a-f]{32})")


@dataclass(frozen=True)
class SaveMarker:
    """What a save leaves in its folder while it is under way: the files that it writes and replaces, and its id.

    A removal leaves one too, with `removing` set and the id of the checkpoint that goes. Only one of the two can be
    there: each is written over the version of the mark that was read, so that a removal never takes away what a save
    is writing, and a save never begins in the middle of a removal.
    """

    files: tuple[str, ...]
    id: str = ""
    since: str = ""
    removing: bool = False
    writer: tuple[Any, ...] = ()  # identity of the process that left it; empty in marks of older versions

    @property
    def age(self) -> float:
        """In seconds, by this host's clock. A mark that does not say is old."""
        if not self.since:
            return math.inf
        return (datetime.now(timezone.utc) - datetime.fromisoformat(self.since)).total_seconds()

    @property
    def under_way(self) -> bool:
        """Whether its writer may still be at work. One on another machine is taken to be, for a day."""
        mine = _identity()
        if not self.writer or not mine:
            return False
        if self.writer[:2] != mine[:2]:
            return self.age < DAY
        return bool(start_time(int(self.writer[2])) == self.writer[3])


def _identity() -> tuple[Any, ...]:
    try:
        return tuple(process_identity(os.getpid()))
    except OSError:  # a system without /proc
        return ()


def leave_mark(storage: Storage, name: str, files: Iterable[str], replaces: Iterable[str], id: str) -> None:
    """Say what is being saved in a checkpoint's folder, so that a later save knows what a crash left behind.

    Waits while another process removes the checkpoint of that name. Once the mark is there, nobody removes it.
    """
    new, old = list(files), list(replaces)
    for _ in range(_TRIES):
        left, version = _present_mark(storage, name)  # of a try whose files could not be removed yet
        if left is not None and left.removing:
            _wait_for_removal(storage, name)
        with suppress(ConflictError):  # another process has left or removed a mark since: look again
            _write_mark(storage, name, new, [*old, *(left.files if left else ())], id, over=version)
            return
    raise ConflictError(f"{storage.url}/{name}/{MARKER}: other processes write it again and again. Save once more.")


def _write_mark(
    storage: Storage,
    name: str,
    files: list[str],
    replaces: list[str],
    id: str,
    *,
    over: str | None,
    removing: bool = False,
) -> None:
    mark = {
        "files": files,
        "replaces": [path for path in dict.fromkeys(replaces) if path not in files],
        "id": id,
        "since": now(),
        "removing": removing,
        "process": os.getpid(),
        "host": socket.gethostname(),
        "writer": _identity(),
    }
    storage.write(f"{name}/{MARKER}", [json.dumps(mark).encode()], over=over)


def _present_mark(storage: Storage, name: str) -> tuple[SaveMarker | None, str | None]:
    """The mark that is there, and the version to write over: none if there is none."""
    key = f"{name}/{MARKER}"
    try:
        storage.read(key)
    except AbsentError:  # as a rule: one request is enough
        return None, None
    version = storage.version(key)  # before its content: a change in between is then noticed by the write
    return read_mark(storage, name), version


def _wait_for_removal(storage: Storage, name: str) -> None:
    """Return when nobody holds the folder alone: its removal is finished, or whoever began it is dead."""
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


def read_mark(storage: Storage, name: str) -> SaveMarker | None:
    """The mark in a checkpoint's folder; none if there is none, or none of ours."""
    try:
        mark = json.loads(storage.read(f"{name}/{MARKER}"))
        files = tuple(check_key(path) for path in [*mark["files"], *mark["replaces"]])
        writer = tuple(mark.get("writer", ()))
        return SaveMarker(
            files, str(mark.get("id", "")), str(mark.get("since", "")), bool(mark.get("removing")), writer
        )
    except AbsentError:
        return None
    except (ValueError, LookupError, TypeError, AttributeError):
        _log.warning("%s/%s/%s is not what ckpt writes: it is left alone", storage.url, name, MARKER)
        return None


def marked_names(entries: Iterable[Entry]) -> list[str]:
    """The checkpoints in whose folders there is a mark."""
    keys = (entry.key for entry in entries)
    return [key.partition("/")[0] for key in keys if key.count("/") == 1 and key.endswith(f"/{MARKER}")]


def _marked(storage: Storage, name: str) -> tuple[str, ...]:
    mark = read_mark(storage, name)
    return mark.files if mark else ()


def clean(storage: Storage, name: str) -> None:
    """Remove the files of a try that its checkpoint does not list, and at last the try's mark.

    A file that neither a mark nor a manifest of ours names is somebody else's, and stays. So does everything while
    somebody reads there, or where there is a manifest that this ckpt cannot read: a later save tries again.
    """
    if isinstance(storage, Staging) or _is_nothing_there(storage, name):
        return
    checkpoint = find(storage, name)
    listed = {file.path for file in checkpoint.manifest.files} if checkpoint.manifest else set()
    stray = [path for path in _marked(storage, name) if path not in listed]
    if checkpoint.manifest is None and _has_manifest(storage, name):
        return
    try:
        with storage.lock(name):
            storage.delete([f"{name}/{path}" for path in stray])
            storage.sweep(name)
            storage.delete([f"{name}/{MARKER}"])
    except LockedError:
        _log.info("%s/%s is being read: what is left of an older save there is removed later", storage.url, name)


def _is_nothing_there(storage: Storage, name: str) -> bool:
    """True if a save failed before it left its mark: nothing is to be removed, and nothing to be locked for it."""
    return not any(True for _ in storage.list(name)) and not any(True for _ in storage.unfinished(name))


def _has_manifest(storage: Storage, name: str) -> bool:
    return any(entry.key == f"{name}/{FILE_NAME}" for entry in storage.list(name))


def take(storage: Storage, held: ExitStack, *, to_prune: bool = False) -> None:
    """Hold a root for this run until the stack is closed. Refused if another run has it.

    A run waits for `ckpt prune`, which holds a root for a moment only, and must not make a job fail that starts then.
    """
    note = f"{_PRUNE if to_prune else ''}process {os.getpid()} on {socket.gethostname()}, since {now()}."
    deadline = time.monotonic() + (0.0 if to_prune else _PATIENCE)
    try:
        while True:
            try:
                held.enter_context(storage.lock(LOCK, note=note))
                return
            except LockedError as error:
                if _PRUNE not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)
    except LockedError as error:
        raise LockedError(
            f"another run writes to {storage.url}: {error} Wait until it has ended or stop it, or give this run "
            "another root. Within one process, close() the other StateManager first."
        ) from None


def sweep(storage: Storage, spared: Container[str] = (), *, age: float | None = None) -> list[Checkpoint]:
    """Remove what earlier crashes left, and return the checkpoints that are there. Call it while the root is ours.

    What is `spared`, by the names of checkpoints, somebody will go on with. With `age`, so does everything that is
    younger in seconds: where other hosts write to the same place, they may be at it.
    """
    entries = list(storage.list())
    if age is None:
        _sweep_traces(storage, entries)
    for name in marked_names(entries):
        if name not in spared and (age is None or _is_older(storage, name, age)):
            clean(storage, name)
    storage.sweep(age=age)
    return scan(storage)


def _is_older(storage: Storage, name: str, age: float) -> bool:
    mark = read_mark(storage, name)
    return mark is None or mark.age >= age


def _sweep_traces(storage: Storage, entries: Iterable[Entry]) -> None:
    """Remove what managers that were killed while they were built left in the root: see `hosts` and `roots`."""
    left = [entry.key for entry in entries if _TRACE.fullmatch(entry.key)]
    if left:
        storage.delete(left)


def remove(storage: Storage, manifest: Manifest) -> bool:
    """Remove a checkpoint, unless somebody reads or replaces it. Returns whether it is gone."""
    return not reason_to_stay(storage, manifest)


def reason_to_stay(storage: Storage, manifest: Manifest) -> str:
    """Remove a checkpoint, and return an empty text; or why it stays: somebody reads it, or saves it anew.

    Its manifest goes first: no moment shows half of it. If that is cut off, a mark is left which says what else is to
    be removed.
    """
    name = manifest.name
    if not any(True for _ in storage.list(name)):
        return ""  # somebody has removed it by hand
    try:
        with storage.lock(name):
            paths = [file.path for file in manifest.files]
            if not isinstance(storage, Staging):
                stays, left = _claim_removal(storage, manifest, paths)
                if stays:
                    return stays
                paths = list(dict.fromkeys([*paths, *left]))
            storage.delete([f"{name}/{path}" for path in (FILE_NAME, *paths, MARKER)])
    except LockedError:
        return "is being read"
    return ""


def _claim_removal(storage: Storage, manifest: Manifest, paths: list[str]) -> tuple[str, tuple[str, ...]]:
    """Leave the mark of a removal, unless a save has begun: why the checkpoint stays; and files left of older tries."""
    there = find(storage, manifest.name)
    if isinstance(there.problem, VersionError) or (there.manifest and there.manifest.id != manifest.id):
        return "was saved anew meanwhile", ()
    mark, version = _present_mark(storage, manifest.name)
    if mark is not None and mark.id != manifest.id:
        return "is being saved anew, or such a save was cut off", ()
    left = mark.files if mark else ()
    try:
        with suppress(FullError):  # what is removed makes room
            _write_mark(storage, manifest.name, [], [*paths, *left], manifest.id, over=version, removing=True)
    except ConflictError:
        return "is being saved anew", ()
    return "", left


def retain(keep: Keep, storage: Storage, newest_first: list[Manifest], damaged: Iterable[str]) -> list[Manifest]:
    """Remove what `keep` lets go. Returns the checkpoints that are left."""
    _warn_if_unranked(keep, storage, newest_first)
    going = keep.removable(newest_first, set(damaged))
    gone = {one.name for one in newest_first if one.name in going and remove(storage, one)}
    return [manifest for manifest in newest_first if manifest.name not in gone]


_warned: set[tuple[str, str | None]] = set()


def _warn_if_unranked(keep: Keep, storage: Storage, newest_first: list[Manifest]) -> None:
    """Once: when a save came with other metrics, or when something stays that would otherwise be removed."""
    why = keep.cannot_rank(newest_first)
    known = (storage.url, keep.metric)
    if why and known not in _warned and (newest_first[0].metrics or len(newest_first) > keep.last):
        _warned.add(known)
        _log.warning(
            "%s: Keep(best=%d, metric=%r) ranks nothing: %s. Nothing is removed until one has it: correct the name, or "
            "give the metric with step(metrics=...) or save_state(metrics=...).",
            storage.url, keep.best, keep.metric, why,
        )  # fmt: skip


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
