"""The files of a checkpoint that this rank has written: what the disk returns for them, and writing one again."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt.errors import DamagedError, StorageError, shows_damage
from ckpt.formats.native.block_hash import BlockHasher, digest
from ckpt.formats.native.manifest import FILE_NAME, FileRecord, Manifest
from ckpt.formats.state import FilePlan
from ckpt.root.catalog import find
from ckpt.root.verified_file import VerifiedFile
from ckpt.root.verify import reading
from ckpt.storage.base import PageCached

_FAILING_DISK = {errno.EIO, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN}


class DiskProblem(NamedTuple):
    """What is wrong with a file: bytes that differ or are missing (`is_damage`), or a disk that cannot read them."""

    text: str
    is_damage: bool


class GoneError(Exception):
    """The checkpoint was removed, or replaced by another one of its name."""


@dataclass(frozen=True)
class CommittedFiles:
    """The files of a committed checkpoint that this rank has written or linked.

    `in_memory`: those whose bytes are still in memory, by name. They are valid until the next snapshot is taken.
    """

    checkpoint: str
    id: str
    records: tuple[FileRecord, ...]
    in_memory: Mapping[str, FilePlan]

    @property
    def size(self) -> int:
        return sum(record.size for record in self.records)

    def with_manifest(self, manifest: Manifest) -> CommittedFiles:
        """The same, with the manifest, which this rank has written too."""
        data = manifest.to_bytes()
        record = FileRecord(name=FILE_NAME, path=FILE_NAME, size=len(data), blocks=(digest(data),))
        in_memory = {**self.in_memory, FILE_NAME: FilePlan.of(FILE_NAME, data)}
        return replace(self, records=(*self.records, record), in_memory=in_memory)

    def without_memory(self) -> CommittedFiles:
        return replace(self, in_memory={})

    def key(self, record: FileRecord) -> str:
        return f"{self.checkpoint}/{record.path}"

    def is_current(self, storage: PageCached) -> bool:
        """Whether the checkpoint is still this one. Where its manifest was altered it is: nobody else writes there."""
        found = find(storage, self.checkpoint)
        if found.manifest is not None:
            return found.manifest.id == self.id
        present = storage.version(f"{self.checkpoint}/{FILE_NAME}") is not None
        return present and isinstance(found.problem, DamagedError)

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
            if shows_damage(error) or getattr(error.__cause__, "errno", None) in _FAILING_DISK:
                return DiskProblem(str(error).rstrip("."), is_damage=shows_damage(error))
            raise
        return None

    def write_again(self, storage: PageCached, record: FileRecord) -> str:
        """Replace a file by the same bytes, from memory. Returns why that was not possible.

        The manifest lists them already, and is not changed. While the checkpoint's shared lock is held, no process
        removes it.
        """
        plan = self.in_memory.get(record.name)
        if plan is None:
            return "its bytes are no longer in memory"
        if _blocks_of(plan, record) != record.blocks:
            return "what is in memory does not match its hashes either"
        try:
            with reading(storage, self.checkpoint):
                if not self.is_current(storage):
                    raise GoneError
                pieces = list(plan.pieces()) if plan.in_memory else plan.pieces()
                storage.write(self.key(record), pieces, over=storage.version(self.key(record)))
        except StorageError as error:
            return f"it could not be written again ({str(error).rstrip('.')})"
        return ""


def _blocks_of(plan: FilePlan, record: FileRecord) -> tuple[str, ...]:
    hasher = BlockHasher(record.block_size)
    for piece in plan.pieces():
        hasher.update(piece)
    return hasher.digests
