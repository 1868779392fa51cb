"""From the files of a checkpoint to a commit: every file first, the manifest last."""

from __future__ import annotations

import json
import logging
import os
import socket
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from ckpt.catalog import MARKER, Checkpoint, find, scan
from ckpt.console import LONG, bar
from ckpt.errors import AbsentError, LockedError, StorageError
from ckpt.formats.blocks import BlockHasher, digest
from ckpt.formats.manifest import FILE_NAME, FileRecord, Manifest
from ckpt.formats.state import Image
from ckpt.retention import Keep
from ckpt.storage import Buffer, Staging, Storage
from ckpt.storage.background import Beside
from ckpt.storage.base import check_key

_log = logging.getLogger("ckpt")
LOCK = ".lock"


@dataclass(frozen=True)
class Earlier:
    """A file of an earlier checkpoint, which this process has written or verified."""

    checkpoint: str
    file: FileRecord


@dataclass(frozen=True)
class Stored:
    """A file of a try: its record, and a receipt where it is yet to be published."""

    file: FileRecord
    receipt: str | None = None


@dataclass(frozen=True)
class Attempt:
    """One try at writing a checkpoint. Until `commit`, a checkpoint of the same name stands as it was.

    Where there are files already (`taken`), those of the try have other names: nothing that a committed manifest lists
    is ever written to. `over` is the version of the manifest that the try replaces: of two writers one commits.
    """

    name: str
    replaces: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()
    over: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def begin(self, storage: Storage, paths: Iterable[str]) -> None:
        """Leave a mark with the names of all files to come, so that a later save knows what a crash left behind."""
        if isinstance(storage, Staging):  # it leaves nothing behind
            return
        files = [self.path_for(path) for path in paths]
        left = _read_mark(storage, self.name)  # by a try whose files could not be removed yet
        _leave_mark(storage, self.name, files, [path for path in [*self.replaces, *left] if path not in files])

    def write(
        self, storage: Storage, images: list[Image], earlier: Mapping[str, Earlier], *, show: bool = False
    ) -> list[Stored]:
        """Write files, and hash their bytes as they pass. What has not changed since `earlier` is linked."""
        size = sum(image.size for image in images)
        with bar(f"saving {self.name}", size, in_bytes=True, show=show and size > LONG) as advance:
            return [
                self._link_one(storage, image, earlier.get(image.path), advance)
                or self._write_one(storage, image, advance)
                for image in images
            ]

    def commit(self, storage: Storage, manifest: Manifest, receipts: Mapping[str, str]) -> None:
        """From here on the checkpoint exists, and an older one of its name does not."""
        if isinstance(storage, Staging):
            receipt = storage.stage(f"{self.name}/{FILE_NAME}", [manifest.to_bytes()])
            staged = {f"{self.name}/{path}": one for path, one in {**receipts, FILE_NAME: receipt}.items()}
            storage.publish(staged, gone=[f"{self.name}/{path}" for path in self.replaces])
            return
        storage.write(f"{self.name}/{FILE_NAME}", [manifest.to_bytes()], over=self.over)
        with suppress(StorageError):  # it is committed: what could not be cleaned up is cleaned up before a later save
            clean(storage, self.name)

    def path_for(self, path: str) -> str:
        if path not in self.taken:
            return path
        stem, _, suffix = path.rpartition(".")
        return f"{stem}.{self.id[:8]}.{suffix}"

    def _link_one(
        self, storage: Storage, image: Image, earlier: Earlier | None, advance: Callable[[float], None]
    ) -> Stored | None:
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
        except StorageError as error:  # removed by hand, say: then it is written
            _log.info("%s could not be linked: %s", path, error)
            return None
        advance(image.size)
        return Stored(replace(earlier.file, path=path))

    def _put(self, storage: Storage, path: str, pieces: Iterable[Buffer]) -> str | None:
        key = f"{self.name}/{path}"
        if isinstance(storage, Staging):
            return storage.stage(key, pieces)
        storage.write(key, pieces, over=None)
        return None

    def _write_one(self, storage: Storage, image: Image, advance: Callable[[float], None]) -> Stored:
        path = self.path_for(image.path)
        if image.settled:
            settled = list(image.pieces())
            hashing = Beside(lambda: _digests(settled, advance), "ckpt-hash")
            try:
                receipt = self._put(storage, path, settled)
            finally:
                digests = hashing.result()
            head = _head(image, settled[0])
            return Stored(FileRecord(name=image.path, path=path, size=image.size, blocks=digests, head=head), receipt)
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
        return Stored(record, receipt)


