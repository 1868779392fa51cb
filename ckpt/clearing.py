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
from collections.abc import Container, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timezone

from ckpt.catalog import LOCK, MARKER, Checkpoint, find, scan
from ckpt.errors import AbsentError, FullError, LockedError
from ckpt.formats.manifest import FILE_NAME, Manifest
from ckpt.retention import Keep
from ckpt.storage import Entry, Staging, Storage
from ckpt.storage.base import check_key

_log = logging.getLogger("ckpt")
_TRACE = re.compile(r"\.(?:host-[0-9a-f]{32}-\d+|try-[0-9a-f]{32})")


@dataclass(frozen=True)
class Mark:
    """What a save leaves in its folder while it is under way: the files that it writes and replaces, and its id."""

    files: tuple[str, ...]
    id: str = ""
    since: str = ""

    @property
    def age(self) -> float:
        """In seconds, by this host's clock. A mark that does not say is old."""
        if not self.since:
            return math.inf
        return (datetime.now(timezone.utc) - datetime.fromisoformat(self.since)).total_seconds()


def leave_mark(storage: Storage, name: str, files: Iterable[str], replaces: Iterable[str], id: str) -> None:
    """Say what is being done in a checkpoint's folder, so that a later save knows what a crash left behind."""
    new = list(files)
    left = _marked(storage, name)  # by a try whose files could not be removed yet
    mark = {
        "files": new,
        "replaces": [path for path in [*replaces, *left] if path not in new],
        "id": id,
        "since": now(),
        "process": os.getpid(),
        "host": socket.gethostname(),
    }
    storage.write(f"{name}/{MARKER}", [json.dumps(mark).encode()])


def read_mark(storage: Storage, name: str) -> Mark | None:
    """The mark in a checkpoint's folder; none if there is none, or none of ours."""
    try:
        mark = json.loads(storage.read(f"{name}/{MARKER}"))
        files = tuple(check_key(path) for path in [*mark["files"], *mark["replaces"]])
        return Mark(files, str(mark.get("id", "")), str(mark.get("since", "")))
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


def take(storage: Storage, held: ExitStack) -> None:
    """Hold a root for this run until the stack is closed. Refused if another run has it."""
    note = f"process {os.getpid()} on {socket.gethostname()}, since {now()}."
    try:
        held.enter_context(storage.lock(LOCK, note=note))
    except LockedError as error:
        raise LockedError(
            f"another run writes to {storage.url}: {error} Wait until it has ended or stop it, or give this run "
            "another root. Within one process, close() the other StateManager first."
        ) from None


def sweep(storage: Storage, spared: Container[str] = ()) -> list[Checkpoint]:
    """Remove what earlier crashes left, and return the checkpoints that are there. Call it while the root is ours.

    What is `spared`, by the names of checkpoints, somebody will go on with.
    """
    entries = list(storage.list())
    _sweep_traces(storage, entries)
    for name in marked_names(entries):
        if name not in spared:
            clean(storage, name)
    storage.sweep()
    return scan(storage)


def _sweep_traces(storage: Storage, entries: Iterable[Entry]) -> None:
    """Remove what managers that were killed while they were built left in the root: see `hosts` and `roots`."""
    left = [entry.key for entry in entries if _TRACE.fullmatch(entry.key)]
    if left:
        storage.delete(left)


def remove(storage: Storage, manifest: Manifest) -> bool:
    """Remove a checkpoint, unless somebody is reading it. Its manifest goes first: no moment shows half of it.

    If that is cut off, a mark is left which says what else is to be removed.
    """
    if not any(True for _ in storage.list(manifest.name)):
        return True  # somebody has removed it by hand
    paths = [file.path for file in manifest.files]
    files = [FILE_NAME, *paths, MARKER]
    try:
        with storage.lock(manifest.name):
            if not isinstance(storage, Staging):
                with suppress(FullError):  # what is removed makes room
                    leave_mark(storage, manifest.name, [], paths, manifest.id)
            storage.delete([f"{manifest.name}/{path}" for path in files])
    except LockedError:
        return False
    return True


def retain(keep: Keep, storage: Storage, newest_first: list[Manifest], damaged: Iterable[str]) -> list[Manifest]:
    """Remove what `keep` lets go. Returns the checkpoints that are left."""
    going = keep.removable(newest_first, set(damaged))
    gone = {one.name for one in newest_first if one.name in going and remove(storage, one)}
    return [manifest for manifest in newest_first if manifest.name not in gone]


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
