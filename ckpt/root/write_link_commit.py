"""Writes a checkpoint: every file, or a link to the same bytes of an earlier one, then the manifest: the commit."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from ckpt.errors import DamagedError, NotDurableError, StorageError
from ckpt.formats.native.manifest import (
    BLOCK_SIZE,
    COPY_NAME,
    FILE_NAME,
    BlockHasher,
    FileRecord,
    Hash,
    Manifest,
    digest,
    digests_of_every,
    sha256,
    xxh3_128,
)
from ckpt.root.catalog import delete_copy, find, mark_save, write_copy
from ckpt.root.deletion import remove_uncommitted
from ckpt.root.verify import VerifiedFile
from ckpt.storage import Buffer, Grouping, StablePieces, Staging, Storage
from ckpt.util.console import counted, progress_bar
from ckpt.util.threads import CORES_OF_RANK, Worker

if TYPE_CHECKING:
    from ckpt.formats.tensors import FileHashes, FilePlan


Advance = Callable[[float], None]


def _uncounted(amount: float) -> None:
    """For bytes that the progress bar counts elsewhere."""


# SHA-256 takes a core for 0.4 GB/s and more, and training needs cores too: half of those of this rank, at most four
_WORTH_THREADS = 4 << 20  # bytes
_FAST_THREADS = 2  # beside training: one hashes as fast as memory is read by one
_SHA256_THREADS = min(4, max(1, CORES_OF_RANK // 2))


class FileHasher:
    """Hashes the pieces of a file on their way, and makes its record in the manifest."""

    def __init__(self, plan: FilePlan, *, sha256: bool = False) -> None:
        self._plan = plan
        self._block_size = plan.block_size or BLOCK_SIZE
        self._hasher = BlockHasher(self._block_size, sha256=sha256)
        self._head = b""

    def through(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the pieces unchanged, having hashed each. The head is within the first one."""
        for piece in self._hasher.through(pieces):
            self.of_head(piece)
            yield piece

    def of_head(self, piece: memoryview) -> FileHasher:
        """Keep the head, if this is the first piece."""
        self._head = self._head or bytes(piece[: self._plan.head])
        return self

    def record(self, path: str, by_sha256: tuple[str, ...] = (), blocks: tuple[str, ...] = ()) -> FileRecord:
        """The record; `by_sha256` and `blocks` are those of the blocks, if others have computed them."""
        by_sha256 = by_sha256 or self._hasher.sha256_digests
        return FileRecord(
            name=self._plan.path,
            path=path,
            size=self._plan.size if blocks else self._hasher.size,
            blocks=blocks or self._hasher.digests,
            block_size=self._block_size,
            head=(self._plan.head, digest(self._head)) if self._plan.head else None,
            sha256=by_sha256,
            head_sha256=sha256(self._head) if self._plan.head and by_sha256 else "",
        )


def hashed(plan: FilePlan, path: str, advance: Advance, *, sha256: bool = False) -> FileRecord:
    """The record of a file. What a device has hashed is not hashed again, except by SHA-256.

    What is in memory is hashed block by block, in threads, where that is what takes the time: by SHA-256, and by any
    hash where the memory is the file, so that nothing is written.
    """
    if plan.hashes is not None:
        threads = _SHA256_THREADS if plan.in_memory else 1  # each goes through all pieces
        by_sha256 = _InThreads(plan, hashlib.sha256, threads).result() if sha256 else ()
        for piece in plan.pieces() if plan.in_memory else ():  # when they have arrived
            advance(len(piece))
        return _record_of(plan, path, plan.hashes, by_sha256)
    shared = plan.in_memory and plan.size >= _WORTH_THREADS
    if shared and plan.reserved is not None:
        return _hashed_in_threads(plan, path, advance, sha256=sha256)
    if not sha256 or not shared:
        return _run_through(FileHasher(plan, sha256=sha256), plan, advance).record(path)
    beside = _InThreads(plan, hashlib.sha256, _SHA256_THREADS)
    try:
        hasher = _run_through(FileHasher(plan), plan, advance)
    finally:
        by_sha256 = beside.result()
    return hasher.record(path, by_sha256)


def _record_of(plan: FilePlan, path: str, known: FileHashes, by_sha256: tuple[str, ...]) -> FileRecord:
    head = (plan.head, known.head) if plan.head else None
    of_head = sha256(bytes(next(plan.pieces())[: plan.head])) if plan.head and by_sha256 else ""
    return FileRecord(
        name=plan.path, path=path, size=plan.size, blocks=known.blocks, head=head, sha256=by_sha256, head_sha256=of_head
    )


