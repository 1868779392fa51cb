"""Saves the newest snapshot in memory to the root, after the run has died: `python -m ckpt.memory.rescue PLACE`.

The keeper starts it when nobody lives in the place any more. It writes the files, verified by their hashes on the way,
and the manifest last, with the root's lock held, so that it may end at any moment: a part of a checkpoint is never
visible. Imports no torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.errors import CkptError, ConfigError, DamagedError, StorageError, VersionError
from ckpt.formats.native.manifest import FileRecord, Manifest
from ckpt.memory.keeper import DONE, REFUSED
from ckpt.memory.place import MemoryPlace, digest_of, identity_of, read_token
from ckpt.memory.slot_storage import slot_storage
from ckpt.root import deletion
from ckpt.root.catalog import Overview, Summary, find, scan
from ckpt.root.lock import lock_root
from ckpt.root.mirror import begin_copy, send_files
from ckpt.root.verify import reading, size_problems, without_other_hosts
from ckpt.root.write_link_commit import Attempt
from ckpt.storage import Grouping, LocalStorage, MemoryStorage, Staging, Storage, open_storage
from ckpt.util.console import format_size, one_line, utc_now

AFTER_VARIABLE = "CKPT_MEMORY_RESCUE_AFTER"
AFTER = 60.0  # seconds without anybody: a restart comes first
DEADLINE = 600.0  # seconds for the copy
LATER = 75  # exit status: to be tried again
_LOOK = 0.1  # seconds between two looks whether anybody has come to live


class GivesWayError(CkptError):
    """A process of the run lives again: the root is left to it."""


class LateError(CkptError):
    """The deadline has passed."""


class RefusedError(CkptError):
    """What cannot be rescued, however often it is tried."""


def rescue_settings(
    root: Storage, options: Mapping[str, Any] | None = None, *, separate_roots: bool = False
) -> dict[str, Any]:
    """What a place records so that its snapshots can be saved to this root. Holds no secret.

    `separate_roots`: every host has a root of its own. Raises a ConfigError that says why, where it cannot work.
    """
    problem = _why_not(root, options)
    if problem:
        raise ConfigError(f"snapshots in memory are not saved to {root.url} when the run dies: {problem}")
    return {
        "root": root.place if isinstance(root, LocalStorage) else root.url,
        "was_there": isinstance(root, LocalStorage) and os.path.isdir(root.place),
        "separate_roots": separate_roots,
        "after": _seconds(os.environ.get(AFTER_VARIABLE), AFTER),
        "deadline": DEADLINE,
    }


def _why_not(root: Storage, options: Mapping[str, Any] | None) -> str:
    if isinstance(root, MemoryStorage):
        return "it ends with the process."
    if isinstance(root, Staging):
        return "a repository takes commits of the run alone."
    if options:
        return (
            f"storage_options ({', '.join(sorted(options))}) may be secret, and are not handed to another process. "
            "Give them in the environment."
        )
    return "" if _opens_by_url(root) else "another process cannot open it by its URL."


def _opens_by_url(root: Storage) -> bool:
    try:
        return type(open_storage(root.url)) is type(root)
    except CkptError:
        return False


def _seconds(text: str | None, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        return default


@dataclass
class Rescue:
    """One attempt to save the newest intact snapshot of a deserted place to its root."""

    place: MemoryPlace
    settings: Mapping[str, Any]
    source: Storage = field(init=False)
    _began: float = field(default_factory=time.monotonic)
    _looked: float = 0.0
    _lacks_manifests: bool = False  # the root has a checkpoint whose manifest is damaged: it may be the parent

    def __post_init__(self) -> None:
        self.source = slot_storage(self.place)

    def run(self) -> str:
        """Returns what was done, for the log."""
        target = self._open_root()
        self._refuse_another(target)  # before it is locked: a root that was removed is not made again
        snapshots = [found.manifest for found in scan(self.source) if found.manifest is not None]
        if not snapshots:
            return "nothing to rescue: no snapshot was committed"
        with ExitStack() as held:
            lock_root(target, held, to_rescue=True)
            self._look()
            self._refuse_another(target)
            found = deletion.sweep(target)
            lacking = (outline for outline in found.checkpoints if outline.summary is None)
            self._lacks_manifests = any(outline.was_committed for outline in lacking)
            return self._rescue_newest(target, snapshots, _committed(found, target))

    def _open_root(self) -> Storage:
        root = str(self.settings["root"])
        if self.settings.get("was_there") and not os.path.isdir(root):
            raise RefusedError(f"{root} was removed, and the keeper does not create it again.")
        return open_storage(root)

    def _refuse_another(self, target: Storage) -> None:
        """Refuse a root that was made anew. Of separate roots, only the main rank's has a token."""
        identity = identity_of(target, read_token(target))
        if not self.settings.get("separate_roots") and digest_of(identity) != self.place.facts.get("root_sha256"):
            raise RefusedError(f"{target.url} was replaced, or another run has ended there, since the snapshots.")

    def _rescue_newest(self, target: Storage, snapshots: list[Manifest], committed: list[Summary]) -> str:
        newest = max(committed, key=lambda manifest: manifest.sequence, default=None)
        damaged = []
        for snapshot in snapshots:
            if newest is not None and newest.sequence >= snapshot.sequence:
                done = f"nothing to rescue: {target.url} has {newest.name}, which is as new"
                break
            if not self._lacks_manifests:
                _refuse_stray(snapshot, committed, target)
            try:
                done = self._copy(snapshot, target)
                break
            except DamagedError as error:
                damaged.append(f"{one_line(str(error))} ")
        else:
            raise RefusedError(f"{''.join(damaged)}None is intact.")
        return "".join(damaged) + done

    def _copy(self, snapshot: Manifest, target: Storage) -> str:
        began = time.monotonic()
        with reading(self.source, snapshot.name) as current:
            if current is None or current.id != snapshot.id:
                raise DamagedError(f"{snapshot.name} is gone.")
            files = self._files(snapshot)
            try:
                self._send(snapshot, files, target)
            except BaseException:
                with suppress(StorageError):
                    deletion.remove_uncommitted(target, snapshot.name)
                raise
        size = format_size(sum(file.size for file in files))
        return (
            f"rescued {snapshot.name} (step {snapshot.step:,}) to {target.url}: {size} in "
            f"{time.monotonic() - began:.1f} s"
        )

    def _files(self, snapshot: Manifest) -> tuple[FileRecord, ...]:
        """The files to copy: all, or, where every host has a root of its own, those of this host."""
        own = without_other_hosts(self.source, snapshot)
        missing = size_problems(self.source, own)
        if missing:
            raise DamagedError(f"{snapshot.name} is damaged: {'; '.join(missing)}.")
        if len(own.files) < len(snapshot.files) and not self.settings.get("separate_roots"):
            names = ", ".join(host.name for host in snapshot.hosts)
            raise RefusedError(
                f"the files of {snapshot.name} are in the memory of several hosts ({names}), and this one has "
                f"{len(own.files)} of {len(snapshot.files)}: none can save all of them to a shared root."
            )
        return own.files

    def _send(self, snapshot: Manifest, files: tuple[FileRecord, ...], target: Storage) -> None:
        """Write the files under paths that are free, then the manifest."""
        attempt = _attempt(snapshot, target)
        _refuse_other_paths(snapshot, attempt, target)
        attempt = begin_copy(target, attempt, files)
        with target.grouped() if isinstance(target, Grouping) else nullcontext():
            send_files(self.source, target, attempt, files, self._looking)
        self._look()
        attempt.commit(target, _as_saved(snapshot, attempt, self.settings), {})

    def _looking(self, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            self._look()
            yield piece

    def _look(self) -> None:
        """Raise if the deadline has passed, or a process of the run lives again."""
        now = time.monotonic()
        if now - self._began > float(self.settings["deadline"]):
            raise LateError(f"not rescued within {self.settings['deadline']:g} s.")
        if now - self._looked >= _LOOK:
            if not self._is_deserted():
                raise GivesWayError("a process of the run lives again.")
            self._looked = time.monotonic()

    def _is_deserted(self) -> bool:
        """Asked again if not: the keeper, which looks too, holds the lock for an instant."""
        for _ in range(3):
            if self.place.is_deserted():
                return True
            time.sleep(0.02)
        return False


def _committed(found: Overview, target: Storage) -> list[Summary]:
    """The checkpoints of the root. One that only a newer ckpt can read may be newer than any snapshot."""
    for checkpoint in found.checkpoints:
        if isinstance(checkpoint.problem, VersionError):
            raise RefusedError(f"{target.url} has checkpoints of a newer ckpt: {checkpoint.problem}")
    return found.committed


def _refuse_stray(snapshot: Manifest, committed: list[Summary], target: Storage) -> None:
    """Refuse what continues from a checkpoint that somebody has removed, to go back: a resume does not take it either.

    A snapshot's parent is the root's checkpoint before it. A later one in the root has the same parent.
    """
    known = {key for manifest in committed for key in (manifest.id, manifest.parent)} if committed else {None}
    if snapshot.parent not in known:
        raise RefusedError(f"{snapshot.name} continues from a checkpoint that is no longer in {target.url} any more.")


def _attempt(snapshot: Manifest, target: Storage) -> Attempt:
    """An attempt that keeps every file which the root has under that name until the manifest is written."""
    there = tuple(entry.key.removeprefix(f"{snapshot.name}/") for entry in target.list(snapshot.name))
    older = find(target, snapshot.name).manifest
    replaced = tuple(file.path for file in older.files) if older is not None else ()
    return Attempt(snapshot.name, replaces=replaced, occupied_paths=there, id=snapshot.id)


def _refuse_other_paths(snapshot: Manifest, attempt: Attempt, target: Storage) -> None:
    """Refuse a signed snapshot whose paths are taken: others would need another signature, and nobody has the key."""
    if snapshot.signature is not None and any(attempt.path_for(file.path) != file.path for file in snapshot.files):
        raise RefusedError(f"{target.url} has files in {snapshot.name} already, and a signed snapshot keeps its paths.")


def _as_saved(snapshot: Manifest, attempt: Attempt, settings: Mapping[str, Any]) -> Manifest:
    """The manifest in the root. One that was signed when the snapshot was taken is kept as it is: nobody has the key
    here."""
    if snapshot.signature is not None:
        return snapshot
    files = tuple(replace(file, path=attempt.path_for(file.path)) for file in snapshot.files)
    return replace(snapshot, files=files, hosts=snapshot.hosts if settings.get("separate_roots") else ())


def main(path: str) -> int:
    """Rescue, and write one line about it to standard error, which is the keeper's log."""
    place = MemoryPlace.open(path)
    settings = place.facts.get("rescue") if place is not None else None
    if place is None or not settings:
        return REFUSED
    try:
        said, status = Rescue(place, settings).run(), DONE
    except (RefusedError, ConfigError) as error:
        said, status = f"not rescued: {error}", REFUSED
    except CkptError as error:
        said, status = f"not rescued now: {error}", LATER
    print(f"{utc_now()} rescue {os.getpid()}: {one_line(said)}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
