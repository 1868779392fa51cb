"""The mark that a save or a removal leaves in a checkpoint's folder while it is under way.

Imports no torch: a shell reads it too.
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
from typing import Any

from ckpt.errors import AbsentError, ConflictError, LockedError
from ckpt.root.catalog import MARKER
from ckpt.storage import Entry, Storage
from ckpt.storage.base import check_key
from ckpt.util.clock import utc_now
from ckpt.util.process_identity import identity, started

_log = logging.getLogger("ckpt")
_PATIENCE = 60.0  # seconds that a save waits for a removal of the checkpoint that it replaces
_PAUSE = 0.05
_TRIES = 20  # to write a mark beside others who write one
DAY = 24 * 3600.0


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
        return bool(started(int(self.writer[2])) == self.writer[3])


def _identity() -> tuple[Any, ...]:
    try:
        return tuple(identity(os.getpid()))
    except OSError:  # a system without /proc
        return ()


def mark_save(storage: Storage, name: str, files: Iterable[str], replaces: Iterable[str], id: str) -> None:
    """Say what is being saved in a checkpoint's folder, so that a later save knows what a crash left behind.

    Waits while another process removes the checkpoint of that name. Once the mark is there, nobody removes it.
    """
    new, old = list(files), list(replaces)
    for _ in range(_TRIES):
        left, version = marker_and_version(storage, name)  # of a try whose files could not be removed yet
        if left is not None and left.removing:
            _wait_for_removal(storage, name)
        with suppress(ConflictError):  # another process has left or removed a mark since: look again
            write_mark(storage, name, new, [*old, *(left.files if left else ())], id, over=version)
            return
    raise ConflictError(f"{storage.url}/{name}/{MARKER}: other processes write it again and again. Save once more.")


def write_mark(
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
        "since": utc_now(),
        "removing": removing,
        "process": os.getpid(),
        "host": socket.gethostname(),
        "writer": _identity(),
    }
    storage.write(f"{name}/{MARKER}", [json.dumps(mark).encode()], over=over)


def marker_and_version(storage: Storage, name: str) -> tuple[SaveMarker | None, str | None]:
    """The mark that is there, and the version to write over: none if there is none."""
    key = f"{name}/{MARKER}"
    try:
        storage.read(key)
    except AbsentError:  # as a rule: one request is enough
        return None, None
    version = storage.version(key)  # before its content: a change in between is then noticed by the write
    return read_marker(storage, name), version


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


def read_marker(storage: Storage, name: str) -> SaveMarker | None:
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
