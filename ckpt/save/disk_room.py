"""Room on the disk of a local root: checked before a checkpoint is written, and made by what goes anyway."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt.errors import FullError
from ckpt.root import deletion
from ckpt.root.catalog import Summary
from ckpt.save.held_root import HeldRoot
from ckpt.save.root_writer import RootWriter
from ckpt.storage.local.storage import LocalStorage
from ckpt.util.console import format_size
from ckpt.util.filesystem import filesystem_type

_log = logging.getLogger("ckpt")
_COMPRESSING = ("btrfs", "zfs", "bcachefs")  # more may fit than is free


def make_room(root: RootWriter, name: str, facts: Mapping[str, Any], size: int) -> None:
    """Refuse a checkpoint of so many bytes that the disk has no room for, before anything of it is written.

    If the checkpoints that `Keep` does not keep beside the new one make the room, they are removed first, but never the
    newest intact one. Where the root is not local, not held yet, or each host has its own, nothing is done.
    """
    held, storage = root.held, root.storage
    if not size or held is None or not isinstance(storage, LocalStorage) or root.hosts.separate_roots:
        return
    free = _free(storage.place)
    if free is None or size <= free:
        return
    oldest_first = _removable(root, held, name, facts)
    freed = sum(_own_bytes(Path(storage.place, summary.name)) for summary in oldest_first)
    if size <= free + freed:
        _remove(held, storage, oldest_first, size, name)
    elif filesystem_type(storage.place) not in _COMPRESSING:
        more = f", and {format_size(freed)} in checkpoints that Keep would remove" if freed else ""
        raise FullError(
            f"{storage.url}/{name} takes {format_size(size)}, and {format_size(free)} are free there{more}. "
            "Nothing was written or removed. Free some space, or keep fewer checkpoints: keep=ckpt.Keep(last=...)."
        )


def _free(path: str) -> int | None:
    """Free bytes of the filesystem that a path is on; None if it does not say."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def _removable(root: RootWriter, held: HeldRoot, name: str, facts: Mapping[str, Any]) -> list[Summary]:
    """What is not kept once this checkpoint is there, oldest first."""
    others = [summary for summary in held.committed if summary.name != name]
    newest = next((summary.name for summary in others if summary.name not in root.damaged), None)
    if root.keep is None or newest is None:
        return []
    step, metrics = facts["progress"]["step"], facts["metrics"]
    number = max(summary.sequence for summary in held.committed) + 1
    new = Summary(name=name, id="", sequence=number, created="", run=root.run, step=step, metrics=metrics)
    names = {*root.keep.removable([new, *others], root.damaged)} - {newest}
    return [summary for summary in reversed(others) if summary.name in names]


def _own_bytes(folder: Path) -> int:
    """What removing a checkpoint frees: files that other checkpoints link to stay."""
    total = 0
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except OSError:  # removed meanwhile
            continue
        total += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return total


def _remove(held: HeldRoot, storage: LocalStorage, oldest_first: list[Summary], size: int, name: str) -> None:
    gone = []
    held.history.store(held.committed)
    for summary in oldest_first:
        if size <= (_free(storage.place) or 0):
            break
        if not deletion.remove_or_explain(storage, summary):
            held.discard(summary.name)
            gone.append(summary.name)
    _log.info("%s: removed before %s is written, which needs the room: %s", storage.url, name, ", ".join(gone))
