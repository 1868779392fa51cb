"""Deletes from a root: checkpoints that retention does not keep, and what interrupted saves left behind.

Only files that a manifest or a save marker of ckpt lists are deleted. Folders of others' saves that were cut off are
renamed: scripts take "the newest folder" by its name, committed or not. Imports no torch: `ckpt prune` uses it too.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeVar

from ckpt.errors import ConflictError, FullError, LockedError, StorageError, TransientError, VersionError
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, Manifest
from ckpt.formats.registry import ACCELERATE, claims, is_checkpoint
from ckpt.root.catalog import (
    MARKER,
    Checkpoint,
    History,
    Overview,
    Summary,
    are_alike,
    by_folder,
    find,
    mark_removal,
    marked_names,
    marker_and_version,
    mend,
    read_marker,
    scan,
    skimmed,
    was_committed,
)
from ckpt.root.lock import lock_root
from ckpt.root.retention import Keep
from ckpt.storage import Entry, LocalStorage, Staging, Storage
from ckpt.storage.retry import within
from ckpt.util.threads import in_parallel

_log = logging.getLogger("ckpt")
Listed = TypeVar("Listed", Manifest, Summary)
_IN_USE = "is being read"
FAILED = "could not be removed"
_UNKNOWN = "has a manifest that ckpt can't read, so its files are unknown"
_TO_CLEAN_UP = 10.0  # seconds: what is left is swept before a later save
_REMOVERS = 8  # threads that remove checkpoints from an object store
_PROBE_FILE = re.compile(
    r"\.(?:host-[0-9a-f]{32}-\d+|try-[0-9a-f]{32}(?:/probe)?)"
)  # the latter without a folder, of earlier versions


def sweep(
    storage: Storage, spared: Container[str] = (), *, age: float | None = None, listed: Overview | None = None
) -> Overview:
    """Delete what earlier crashes left, and return what is in the root then. The caller must hold the root's lock.

    Leftovers of the `spared` checkpoints are kept, because somebody resumes them. With `age`, so are those younger
    than that many seconds: where other hosts write to the same root, they may still be at work. `listed`: what is
    there, listed since the root was locked.
    """
    entries = list(skimmed(storage)) if listed is None else listed.entries
    if age is None:
        _delete_probe_files(storage, entries)
    marked = marked_names(entries)
    for name in marked:
        if name not in spared and (age is None or _is_older(storage, name, age)):
            why = remove_uncommitted(storage, name)
            if why:  # a later save tries again
                level = logging.WARNING if why.startswith(FAILED) else logging.DEBUG
                _log.log(level, "an interrupted save left %s/%s, which %s", storage.url, name, why)
    storage.sweep(age=age)
    if marked:
        found = Overview.of(storage, known=listed.index if listed else None)
    else:
        found = listed or Overview.of(storage, entries)
    _mend_manifests(storage, found.to_mend, [summary.name for summary in found.committed])
    return found


def _mend_manifests(storage: Storage, to_mend: Collection[str], committed: Iterable[str]) -> None:
    """Write manifests that are damaged from their copies, and copies that are missing or altered from their manifests.

    Elsewhere than on a disk, a copy is compared by its size alone: to read all of them would take a request for each.
    """
    names = {*to_mend, *(name for name in committed if storage.is_local and not are_alike(storage, name))}

    def mend_one(name: str) -> None:
        try:
            with storage.lock(name, shared=True):
                written = mend(storage, name)
        except StorageError as error:
            _log.debug("ckpt does not repair %s/%s now: %s", storage.url, name, error)
        else:
            if FILE_NAME in written:
                _log.warning("%s/%s/%s was damaged, so ckpt restored it from its copy.", storage.url, name, FILE_NAME)

    threads = 1 if storage.is_local or isinstance(storage, Staging) else _REMOVERS
    in_parallel(mend_one, sorted(names), threads, "ckpt-mend")


def _or_explained(remove: Callable[[], str]) -> str:
    """What `remove` returns, or why it could not remove everything, so that a caller goes on with the others.

    Raises where the store is away: the others would be waited for just as long.
    """
    try:
        return remove()
    except LockedError:
        return _IN_USE
    except TransientError:
        raise
    except StorageError as error:
        return f"{FAILED}: {error}"


def remove_uncommitted(storage: Storage, name: str, committed: Manifest | None = None) -> str:
    """Delete the files of an interrupted save that no manifest lists, and its marker last.

    Returns "", or why something is left. `committed`: the manifest that was just written there, if that is known.

    A file that no marker and no manifest lists belongs to somebody else, and is kept. While somebody reads the
    checkpoint, or where this version of ckpt cannot read its manifest, nothing is deleted: a later save tries again.
    """
    return _or_explained(partial(_remove_uncommitted, storage, name, committed))


def _remove_uncommitted(storage: Storage, name: str, committed: Manifest | None) -> str:
    if isinstance(storage, Staging) or (committed is None and _is_empty(storage, name)):
        return ""
    checkpoint = find(storage, name) if committed is None else Checkpoint(name, storage.url, committed)
    if checkpoint.manifest is None and was_committed(checkpoint.problem):
        return f"{_UNKNOWN}: {checkpoint.problem}"
    listed = {FILE_NAME, *(file.path for file in (checkpoint.manifest.files if checkpoint.manifest else ()))}
    stray = [path for path in _marked_files(storage, name) if path not in listed]
    if checkpoint.manifest is None:  # of a removal that was cut off
        stray.append(COPY_NAME)
    with storage.lock(name):
        storage.delete([f"{name}/{path}" for path in stray])
        storage.sweep(name)
        storage.delete([f"{name}/{MARKER}"])
    return ""


def clean_up_failed(storage: Storage, name: str) -> None:
    """After a save that failed: a store that is away was waited for already, so that this does not wait for long."""
    with suppress(StorageError), within(_TO_CLEAN_UP):
        remove_uncommitted(storage, name)


def _is_empty(storage: Storage, name: str) -> bool:
    """True if a save failed before it wrote its marker: there is nothing to delete, and no folder to lock."""
    return not any(True for _ in storage.list(name)) and not any(True for _ in storage.unfinished(name))


def _marked_files(storage: Storage, name: str) -> tuple[str, ...]:
    marker = read_marker(storage, name)
    return marker.files if marker else ()


def _is_older(storage: Storage, name: str, age: float) -> bool:
    marker = read_marker(storage, name)
    return marker is None or marker.age >= age


def _delete_probe_files(storage: Storage, entries: Iterable[Entry]) -> None:
    """Delete the probe files of managers that were killed while they were built: see `ranks.hosts` and `root.open`."""
    left = [entry.key for entry in entries if _PROBE_FILE.fullmatch(entry.key)]
    if left:
        storage.delete(left)


def remove_all(storage: Storage, checkpoints: Sequence[Manifest | Summary]) -> dict[str, str]:
    """By name, what `remove` returns for each: several at a time, unless the storage is local."""
    threads = 1 if storage.is_local or isinstance(storage, Staging) else _REMOVERS
    reasons = in_parallel(lambda each: remove(storage, each), checkpoints, threads, "ckpt-remove")
    return {checkpoint.name: reason for checkpoint, reason in zip(checkpoints, reasons, strict=True)}


def remove(storage: Storage, checkpoint: Manifest | Summary) -> str:
    """Remove a checkpoint and return "", or return why it is kept: somebody reads it, or replaces it with a new save,
    or the storage refuses.

    The manifest is deleted first: no reader ever finds a manifest without its files. If the removal is cut off, its
    marker lists the files that are still to be deleted, and says that the copy of the manifest counts no more.
    """
    return _or_explained(partial(_remove, storage, checkpoint))


def _remove(storage: Storage, checkpoint: Manifest | Summary) -> str:
    name = checkpoint.name
    if not any(True for _ in storage.list(name)):
        return ""  # a user has removed it by hand
    with storage.lock(name):
        if isinstance(storage, Staging) and isinstance(checkpoint, Manifest):
            current = Checkpoint(name, storage.url, checkpoint)
        else:
            current = find(storage, name)
        manifest = checkpoint if isinstance(checkpoint, Manifest) else current.manifest
        if manifest is None and was_committed(current.problem):
            return f"{_UNKNOWN}: {current.problem}"
        paths = [file.path for file in manifest.files] if manifest else []
        if not isinstance(storage, Staging):
            why_kept, left = _claim_removal(storage, checkpoint.id, current, paths)
            if why_kept:
                return why_kept
            paths = list(dict.fromkeys([*paths, *left]))
        storage.delete([f"{name}/{path}" for path in (FILE_NAME, COPY_NAME, *paths, MARKER)])
    return ""


def _claim_removal(storage: Storage, id: str, current: Checkpoint, paths: list[str]) -> tuple[str, tuple[str, ...]]:
    """Write the marker of a removal. Returns why the checkpoint is kept, if it is, and files left by older attempts."""
    if isinstance(current.problem, VersionError) or (current.manifest and current.manifest.id != id):
        return "was saved again in the meantime", ()
    marker, version = marker_and_version(storage, current.name)
    if marker is not None and marker.id != id:
        return "is being saved again, or such a save was interrupted", ()
    left = marker.files if marker else ()
    try:
        with suppress(FullError):  # the removal makes room
            mark_removal(storage, current.name, [*paths, *left], id, over=version)
    except ConflictError:
        return "is being saved again", ()
    return "", left


def apply_retention(
    keep: Keep,
    storage: Storage,
    newest_first: list[Listed],
    damaged: Iterable[str],
    known: Mapping[str, Manifest] | None = None,
    history: History | None = None,
) -> list[Listed]:
    """Remove the checkpoints that `keep` does not keep. Returns those that are left. `known`: manifests by name.

    `history`: of the root, which is stored before.
    """
    _warn_if_unranked(keep, storage, newest_first)
    removable = keep.removable(newest_first, set(damaged))
    gone = [checkpoint for checkpoint in newest_first if checkpoint.name in removable]
    if gone:
        _remember(history or History(storage), gone, newest_first)
    reasons = remove_all(storage, [(known or {}).get(checkpoint.name, checkpoint) for checkpoint in gone])
    for name, reason in reasons.items():
        if reason.startswith((_UNKNOWN, FAILED)) and (storage.url, name) not in _warned:
            _warned.add((storage.url, name))
            _log.warning("ckpt left %s/%s, which %s", storage.url, name, reason)
    return [checkpoint for checkpoint in newest_first if reasons.get(checkpoint.name) != ""]


def _remember(history: History, gone: Sequence[Manifest | Summary], known: Sequence[Manifest | Summary]) -> None:
    """Store what is known. The manifests of those that go are read, if only they say how these were saved."""
    storage, names = history.storage, {found.id: found.name for found in gone if history.lacks_save(found)}
    read = in_parallel(lambda name: find(storage, name).manifest, list(names.values()), _REMOVERS, "ckpt-history")
    history.store([*(found for found in read if found is not None and found.id in names), *known])


_warned: set[tuple[str, str | None]] = set()


def _warn_if_unranked(keep: Keep, storage: Storage, newest_first: Sequence[Manifest | Summary]) -> None:
    """Warn once, when a save came with other metrics, or when something is kept that would otherwise be removed."""
    why = keep.cannot_rank(newest_first)
    warning = (storage.url, keep.metric)
    if why and warning not in _warned and (newest_first[0].metrics or len(newest_first) > keep.last):
        _warned.add(warning)
        _log.warning(
            "%s: Keep(best=%d, metric=%r) can't rank checkpoints: %s. Until a checkpoint has the metric, ckpt removes "
            "nothing: correct the name, or pass the metric to step(metrics=...) or save_state(metrics=...).",
            storage.url, keep.best, keep.metric, why,
        )  # fmt: skip


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
            why = remove_uncommitted(storage, name)
            if why.startswith(FAILED):
                raise StorageError(f"{storage.url}/{name}, which an interrupted save left, {why}")
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
        _log.warning(
            "%s/%s was never committed. ckpt moved other programs' files from that folder to %s.",
            storage.url,
            name,
            aside,
        )
        return
    _log.info("removed %s/%s: its save was interrupted, so it was never committed", storage.url, name)