def _head(image: Image, first: memoryview) -> tuple[int, str] | None:
    """The hash of a file's head, which lies in its first piece."""
    return (image.head, digest(first[: image.head])) if image.head else None


def _digests(pieces: Iterable[memoryview], advance: Callable[[float], None]) -> tuple[str, ...]:
    hasher = BlockHasher()
    for piece in hasher.through(pieces):
        advance(len(piece))
    return hasher.digests


def clean(storage: Storage, name: str) -> None:
    """Remove the files of a try that its checkpoint does not list, and at last the try's mark.

    A file that neither a mark nor a manifest of ours names is somebody else's, and stays. So does everything while
    somebody reads there, or where there is a manifest that this ckpt cannot read: a later save tries again.
    """
    if isinstance(storage, Staging):  # a try leaves nothing there
        return
    checkpoint = find(storage, name)
    listed = {file.path for file in checkpoint.manifest.files} if checkpoint.manifest else set()
    stray = [path for path in _read_mark(storage, name) if path not in listed]
    if checkpoint.manifest is None and _has_manifest(storage, name):
        return
    try:
        with storage.lock(name):
            storage.delete([f"{name}/{path}" for path in stray])
            storage.sweep(name)
            storage.delete([f"{name}/{MARKER}"])
    except LockedError:
        _log.info("%s/%s is being read: what is left of an older save there is removed later", storage.url, name)


def _leave_mark(storage: Storage, name: str, files: list[str], replaces: list[str]) -> None:
    mark = {"files": files, "replaces": replaces, "process": os.getpid(), "host": socket.gethostname()}
    storage.write(f"{name}/{MARKER}", [json.dumps(mark).encode()])


def _read_mark(storage: Storage, name: str) -> list[str]:
    """The files that the mark of a save names; none if there is no mark, or none of ours."""
    try:
        mark = json.loads(storage.read(f"{name}/{MARKER}"))
        return [check_key(path) for path in [*mark["files"], *mark["replaces"]]]
    except AbsentError:
        return []
    except (ValueError, LookupError, TypeError, AttributeError):
        _log.warning("%s/%s/%s is not what ckpt writes: it is left alone", storage.url, name, MARKER)
        return []


def _has_manifest(storage: Storage, name: str) -> bool:
    return any(entry.key == f"{name}/{FILE_NAME}" for entry in storage.list(name))


def take(storage: Storage, held: ExitStack) -> None:
    """Hold a root for this run until the stack is closed. Refused if another run has it."""
    note = f"process {os.getpid()} on {socket.gethostname()}, since {now()}."
    try:
        held.enter_context(storage.lock(LOCK, note=note))
    except LockedError as error:
        raise LockedError(
            f"another run writes to {storage.url}: {error} Wait until it has ended or stop it, or give this run "
            "another root. Within one process, close() the other StateManager first."
        ) from None


def sweep(storage: Storage, spared: Container[str] = ()) -> list[Checkpoint]:
    """Remove what earlier crashes left, and return the checkpoints that are there. Call it while the root is ours.

    What is `spared`, by the names of checkpoints, somebody will go on with.
    """
    marks = [entry.key for entry in storage.list() if entry.key.count("/") == 1 and entry.key.endswith(f"/{MARKER}")]
    for name in [mark.partition("/")[0] for mark in marks]:
        if name not in spared:
            clean(storage, name)
    storage.sweep()
    return scan(storage)


def remove(storage: Storage, manifest: Manifest) -> bool:
    """Remove a checkpoint, unless somebody is reading it. Its manifest goes first: no moment shows half of it.

    Cut off after that, the rest is swept before a later save: a mark says what it is.
    """
    if not any(True for _ in storage.list(manifest.name)):
        return True  # somebody has removed it by hand
    files = [file.path for file in manifest.files]
    try:
        with storage.lock(manifest.name):
            if not isinstance(storage, Staging):
                with suppress(StorageError):  # no room for a mark is a reason to remove something
                    _leave_mark(storage, manifest.name, files, [])
            storage.delete([f"{manifest.name}/{path}" for path in [FILE_NAME, *files, MARKER]])
    except LockedError:
        return False
    return True


def retain(keep: Keep, storage: Storage, newest_first: list[Manifest], damaged: Iterable[str]) -> list[Manifest]:
    """Remove what `keep` lets go. Returns the checkpoints that are left."""
    going = keep.removable(newest_first, set(damaged))
    gone = {one.name for one in newest_first if one.name in going and remove(storage, one)}
    return [manifest for manifest in newest_first if manifest.name not in gone]


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