def _hashed_in_threads(plan: FilePlan, path: str, advance: Advance, *, sha256: bool) -> FileRecord:
    slow = _InThreads(plan, hashlib.sha256, _SHA256_THREADS) if sha256 else None
    try:
        blocks = _InThreads(plan, xxh3_128, _FAST_THREADS).result()
    finally:
        by_sha256 = slow.result() if slow is not None else ()
    advance(plan.size)
    return FileHasher(plan).of_head(next(plan.pieces())).record(path, by_sha256, blocks)


class _InThreads:
    """The hash of every block, computed in threads from now on. Each goes through all pieces, for its blocks."""

    def __init__(self, plan: FilePlan, new: Callable[[], Hash], threads: int) -> None:
        threads = min(threads, -(-plan.size // BLOCK_SIZE))
        work = [partial(_of_every, plan, number, threads, new) for number in range(threads)]
        self._calls = [Worker("ckpt-hash").start(call) for call in work]

    def result(self) -> tuple[str, ...]:
        """Waits for all of them, also where one has failed: they read memory that is used again."""
        for call in self._calls:
            call.close()
        found = {index: block for call in self._calls for index, block in call.wait().items()}
        return tuple(found[index] for index in sorted(found))


def _of_every(plan: FilePlan, first: int, step: int, new: Callable[[], Hash]) -> dict[int, str]:
    return digests_of_every(plan.pieces(), first, step, new)


def _run_through(hasher: FileHasher, plan: FilePlan, advance: Advance) -> FileHasher:
    for piece in hasher.through(plan.pieces()):
        advance(len(piece))
    return hasher


_log = logging.getLogger("ckpt")
_MOST_LISTED = 2000  # files that a commit looks at once more: two requests
_WORTH_A_THREAD = 4 << 20  # bytes: less is hashed in the time that a thread takes to start


@dataclass(frozen=True)
class EarlierFile:
    """A file of an earlier checkpoint that may be linked: this process has written or verified it.

    Without `was_read` it has not, and reads it first: damage would be linked into every later checkpoint.
    """

    checkpoint: str
    file: FileRecord
    was_read: bool = True


@dataclass(frozen=True)
class WrittenFile:
    """A file of an attempt: its record for the manifest, and its receipt where the storage stages files.

    `linked`: its bytes are those of an earlier checkpoint.
    """

    file: FileRecord
    receipt: str | None = None
    linked: bool = False


@dataclass(frozen=True)
class Attempt:
    """One attempt to write a checkpoint. Until `commit`, a checkpoint of the same name remains as it was.

    Files whose path exists already (`occupied_paths`) get another path: a file that a committed manifest lists is never
    overwritten by other bytes. The manifest is written only over `expected_version`, so that of two concurrent writers
    one commits.
    """

    name: str
    replaces: tuple[str, ...] = ()
    occupied_paths: tuple[str, ...] = ()
    expected_version: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    sha256: bool = False  # whether files are hashed by SHA-256 too
    sequence: int = 0  # the number that was reserved for it
    amends: bool = False  # the checkpoint that it replaces: files that are the same stay where they are

    def begin(self, storage: Storage, paths: Iterable[str]) -> None:
        """Write the save marker with the paths of all files to come, so that a later save removes what a crash left."""
        if isinstance(storage, Staging):  # what is staged and never published leaves nothing behind
            return
        with _failing_unless_durable():
            mark_save(storage, self.name, [self.path_for(path) for path in paths], self.replaces, self.id)

    def write(
        self, storage: Storage, plans: list[FilePlan], earlier: Mapping[str, EarlierFile], *,
        show: bool | Callable[[], bool] = False,
    ) -> list[WrittenFile]:  # fmt: skip
        """Write files and hash their bytes on the way; link those that an `earlier` checkpoint has unchanged.

        `show`: whether somebody waits for it, as `progress_bar` takes it.
        """
        size = sum(plan.size for plan in plans)
        with (
            progress_bar(f"saving {self.name}", size, in_bytes=True, show=show) as advance,
            _failing_unless_durable(),
            storage.grouped() if isinstance(storage, Grouping) else nullcontext(),
        ):
            return [
                self._link(storage, plan, earlier.get(plan.path), advance)
                or self._kept(storage, self._write_file(storage, plan, advance), earlier.get(plan.path))
                for plan in plans
            ]

    def commit(self, storage: Storage, manifest: Manifest, receipts: Mapping[str, str]) -> str | None:
        """Write the manifest: from then on the checkpoint exists, and what it replaces does not.

        Returns the version of the manifest, where the storage says it.

        After a `NotDurableError` it exists too; the replaced files are kept, as a crash may restore the old manifest.
        """
        data = manifest.to_bytes()
        if isinstance(storage, Staging):
            keyed = {f"{self.name}/{path}": receipt for path, receipt in receipts.items()}
            for key in (f"{self.name}/{COPY_NAME}", f"{self.name}/{FILE_NAME}"):
                keyed[key] = storage.stage(key, [data])
            storage.publish(keyed, gone=[f"{self.name}/{path}" for path in self.replaces])
            return None
        if not storage.is_local:
            self._require_files(storage, manifest)
        if self.expected_version is not None:
            with suppress(StorageError):  # where nothing can be deleted, it is overwritten after the commit
                delete_copy(storage, self.name)
        version = self._put_manifest(storage, manifest, data)
        with suppress(
            StorageError
        ):  # it is committed: what could not be written or removed now is left to a later save
            write_copy(storage, self.name, data)
        with suppress(StorageError):
            remove_uncommitted(storage, self.name, manifest)
        return version

    def _require_files(self, storage: Storage, manifest: Manifest) -> None:
        """See that every file is there with its size: another run, or somebody's hand, may have removed one.

        Of thousands of files, only the first are looked at: each was confirmed when it was written, and whoever has
        removed some of them has hardly spared those.
        """
        entries = storage.list(self.name)
        listed = list(islice(entries, _MOST_LISTED))
        in_order = all(one.key < other.key for one, other in pairwise(listed))
        listed += [] if in_order else entries
        sizes = {entry.key.removeprefix(f"{self.name}/"): entry.size for entry in listed}
        last = max(sizes) if in_order and len(listed) == _MOST_LISTED else None
        there = (file for file in manifest.files if last is None or file.path <= last)
        wrong = [file.path for file in there if sizes.get(file.path) != file.size]
        if wrong:
            raise StorageError(
                f"ckpt did not commit {storage.url}/{self.name}: {len(wrong)} of its files have disappeared or changed "
                f"size since ckpt wrote them ({', '.join(wrong[:5])}). Does another run use this root?"
            )

    def _put_manifest(self, storage: Storage, manifest: Manifest, data: bytes) -> str | None:
        """Write the manifest over the expected version. If that fails, read it back: the answer alone may be lost."""
        key = f"{self.name}/{FILE_NAME}"
        try:
            return storage.write(key, [data], over=self.expected_version)
        except NotDurableError:
            # The kernel reports a failed fsync once: a second fsync alone would succeed, and prove nothing.
            version = storage.version(key)
            over = version if self._took_effect(storage, manifest) else self.expected_version
            return storage.write(key, [data], over=over)
        except StorageError as error:
            if not self._took_effect(storage, manifest):
                raise
            _log.warning("the storage reported an error, but %s/%s was written: %s", storage.url, key, error)
            return None

    def _took_effect(self, storage: Storage, manifest: Manifest) -> bool:
        with suppress(StorageError):  # it cannot be read right now either: the first error stands
            return _is_there(storage, manifest)
        return False

    @cached_property
    def _occupied(self) -> frozenset[str]:
        return frozenset(self.occupied_paths)

    def path_for(self, path: str) -> str:
        """Where a file is written: under its own path, or with the attempt's id in it if that path is occupied."""
        if path not in self._occupied:
            return path
        stem, _, suffix = path.rpartition(".")
        return f"{stem}.{self.id[:8]}.{suffix}"

    def _link(
        self, storage: Storage, plan: FilePlan, earlier: EarlierFile | None, advance: Callable[[float], None]
    ) -> WrittenFile | None:
        """Link the file from an earlier checkpoint that has the same bytes; None if it has to be written.

        A storage that stages files needs no links: it does not send bytes that it has already.
        """
        if earlier is None or plan.size != earlier.file.size or isinstance(storage, Staging):
            return None
        stays = self._stays(storage, earlier)
        is_gathered = plan.contents is None and not plan.in_memory  # by all ranks, and only once
        likely = plan.likely_unchanged or (stays and not is_gathered)
        if not (likely if plan.hashes is None else plan.hashes.blocks == earlier.file.blocks):
            return None
        path = earlier.file.path if stays else self.path_for(plan.path)
        record = hashed(plan, path, _uncounted, sha256=self.sha256)
        if record.blocks != earlier.file.blocks:
            return None
        if not earlier.was_read and not self._is_intact(storage, earlier, record):
            return None
        if stays:
            advance(plan.size)
            return WrittenFile(record, linked=True)
        try:
            storage.link(f"{earlier.checkpoint}/{earlier.file.path}", f"{self.name}/{path}")
        except NotDurableError as error:  # the path exists now: the file cannot be written in its place
            raise StorageError(str(error)) from error
        except StorageError as error:  # the earlier file was removed by hand, for example: write this one
            _log.debug("ckpt could not link %s, so it writes the file: %s", path, error)
            return None
        advance(plan.size)
        return WrittenFile(record, linked=True)

    def _kept(self, storage: Storage, written: WrittenFile, earlier: EarlierFile | None) -> WrittenFile:
        """The file that was written, or the one that stays, if its bytes are the same: the commit removes the other."""
        if not self._stays(storage, earlier) or earlier is None or earlier.file.blocks != written.file.blocks:
            return written
        if not earlier.was_read:  # nobody knows whether its bytes on the disk are right
            return written
        return WrittenFile(replace(written.file, path=earlier.file.path), linked=True)

    def _stays(self, storage: Storage, earlier: EarlierFile | None) -> bool:
        """Whether a file stays where it is if it has not changed: it is one of the checkpoint that is amended."""
        is_own = earlier is not None and earlier.checkpoint == self.name
        return self.amends and is_own and not isinstance(storage, Staging)

    def _is_intact(self, storage: Storage, earlier: EarlierFile, expected: FileRecord) -> bool:
        """Whether an earlier file has the bytes that are to be saved. If not, they are written."""
        there = replace(expected, path=earlier.file.path)
        try:
            for _ in VerifiedFile.of(storage, earlier.checkpoint, there, sha256=self.sha256).pieces():
                pass
        except (DamagedError, StorageError) as error:
            _log.warning(
                "ckpt writes %s/%s again, because the earlier file is not intact: %s", self.name, expected.path, error
            )
            return False
        return True

    def _write_file(self, storage: Storage, plan: FilePlan, advance: Callable[[float], None]) -> WrittenFile:
        path = self.path_for(plan.path)
        write = self._write_from_memory if plan.in_memory else self._write_stream
        return write(storage, plan, path, advance)

    def _write_from_memory(
        self, storage: Storage, plan: FilePlan, path: str, advance: Callable[[float], None]
    ) -> WrittenFile:
        """Write pieces that do not change, and hash them in a second thread, if that is worth a thread.

        Both wait for bytes that are still on their way.
        """
        in_place = plan.reserved is not None  # nothing is written: to hash it takes the time
        written, hashes = (_uncounted, advance) if in_place else (advance, _uncounted)
        pieces = StablePieces(plan.size, lambda: counted(plan.pieces(), written), plan.reserved)
        if plan.size < _WORTH_A_THREAD:
            receipt = self._put(storage, path, pieces)
            record = hashed(plan, path, hashes, sha256=self.sha256)
        else:
            hashing = Worker("ckpt-hash").start(lambda: hashed(plan, path, hashes, sha256=self.sha256))
            try:
                receipt = self._put(storage, path, pieces)
            finally:
                record = hashing.wait()
        return WrittenFile(record, receipt)

    def _write_stream(
        self, storage: Storage, plan: FilePlan, path: str, advance: Callable[[float], None]
    ) -> WrittenFile:
        """Write pieces that exist one at a time, hashing each before it is written."""
        hasher = FileHasher(plan, sha256=self.sha256)
        source = plan.pieces()
        is_hashed = plan.hashes is not None and not self.sha256

        try:
            receipt = self._put(storage, path, counted(source if is_hashed else hasher.through(source), advance))
        finally:  # at once, also after a failure: other ranks may be waiting to send their pieces
            getattr(source, "close", lambda: None)()
        return WrittenFile(hashed(plan, path, _uncounted) if is_hashed else hasher.record(path), receipt)

    def _put(self, storage: Storage, path: str, pieces: Iterable[Buffer]) -> str | None:
        """Write or stage one file. Returns its receipt if it was staged."""
        key = f"{self.name}/{path}"
        if isinstance(storage, Staging):
            return storage.stage(key, pieces)
        storage.write(key, pieces, over=None)
        return None


def _is_there(storage: Storage, manifest: Manifest) -> bool:
    """Whether this very manifest is there, though writing it failed: the answer alone may be lost."""
    found = find(storage, manifest.name).manifest
    return found is not None and found.id == manifest.id


class UnsureCommits:
    """Commits that failed, and may have taken effect: the storage could not be asked. It is before the next save."""

    def __init__(self) -> None:
        self._manifests: dict[str, Manifest] = {}  # by name

    def __contains__(self, name: str) -> bool:
        return name in self._manifests

    def add(self, manifest: Manifest) -> None:
        self._manifests[manifest.name] = manifest

    def settle(self, storage: Storage) -> Iterator[Manifest]:
        """Those that took effect. Raises while the storage cannot be read."""
        for name, manifest in list(self._manifests.items()):
            if _is_there(storage, manifest):
                yield manifest
            del self._manifests[name]


@contextmanager
def _failing_unless_durable() -> Iterator[None]:
    """Fail the save if a file before the manifest may not be durable: a manifest must not list it."""
    try:
        yield
    except NotDurableError as error:
        raise StorageError(str(error)) from error
