"""The save marker: a file in a checkpoint's folder while a save or a removal is under way there.

It lists the files that a crash would leave behind, and keeps saves and removals of one checkpoint apart. Imports no
torch: the command `ckpt` reads it too.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone

from ckpt.errors import AbsentError, ConflictError, DamagedError, LockedError
from ckpt.formats.native.manifest import MARKER as MARKER
from ckpt.storage import Entry, Storage
from ckpt.storage.base import read_document
from ckpt.util.checked_json import Rule, broken_rules, is_key, is_list, is_moment, is_text, joined, parse_json
from ckpt.util.clock import utc_now
from ckpt.util.process_identity import is_identity, process_identity, start_time

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
