"""What is removed: checkpoints that are not to be kept, and what crashed saves left.

Imports no torch: a shell clears up too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable
from contextlib import suppress

from ckpt.errors import ConflictError, FullError, LockedError, VersionError
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.root.catalog import MARKER, Checkpoint, find, scan
from ckpt.root.retention import Keep
from ckpt.root.save_marker import marked_names, marker_and_version, read_marker, write_mark
from ckpt.storage import Entry, Staging, Storage

_log = logging.getLogger("ckpt")
_TRACE = re.compile(r"\.(?:host-[0-9a-f]{32}-\d+|try-[0-9a-f]{32})")


def _marked(storage: Storage, name: str) -> tuple[str, ...]:
    mark = read_marker(storage, name)
    return mark.files if mark else ()


def remove_uncommitted(storage: Storage, name: str) -> None:
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
            remove_uncommitted(storage, name)
    storage.sweep(age=age)
    return scan(storage)


def _is_older(storage: Storage, name: str, age: float) -> bool:
    mark = read_marker(storage, name)
    return mark is None or mark.age >= age


def _sweep_traces(storage: Storage, entries: Iterable[Entry]) -> None:
    """Remove what managers that were killed while they were built left in the root: see `hosts` and `roots`."""
    left = [entry.key for entry in entries if _TRACE.fullmatch(entry.key)]
    if left:
        storage.delete(left)


def remove(storage: Storage, manifest: Manifest) -> bool:
    """Remove a checkpoint, unless somebody reads or replaces it. Returns whether it is gone."""
    return not remove_or_explain(storage, manifest)


def remove_or_explain(storage: Storage, manifest: Manifest) -> str:
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
    mark, version = marker_and_version(storage, manifest.name)
    if mark is not None and mark.id != manifest.id:
        return "is being saved anew, or such a save was cut off", ()
    left = mark.files if mark else ()
    try:
        with suppress(FullError):  # what is removed makes room
            write_mark(storage, manifest.name, [], [*paths, *left], manifest.id, over=version, removing=True)
    except ConflictError:
        return "is being saved anew", ()
    return "", left


def apply_retention(
    keep: Keep, storage: Storage, newest_first: list[Manifest], damaged: Iterable[str]
) -> list[Manifest]:
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
