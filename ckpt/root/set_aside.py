"""Folders of saves that were cut off, renamed: scripts take "the newest folder" by its name, committed or not."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from contextlib import ExitStack

from ckpt.errors import LockedError
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME
from ckpt.formats.registry import ACCELERATE, claims, is_checkpoint
from ckpt.root import deletion
from ckpt.root.catalog import by_folder, find, scan
from ckpt.root.lock import lock_root
from ckpt.root.manifest_files import was_committed
from ckpt.storage import LocalStorage, Storage

_log = logging.getLogger("ckpt")
_NUMBERED = re.compile(r"(.*?)\d+")


def set_aside_uncommitted(storage: Storage) -> list[str]:
    """Remove what ckpt wrote of saves that were never committed; what hooks wrote beside it is renamed, and named.

    Returns their names.

    A save that is killed before its marker is written leaves a folder with files of hooks, or an empty one: it is known
    by its name, which differs from those of other checkpoints only in a higher number, and is the youngest. While
    another run has the root, nothing is done.
    """
    if not isinstance(storage, LocalStorage) or not os.path.isdir(storage.place):
        return []
    with ExitStack() as held:
        files = by_folder(storage.list())
        folders = [entry.name for entry in os.scandir(storage.place) if entry.is_dir(follow_symlinks=False)]
        cut_off = _cut_off(storage, folders, {name: set(files.get(name, ())) for name in folders})
        if not cut_off:
            return []
        try:
            lock_root(storage, held)
        except LockedError:
            return []
        for name in cut_off:
            deletion.remove_uncommitted(storage, name)
            _rename(storage, name)
    return cut_off


def was_cut_off(storage: Storage, name: str) -> bool:
    """Whether a save of that name was begun and never committed, as far as its folder is there, or was renamed.

    A folder without a word of ckpt's is one if it is named like a checkpoint of the root.
    """
    inside = by_folder(storage.list(name)).get(name, {})
    aside = isinstance(storage, LocalStorage) and os.path.isdir(os.path.join(storage.place, _aside(name)))
    there = bool(inside) or (isinstance(storage, LocalStorage) and os.path.isdir(os.path.join(storage.place, name)))
    if {FILE_NAME, COPY_NAME} & inside.keys() or not (there or aside) or ACCELERATE.name in claims(inside):
        return False
    kinds = {_kind(found.name) for found in scan(storage) if found.committed} - {None}
    return aside or is_checkpoint(name, inside) or _kind(name) in kinds


def _cut_off(storage: Storage, folders: Iterable[str], files: dict[str, set[str]]) -> list[str]:
    marked = {name for name in folders if is_checkpoint(name, files[name])}
    left = {name for name in marked if not was_committed(find(storage, name).problem)}
    kinds = {_kind(name) for name in marked} - {None}
    alike = {name for name in files if name not in marked and _kind(name) in kinds}
    alike = {name for name in alike if _is_newest(storage, name, marked - left)}
    alike -= {name for name in alike if any(path.endswith(f"/{FILE_NAME}") for path in files[name])}  # others, deeper
    return sorted(left | {name for name in alike if ACCELERATE.name not in claims(files[name])})


def _is_newest(storage: Storage, name: str, others: Iterable[str]) -> bool:
    """Whether a folder has a higher number, and is younger, than all checkpoints that are named alike.

    Scripts would take it for the newest. One of another tool, from before, is left where it is.
    """
    rivals = [other for other in others if _kind(other) == _kind(name)]
    place = getattr(storage, "place", "")
    made = [os.stat(os.path.join(place, other)).st_ctime for other in (name, *rivals)]
    return all(_number(other) < _number(name) for other in rivals) and made[0] >= max(made[1:], default=0.0)


def _number(name: str) -> int:
    return int(name.removeprefix(_kind(name) or ""))


def _kind(name: str) -> str | None:
    """A name without its last number."""
    match = _NUMBERED.fullmatch(name)
    return match.group(1) if match else None


def _aside(name: str) -> str:
    return f".{name}.uncommitted"


def _rename(storage: LocalStorage, name: str) -> None:
    path = os.path.join(storage.place, name)
    try:
        os.rmdir(path)  # an empty one
    except FileNotFoundError:
        pass
    except OSError:
        number, aside = 0, _aside(name)
        while os.path.exists(os.path.join(storage.place, aside)):
            number += 1
            aside = f"{_aside(name)}-{number}"
        os.rename(path, os.path.join(storage.place, aside))
        _log.warning("%s/%s was never committed: what others wrote there is in %s now", storage.url, name, aside)
        return
    _log.warning("%s/%s was never committed, and is removed", storage.url, name)
