"""Writes snapshots into memory: two slots in turn, the older of which makes room for the next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckpt.errors import FullError, LockedError
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.load.select import in_memory
from ckpt.memory.slot_storage import remove_files
from ckpt.ranks.consensus import Result, SingleProcess, decide_together
from ckpt.root import catalog, deletion
from ckpt.root.write_link_commit import Attempt, WrittenFile
from ckpt.save.capture import CapturedState
from ckpt.save.root_writer import RootWriter
from ckpt.save.saver import Saver
from ckpt.save.transaction import SaveRequest, SaveTransaction
from ckpt.storage import MemoryStorage
from ckpt.storage.base import LostError
from ckpt.storage.local.volatile import VolatileStorage


def _no_root() -> RootWriter:
    return RootWriter(MemoryStorage("none"), SingleProcess())


@dataclass
class SlotWriter(RootWriter):
    """The writer of a folder in memory. Its snapshots belong to the run of `main`, the writer of the root, and are
    numbered with the root's checkpoints."""

    log_level: ClassVar[int] = logging.DEBUG
    main: RootWriter = field(default_factory=_no_root)

    def label(self, name: str) -> str:
        return in_memory(name)

    def reserve(self) -> int:
        self.numbering.note(self.main._highest)
        return super().reserve()

    def _begin(self, attempt: Attempt, paths: list[str]) -> Attempt:
        self.keep_newest()
        return super()._begin(attempt, paths)

    def make_room(self) -> None:
        """Remove the older snapshot, so that the next one can have its memory before it is begun."""
        if self.owns_root:
            with suppress(LostError):  # the folder was removed: it is made anew when the snapshot is begun
                self.lock.take()
                self.keep_newest()
                self._remove_unreadable()

    def keep_newest(self) -> None:
        """Remove all snapshots but the newest intact one. Raises if somebody reads one of those."""
        held, committed = self.held, self.lock.committed
        kept = [manifest for manifest in committed if manifest.name not in self.damaged][:1]
        for manifest in committed:
            if manifest not in kept and held is not None:
                why = deletion.remove(self.storage, manifest)
                if why:
                    raise LockedError(f"{self.storage.url}/{manifest.name} {why}.")
                held.discard(manifest.name)

    def _remove_unreadable(self) -> None:
        """Remove what a damaged manifest keeps in memory: nobody knows its files, and nobody can use them."""
        known = {manifest.name for manifest in self.lock.committed}
        for name, files in catalog.by_folder(self.storage.list()).items():
            if FILE_NAME in files and name not in known:
                remove_files(self.storage, name)

    def commit(self, attempt: Attempt, stored: list[WrittenFile], facts: Mapping[str, Any]) -> Manifest:
        self.lineage.run, self.lineage.parent = self.main.lineage.run, self.main.lineage.parent
        return super().commit(attempt, stored, facts)

    def commit_manifest(self, attempt: Attempt, manifest: Manifest, receipts: Mapping[str, str]) -> None:
        super().commit_manifest(attempt, manifest, receipts)
        self.trim()

    def retain(self) -> None:
        """Nothing: each snapshot makes room for itself, and two of them need neither an index nor a history."""

    def trim(self) -> None:
        """Give back the memory of removed snapshots that the new one has not used."""
        if isinstance(self.storage, VolatileStorage):
            self.storage.trim()


def _refuse(captured: CapturedState) -> CapturedState:
    raise FullError("there is not enough host memory for a copy of the state.")


class SlotSaver(Saver):
    """Saves into memory. An error waits for the next snapshot; the memory of a snapshot is free when it is written."""

    root: SlotWriter
    size: int | None = None  # bytes of a snapshot that this rank writes: of the last, or of the one prepared for
    after_commit: Callable[[str], None] | None = None  # called with the name of a snapshot, before the next one

    def _capture(self, request: SaveRequest, root: RootWriter, *, snapshot: bool) -> SaveTransaction:
        """Training does not wait until a snapshot is written: without room for a copy of the state, it fails."""
        save = super()._capture(request, root, snapshot=snapshot)
        captured = save.captured.value
        if not save.detached and captured is not None and not captured.gathered:
            save.captured = save.captured.then(_refuse)
        return save

    def _is_detached(self, save: SaveTransaction, *, everywhere: bool) -> bool:
        """What has failed already needs no training to wait for it either: other ranks learn of it on this thread."""
        return save.detached or save.captured.error is not None

    def prepare(self, request: SaveRequest) -> None:
        """Make memory ready for snapshots like this: to get its pages takes seconds. Every rank makes this call."""
        self._make_room(request.name)
        captured = request.capture().encode()
        self.size = sum(file.size for file in captured.files)
        self.snapshots.prepare(captured.snapshot_files, self.root.storage)

    def _carry_out(self, save: SaveTransaction) -> None:
        try:
            self._make_room_for(save)
            super()._carry_out(save)
            self.size = sum(file.size for file in save.written)
        finally:
            self._release_written()
        self.snapshots.memory.prepare_another()
        if self.after_commit is not None and self.root.owns_root:
            self.after_commit(save.request.name)

    def _make_room_for(self, save: SaveTransaction) -> None:
        try:
            self._make_room(save.request.name)
        except BaseException:
            save.discard()
            raise

    def _make_room(self, name: str) -> None:
        """On all ranks, before any takes the memory of what another removes."""
        call = f"step() (memory, room for {name})"
        with self._channel.working():
            decide_together(self._channel, call, Result.capture(self.root.make_room), lambda _: None)

    def _after_failure(self, root: RootWriter, name: str, error: Exception) -> None:
        root.abandon(name, error)

    def close(self) -> None:
        """Release the folder, but not the snapshot memory, which the root's saver owns and uses."""
        if not self.busy and self.owner.is_here:
            self._release_written()
            self.snapshots.memory.release_files()
            self.root.trim()  # what was made ready, and never used
            self.root.close()
