"""Copies checkpoints to another storage, with the same names, bytes and manifests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

from ckpt.errors import ConflictError, StorageError, TransientError
from ckpt.formats.native.manifest import FILE_NAME, FileRecord, Manifest
from ckpt.root import deletion
from ckpt.root.catalog import Index, Overview, Summary, find
from ckpt.root.commit import Attempt
from ckpt.root.file_names import rank_of
from ckpt.root.history import History
from ckpt.root.lock import lock_root
from ckpt.root.mirror_wait import progress_of
from ckpt.root.retention import Keep
from ckpt.root.save_marker import DAY
from ckpt.root.verified_file import VerifiedFile
from ckpt.root.verify import size_problems
from ckpt.storage import Storage
from ckpt.storage.base import LostError
from ckpt.util.console import PROGRESS_MIN_BYTES, format_size, progress_bar

_log = logging.getLogger("ckpt")


@dataclass
class Copies:
    """Copies committed checkpoints from `source` to `target`: files first, verified while they are read, manifest last.

    Of several hosts with separate roots each copies its own files, and the last to finish writes the manifest.
    """

    source: Storage
    target: Storage
    keep: Keep | None = None
    bandwidth: float | None = None  # bytes per second
    has_all_files: bool = True  # whether `source` has all files of a checkpoint
    is_leader: bool = True  # of several hosts that copy, the leader alone locks, sweeps and applies retention
    stopping: threading.Event = field(default_factory=threading.Event)  # set: the copy under way is given up
    was_listed: bool = False  # whether it is known what the target has
    _sent: int = 0  # pieces, and seconds for which the bandwidth made them wait
    _copied: dict[str, Summary] | None = None  # in the target; None until it was listed. Replaced, never changed
    _index: Index = field(default_factory=Index)  # of the target
    _names: set[str] = field(default_factory=set)  # that are in use in the target, or will be
    _unconfirmed: list[Manifest] = field(default_factory=list)  # sent from here, not yet seen to be committed there
    _held: ExitStack = field(default_factory=ExitStack)
    _history: History = field(init=False)  # of the target

    def __post_init__(self) -> None:
        self._history = History(self.target)

    @property
    def newest(self) -> Summary | None:
        """The newest checkpoint in the target, as far as it is known."""
        return max((self._copied or {}).values(), key=lambda summary: summary.sequence, default=None)

    @property
    def progress(self) -> tuple[int, int]:
        """Changes while copies go on."""
        return self._sent, progress_of(self.target)

    def is_free(self, name: str) -> bool:
        """Whether the target is known to have nothing under that name, so that any file path there is new."""
        return self._copied is not None and name not in self._names

    def reserve(self, name: str) -> None:
        """Record that a copy will be made under that name."""
        self._names.add(name)

    def open_target(self, resumable: list[str]) -> None:
        """Lock the target, list its checkpoints, and sweep interrupted copies other than the `resumable` ones."""
        if self._copied is not None:
            return
        with ExitStack() as held:
            if self.is_leader:
                lock_root(self.target, held)
                # hosts do not wait for each other here: another one may have begun to send, or still be sending
                found = deletion.sweep(self.target, spared=resumable, age=None if self.has_all_files else DAY)
            else:
                found = Overview.of(self.target)
            self._names |= found.files.keys()
            self._copied = {summary.name: summary for summary in found.committed}
            self._index = found.index
            self.was_listed = True
            self._held = held.pop_all()

    def copy(self, manifest: Manifest) -> None:
        """Copy a checkpoint unless the target has it, then apply retention there. Requires `open_target`."""
        self._confirm_commits()
        replaced = (self._copied or {}).get(manifest.name)
        if replaced is None or replaced.id != manifest.id:
            began = time.monotonic()
            try:
                self._send(manifest, self._manifest_of(replaced))
            except LostError:  # the next attempt locks the target again
                self.close()
                raise
            _log.info(
                "copied %s to %s: %s in %.2f s",
                manifest.name, self.target.url, format_size(manifest.size), time.monotonic() - began,
            )  # fmt: skip
        self._apply_retention()

    def close(self) -> None:
        """Release the lock on the target."""
        self._held.close()
        self._copied = None

    def _manifest_of(self, summary: Summary | None) -> Manifest | None:
        """The manifest in the target of which that is the summary; None if it is not there any more."""
        found = find(self.target, summary.name).manifest if summary is not None else None
        return found if found is not None and summary is not None and found.id == summary.id else None

    def _send(self, manifest: Manifest, replaced: Manifest | None) -> None:
        """Send the files that the target lacks, and commit. A path means the same bytes there, and none is partial."""
        name = manifest.name
        attempt = Attempt(
            name,
            replaces=tuple(file.path for file in replaced.files) if replaced else (),
            id=manifest.id,
        )
        attempt.begin(self.target, [file.path for file in manifest.files])
        # only now: with the marker written, no other process removes the replaced checkpoint, so its version is final
        attempt = replace(attempt, expected_version=self.target.version(f"{name}/{FILE_NAME}"))
        sizes = {entry.key.removeprefix(f"{name}/"): entry.size for entry in self.target.list(name)}
        missing = [file for file in manifest.files if sizes.get(file.path) != file.size]
        self._send_files(name, missing, sha256=manifest.is_authentic)
        self._unconfirmed.append(manifest)
        if not size_problems(self.target, manifest):
            with suppress(ConflictError):  # of two hosts that find all files there, one commits
                version = attempt.commit(self.target, manifest, {})
                self._index.add(version, Summary.of(manifest))
        self._confirm_commits()

    def _confirm_commits(self) -> None:
        for manifest in list(self._unconfirmed):
            current = find(self.target, manifest.name).manifest
            if current is not None and current.sequence >= manifest.sequence:
                self._copied = {**(self._copied or {}), manifest.name: Summary.of(current)}
                self._history.add(current)
                self._unconfirmed.remove(manifest)

    def _send_files(self, name: str, missing: list[FileRecord], *, sha256: bool) -> None:
        files = [file for file in missing if self._is_mine(name, file)]
        total = sum(file.size for file in files)
        with progress_bar(f"copying {name}", total, in_bytes=True, show=total > PROGRESS_MIN_BYTES) as advance:
            throttle = _Throttle(self.bandwidth, advance, self._pause)
            newest = None if sha256 or not files else self._manifest_of(self.newest)
            for file in files:
                if newest is None or not self._link(newest, name, file):  # the newest copy's hashes are its own claim
                    pieces = VerifiedFile.of(self.source, name, file, sha256=sha256).pieces()
                    self.target.write(f"{name}/{file.path}", throttle.limit(pieces))

    def _pause(self, seconds: float) -> None:
        """Wait between two pieces, as the bandwidth asks for. Raises when the copy is given up."""
        end = time.monotonic() + seconds
        while True:
            self._sent += 1
            if self.stopping.wait(max(0.0, min(1.0, end - time.monotonic()))):
                raise TransientError("the end of the run did not wait for the rest.")
            if time.monotonic() >= end:
                return

    def _is_mine(self, name: str, file: FileRecord) -> bool:
        """Whether this host sends a file: the leader sends those that every host has, each host its own ones."""
        if self.has_all_files or rank_of(file.name) is None:
            return self.is_leader
        return self.source.version(f"{name}/{file.path}") is not None

    def _link(self, newest: Manifest, name: str, file: FileRecord) -> bool:
        """Link a file to the newest copy's, if that has the same bytes: frozen weights are sent once."""
        same = next((other for other in newest.files if _same_bytes(other, file)), None)
        if same is None:
            return False
        try:
            self.target.link(f"{newest.name}/{same.path}", f"{name}/{file.path}")
        except StorageError as error:  # the newest copy was removed by hand, for example: send the file
            _log.debug("%s could not be linked: %s", file.path, error)
            return False
        return True

    def _apply_retention(self) -> None:
        if self._copied is None or not self.is_leader:
            return
        newest_first = sorted(self._copied.values(), key=lambda summary: summary.sequence, reverse=True)
        try:
            left = newest_first
            if self.keep is not None:
                left = deletion.apply_retention(self.keep, self.target, newest_first, (), history=self._history)
        except StorageError as error:  # the copy is committed; the removal is tried again after the next one
            _log.warning("old copies were not removed: %s", error)
        else:
            self._copied = {summary.name: summary for summary in left}
            self._index.update(self.target, set(self._copied))


def _same_bytes(file: FileRecord, other: FileRecord) -> bool:
    return (file.name, file.size, file.blocks) == (other.name, other.size, other.blocks)


@dataclass
class _Throttle:
    """Limits the mean rate since it was made to `bandwidth` bytes per second."""

    bandwidth: float | None
    advance: Callable[[float], None]
    pause: Callable[[float], None]
    _count: int = 0
    _began: float = field(default_factory=time.monotonic)

    def limit(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            yield piece
            self._count += len(piece)
            self.advance(len(piece))
            due = 0.0 if self.bandwidth is None else self._count / self.bandwidth
            self.pause(max(0.0, due - (time.monotonic() - self._began)))
