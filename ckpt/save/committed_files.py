"""The files of a checkpoint that this rank has written: what the disk returns for them, and writing one again."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt.errors import AbsentError, DamagedError, NotDurableError, StorageError, shows_damage
from ckpt.formats.native.manifest import BLOCK_SIZE, FILE_NAME, BlockHasher, FileRecord, Manifest
from ckpt.formats.tensors import FilePlan
from ckpt.root.catalog import find
from ckpt.root.verified_file import VerifiedFile
from ckpt.root.verify import lock_patiently
from ckpt.storage.base import PageCached

_FAILING_DISK = {errno.EIO, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN}


class DiskProblem(NamedTuple):
    """What is wrong with a file: bytes that differ or are missing (`is_damage`), or a disk that cannot read them."""

    text: str
    is_damage: bool


class Rewrite(NamedTuple):
    """Whether a file was written again, and what is wrong: why it was not, or why it may be lost in a crash."""

    is_written: bool
    problem: str = ""


class GoneError(Exception):
    """The checkpoint was removed, or replaced by another one of its name."""


@dataclass(frozen=True)
class CommittedFiles:
    """The files of a committed checkpoint that this rank has written or linked.

    `in_memory`: those whose bytes are still in memory, by name, until `free_memory`. They are valid until the next
    snapshot is taken.
    """

    checkpoint: str
    id: str
    records: tuple[FileRecord, ...]
    in_memory: dict[str, FilePlan]

    @property
    def size(self) -> int:
        return sum(record.size for record in self.records)

    def with_manifest(self, manifest: Manifest) -> CommittedFiles:
        """The same, with the manifest, which this rank has written too."""
        plan = FilePlan.of(FILE_NAME, manifest.to_bytes())
        record = FileRecord(name=FILE_NAME, path=FILE_NAME, size=plan.size, blocks=_blocks_of(plan))
        self.in_memory[FILE_NAME] = plan
        return replace(self, records=(*self.records, record))

    def free_memory(self) -> None:
        """Free what is in memory, on the calling thread. Nothing may be writing it."""
        self.in_memory.clear()

    def key(self, record: FileRecord) -> str:
        return f"{self.checkpoint}/{record.path}"

    def is_current(self, storage: PageCached) -> bool:
        """Whether the checkpoint is still this one, by its manifest or the copy of it. Where both were altered it is:
        nobody else writes there."""
        try:
            found = find(storage, self.checkpoint)
        except StorageError as error:
            if not _is_failing_disk(error):
                raise
            return self._has(storage, FILE_NAME)
        if found.manifest is not None:
            return found.manifest.id == self.id
        return self._has(storage, FILE_NAME) and isinstance(found.problem, DamagedError)

    def _has(self, storage: PageCached, path: str) -> bool:
        return storage.version(f"{self.checkpoint}/{path}") is not None

    def problem(
        self, storage: PageCached, record: FileRecord, buffer: memoryview, advance: Callable[[float], None]
    ) -> DiskProblem | None:
        """Read a file from the disk, into the page cache. None if it has the bytes that were written."""
        file = VerifiedFile.of(storage, self.checkpoint, record)
        try:
            storage.evict(file.stored.key)
            for index in range(len(record.blocks)):
                altered = file.verify_block(index, buffer, advance)
                if altered:
                    return DiskProblem(altered, is_damage=True)
        except (DamagedError, StorageError) as error:
            if shows_damage(error) or _is_failing_disk(error):
                return DiskProblem(str(error).rstrip("."), is_damage=shows_damage(error))
            raise
        return None

    def write_again(self, storage: PageCached, record: FileRecord) -> Rewrite:
        """Replace a file by the same bytes, from memory.

        The manifest lists them already, and is not changed. While the checkpoint's shared lock is held, no process
        removes it.
        """
        plan = self.in_memory.get(record.name)
        if plan is None:
            return Rewrite(False, "its bytes are no longer in memory")
        if _blocks_of(plan, record.block_size) != record.blocks:
            return Rewrite(False, "what is in memory does not match its hashes either")
        try:
            with ExitStack() as held:
                self._lock(storage, held)
                if not self.is_current(storage):
                    raise GoneError
                pieces = list(plan.pieces()) if plan.in_memory else plan.pieces()
                storage.write(self.key(record), pieces, over=storage.version(self.key(record)))
        except NotDurableError as error:
            return Rewrite(True, str(error).rstrip("."))
        except StorageError as error:
            return Rewrite(False, f"it could not be written again ({str(error).rstrip('.')})")
        return Rewrite(True)

    def _lock(self, storage: PageCached, held: ExitStack) -> None:
        try:
            lock_patiently(storage, self.checkpoint, held)
        except AbsentError:
            raise GoneError from None


def _is_failing_disk(error: BaseException) -> bool:
    return getattr(error.__cause__, "errno", None) in _FAILING_DISK


def _blocks_of(plan: FilePlan, block_size: int = BLOCK_SIZE) -> tuple[str, ...]:
    hasher = BlockHasher(block_size)
    for piece in plan.pieces():
        hasher.update(piece)
    return hasher.digests
