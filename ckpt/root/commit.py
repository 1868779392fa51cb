"""From the files of a checkpoint to a commit: every file first, the manifest last."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckpt.errors import NotDurableError, StorageError
from ckpt.formats.native.block_hash import BlockHasher, digest
from ckpt.formats.native.manifest import FILE_NAME, FileRecord, Manifest
from ckpt.root.catalog import find
from ckpt.root.cleanup import remove_uncommitted
from ckpt.root.save_marker import mark_save
from ckpt.storage import Buffer, Staging, Storage
from ckpt.util.console import LONG, bar
from ckpt.util.threads import ThreadCall

if TYPE_CHECKING:
    from ckpt.formats.state import FilePlan

_log = logging.getLogger("ckpt")


@dataclass(frozen=True)
class EarlierFile:
    """A file of an earlier checkpoint, which this process has written or verified."""

    checkpoint: str
    file: FileRecord


@dataclass(frozen=True)
class WrittenFile:
    """A file of a try: its record, and a receipt where it is yet to be published."""

    file: FileRecord
    receipt: str | None = None


@dataclass(frozen=True)
class Attempt:
    """One attempt to write a checkpoint. Until `commit`, a checkpoint of the same name remains as it was.

    Files whose path exists already (`occupied_paths`) get another path: a file that a committed manifest lists is never
    overwritten. The manifest is written only over `expected_version`, so that of two concurrent writers one commits.
    """

    name: str
    replaces: tuple[str, ...] = ()
    occupied_paths: tuple[str, ...] = ()
    expected_version: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def begin(self, storage: Storage, paths: Iterable[str]) -> None:
        """Leave a mark with the names of all files to come, so that a later save knows what a crash left behind."""
        if isinstance(storage, Staging):  # it leaves nothing behind
            return
        with _or_failed():
            mark_save(storage, self.name, [self.path_for(path) for path in paths], self.replaces, self.id)

    def write(
        self, storage: Storage, images: list[FilePlan], earlier: Mapping[str, EarlierFile], *, show: bool = False
    ) -> list[WrittenFile]:
        """Write files, and hash their bytes as they pass. What has not changed since `earlier` is linked."""
        size = sum(image.size for image in images)
        with bar(f"saving {self.name}", size, in_bytes=True, show=show and size > LONG) as advance:
            return [
                self._link_one(storage, image, earlier.get(image.path), advance)
                or self._write_one(storage, image, advance)
                for image in images
            ]

    def commit(self, storage: Storage, manifest: Manifest, receipts: Mapping[str, str]) -> None:
        """From here on the checkpoint exists, and an older one of its name does not.

        After a `NotDurableError` it exists too; the files of the older one stay, since a crash may bring that back.
        """
        if isinstance(storage, Staging):
            receipt = storage.stage(f"{self.name}/{FILE_NAME}", [manifest.to_bytes()])
            staged = {f"{self.name}/{path}": one for path, one in {**receipts, FILE_NAME: receipt}.items()}
            storage.publish(staged, gone=[f"{self.name}/{path}" for path in self.replaces])
            return
        self._put_manifest(storage, manifest)
        with suppress(StorageError):  # it is committed: what could not be cleaned up is cleaned up before a later save
            remove_uncommitted(storage, self.name)

    def _put_manifest(self, storage: Storage, manifest: Manifest) -> None:
        """Write the manifest. If that fails, find out by its id whether it took effect all the same."""
        key, data = f"{self.name}/{FILE_NAME}", manifest.to_bytes()
        try:
            storage.write(key, [data], over=self.expected_version)
        except NotDurableError:
            # The kernel reports a failed fsync once: a second fsync alone would succeed, and prove nothing.
            storage.write(key, [data], over=self._own_version(storage, manifest))
        except StorageError as error:
            if not self._has_taken_effect(storage, manifest):
                raise
            _log.warning("%s/%s was written, though the storage said otherwise: %s", storage.url, key, error)

    def _own_version(self, storage: Storage, manifest: Manifest) -> str | None:
        """The version of the manifest that was just written; the old one if somebody has replaced it since."""
        version = storage.version(f"{self.name}/{FILE_NAME}")
        return version if self._has_taken_effect(storage, manifest) else self.expected_version

    def _has_taken_effect(self, storage: Storage, manifest: Manifest) -> bool:
        try:
            there = find(storage, self.name).manifest
        except StorageError:
            return False
        return there is not None and there.id == manifest.id

    def path_for(self, path: str) -> str:
        if path not in self.occupied_paths:
            return path
        stem, _, suffix = path.rpartition(".")
        return f"{stem}.{self.id[:8]}.{suffix}"

    def _link_one(
        self, storage: Storage, image: FilePlan, earlier: EarlierFile | None, advance: Callable[[float], None]
    ) -> WrittenFile | None:
        """Link a file that an earlier checkpoint has with the same bytes; none if there is none.

        What is staged need not be linked: bytes that are there are not sent again.
        """
        if earlier is None or not image.steady or image.size != earlier.file.size or isinstance(storage, Staging):
            return None
        if _digests(image.pieces(), lambda _: None) != earlier.file.blocks:
            return None
        path = self.path_for(image.path)
        try:
            storage.link(f"{earlier.checkpoint}/{earlier.file.path}", f"{self.name}/{path}")
        except NotDurableError as error:  # it is there: nothing can be written in its place
            raise StorageError(str(error)) from error
        except StorageError as error:  # removed by hand, say: then it is written
            _log.info("%s could not be linked: %s", path, error)
            return None
        advance(image.size)
        return WrittenFile(replace(earlier.file, path=path))

    def _put(self, storage: Storage, path: str, pieces: Iterable[Buffer]) -> str | None:
        key = f"{self.name}/{path}"
        if isinstance(storage, Staging):
            return storage.stage(key, pieces)
        with _or_failed():
            storage.write(key, pieces, over=None)
        return None

    def _write_one(self, storage: Storage, image: FilePlan, advance: Callable[[float], None]) -> WrittenFile:
        path = self.path_for(image.path)
        if image.settled:
            settled = list(image.pieces())
            hashing = ThreadCall(lambda: _digests(settled, advance), "ckpt-hash")
            try:
                receipt = self._put(storage, path, settled)
            finally:
                digests = hashing.result()
            head = _head(image, settled[0])
            return WrittenFile(
                FileRecord(name=image.path, path=path, size=image.size, blocks=digests, head=head), receipt
            )
        hasher = BlockHasher()
        source = image.pieces()
        heads: list[tuple[int, str] | None] = []

        def pieces() -> Iterator[memoryview]:
            for piece in hasher.through(source):
                if not heads:
                    heads.append(_head(image, piece))
                yield piece
                advance(len(piece))

        try:
            receipt = self._put(storage, path, pieces())
        finally:  # at once, also when it failed: other ranks may be waiting to hand over the rest
            getattr(source, "close", lambda: None)()
        record = FileRecord(name=image.path, path=path, size=hasher.size, blocks=hasher.digests, head=heads[0])
        return WrittenFile(record, receipt)


@contextmanager
def _or_failed() -> Iterator[None]:
    """Of the files before the manifest, one that may not be durable has not been written: the save fails."""
    try:
        yield
    except NotDurableError as error:
        raise StorageError(str(error)) from error


def _head(image: FilePlan, first: memoryview) -> tuple[int, str] | None:
    """The hash of a file's head, which lies in its first piece."""
    return (image.head, digest(first[: image.head])) if image.head else None


def _digests(pieces: Iterable[memoryview], advance: Callable[[float], None]) -> tuple[str, ...]:
    hasher = BlockHasher()
    for piece in hasher.through(pieces):
        advance(len(piece))
    return hasher.digests
