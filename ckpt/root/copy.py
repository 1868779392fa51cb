"""Copies of checkpoints in a second storage, with the same names, bytes and manifests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

from ckpt.errors import ConflictError, StorageError
from ckpt.formats.native.manifest import FILE_NAME, FileRecord, Manifest
from ckpt.root import cleanup
from ckpt.root.catalog import find, scan
from ckpt.root.commit import Attempt
from ckpt.root.file_names import rank_of
from ckpt.root.lock import lock_root
from ckpt.root.retention import Keep
from ckpt.root.save_marker import DAY
from ckpt.root.verified_file import VerifiedFile
from ckpt.root.verify import size_problems
from ckpt.storage import Storage
from ckpt.storage.base import LostError
from ckpt.util.console import LONG, bar, size

_log = logging.getLogger("ckpt")


@dataclass
class Copies:
    """Copies committed checkpoints from `source` to `target`: files first, verified while they are read, manifest last.

    Of several hosts with separate roots each copies its own files, and the last to finish writes the manifest.
    """

    source: Storage
    target: Storage
    keep: Keep | None = None
    bandwidth: float | None = None  # bytes in a second
    has_all_files: bool = True  # whether `source` has all files
    is_leader: bool = True  # of several hosts that copy, one takes the place and clears up there
    _there: dict[str, Manifest] | None = None  # none as long as nobody could look; others read it: never changed
    _names: set[str] = field(default_factory=set)  # under which something lies there, or will
    _open_ends: list[Manifest] = field(default_factory=list)  # sent from here, but not known to be committed there
    _held: ExitStack = field(default_factory=ExitStack)

    @property
    def newest(self) -> Manifest | None:
        """The newest checkpoint there, as far as that is known."""
        return max((self._there or {}).values(), key=lambda one: one.sequence, default=None)

    def is_free(self, name: str) -> bool:
        """Whether certainly nothing lies under that name there, so that files of any names are new."""
        return self._there is not None and name not in self._names

    def reserve(self, name: str) -> None:
        """Something will lie under that name."""
        self._names.add(name)

    def open_target(self, resumable: list[str]) -> None:
        """Lock the target, list its checkpoints, and sweep interrupted copies other than the `resumable` ones."""
        if self._there is not None:
            return
        with ExitStack() as held:
            if self.is_leader:
                lock_root(self.target, held)
                # hosts do not wait for each other here: another one may have begun to send, or still be sending
                cleanup.sweep(self.target, spared=resumable, age=None if self.has_all_files else DAY)
            self._names |= {entry.key.partition("/")[0] for entry in self.target.list()}
            self._there = {one.name: one.manifest for one in scan(self.target) if one.manifest is not None}
            self._held = held.pop_all()

    def copy(self, manifest: Manifest) -> None:
        """Copy a checkpoint unless the target has it, then apply retention there. Requires `open_target`."""
        self._see_what_is_finished()
        older = (self._there or {}).get(manifest.name)
        if older is None or older.id != manifest.id:
            began = time.monotonic()
            try:
                self._carry_over(manifest, older)
            except LostError:  # the next attempt takes the place again
                self.close()
                raise
            _log.info(
                "copied %s to %s: %s in %.2f s",
                manifest.name, self.target.url, size(manifest.size), time.monotonic() - began,
            )  # fmt: skip
        self._retain()

    def close(self) -> None:
        """Let go of the place."""
        self._held.close()
        self._there = None

    def _carry_over(self, manifest: Manifest, older: Manifest | None) -> None:
        """Files that are there already are not sent again: a path means the same bytes, and only whole files show."""
        name = manifest.name
        attempt = Attempt(
            name,
            replaces=tuple(file.path for file in older.files) if older else (),
            id=manifest.id,
        )
        attempt.begin(self.target, [file.path for file in manifest.files])
        # only now: once the mark is there, no other process removes what is replaced, so that its version holds
        attempt = replace(attempt, expected_version=self.target.version(f"{name}/{FILE_NAME}"))
        there = {entry.key.removeprefix(f"{name}/"): entry.size for entry in self.target.list(name)}
        self._send_all(name, [file for file in manifest.files if there.get(file.path) != file.size])
        self._open_ends.append(manifest)
        if not size_problems(self.target, manifest):
            with suppress(ConflictError):  # of two hosts that see that all is there, one commits
                attempt.commit(self.target, manifest, {})
        self._see_what_is_finished()

    def _see_what_is_finished(self) -> None:
        for manifest in list(self._open_ends):
            known = find(self.target, manifest.name).manifest
            if known is not None and known.sequence >= manifest.sequence:
                self._there = {**(self._there or {}), manifest.name: known}
                self._open_ends.remove(manifest)

    def _send_all(self, name: str, missing: list[FileRecord]) -> None:
        mine = [file for file in missing if self._is_mine(name, file)]
        total = sum(file.size for file in mine)
        with bar(f"copying {name}", total, in_bytes=True, show=total > LONG) as advance:
            pace = _Pace(self.bandwidth, advance)
            for file in mine:
                if not self._link(name, file):
                    pieces = VerifiedFile.of(self.source, name, file).pieces()
                    self.target.write(f"{name}/{file.path}", pace.kept(pieces))

    def _is_mine(self, name: str, file: FileRecord) -> bool:
        """What all hosts have in common, one of them sends; of the rest, each what it has."""
        if self.has_all_files or rank_of(file.name) is None:
            return self.is_leader
        return self.source.version(f"{name}/{file.path}") is not None

    def _link(self, name: str, file: FileRecord) -> bool:
        """Take a file from the newest checkpoint there, if that has the same bytes: frozen weights are sent once."""
        newest = self.newest
        same = next((one for one in newest.files if _same_bytes(one, file)), None) if newest else None
        if newest is None or same is None:
            return False
        try:
            self.target.link(f"{newest.name}/{same.path}", f"{name}/{file.path}")
        except StorageError as error:  # removed by hand, say: then it is sent
            _log.info("%s could not be linked: %s", file.path, error)
            return False
        return True

    def _retain(self) -> None:
        if self.keep is None or self._there is None or not self.is_leader:
            return
        newest_first = sorted(self._there.values(), key=lambda one: one.sequence, reverse=True)
        try:
            left = cleanup.apply_retention(self.keep, self.target, newest_first, ())
        except StorageError as error:  # the copy stands; what could not be removed is tried again after the next one
            _log.warning("old copies were not removed: %s", error)
        else:
            self._there = {one.name: one for one in left}


def _same_bytes(one: FileRecord, other: FileRecord) -> bool:
    return (one.name, one.size, one.blocks) == (other.name, other.size, other.blocks)


@dataclass
class _Pace:
    """No more than so many bytes in a second, counted from the beginning."""

    bandwidth: float | None
    advance: Callable[[float], None]
    _count: int = 0
    _began: float = field(default_factory=time.monotonic)

    def kept(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """The pieces, each when it is time for it to have gone."""
        for piece in pieces:
            yield piece
            self._count += len(piece)
            self.advance(len(piece))
            if self.bandwidth is not None:
                time.sleep(max(0.0, self._count / self.bandwidth - (time.monotonic() - self._began)))
