"""Byte readers for the files of a checkpoint: `StoredFile` as is, `VerifiedFile` against the hashes in the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from ckpt.errors import AbsentError, DamagedError, TruncatedError
from ckpt.formats.native.manifest import BlockHasher, FileRecord, digest, sha256
from ckpt.storage import Storage

WINDOW = 8 << 20  # bytes: small enough to be hashed while they are in the processor's cache


@dataclass(frozen=True)
class StoredFile:
    """One object of a storage, for formats, which know no storage. Nothing is verified."""

    storage: Storage
    key: str

    def read(self, start: int, stop: int) -> bytes:
        return self.storage.read(self.key, start, stop)

    def read_into(self, start: int, *buffers: memoryview, again: bool = False) -> None:
        self.storage.read_into(self.key, start, *buffers, again=again)


@dataclass(frozen=True)
class VerifiedFile:
    """A file of a checkpoint with its record in the manifest. `read` and `pieces` verify; `read_into` does not.

    `sha256`: whether its SHA-256 is compared too. Then nothing that was verified is read again: it may be altered in
    between.
    """

    stored: StoredFile
    record: FileRecord
    sha256: bool = False
    _intact: set[int] = field(default_factory=set)  # blocks that were verified
    _heads: list[bytes] = field(default_factory=list)  # the file's head, once it was read and verified

    @classmethod
    def of(cls, storage: Storage, checkpoint: str, record: FileRecord, *, sha256: bool = False) -> VerifiedFile:
        """The file that a record in a checkpoint's manifest describes."""
        return cls(StoredFile(storage, f"{checkpoint}/{record.path}"), record, sha256)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`, after the head or the blocks that hold them were verified."""
        head = self.record.head if self.record.head_sha256 or not self.sha256 else None
        if head is not None and stop <= head[0]:
            return self._head()[start:stop]
        blocks = range(start // self.record.block_size, -(-min(stop, self.record.size) // self.record.block_size))
        if self.sha256:
            return self._read_once(blocks, start, stop)
        for index in sorted(set(blocks) - self._intact):
            problem = self.verify_block(index, memoryview(bytearray(WINDOW)))
            if problem:
                self._refuse(problem)
            self._intact.add(index)
        return self.stored.read(start, stop)

    def read_all(self) -> bytes:
        return self.read(0, self.record.size)

    def read_into(self, start: int, *buffers: memoryview) -> None:
        """Fill the buffers with the bytes from `start`, without verifying them."""
        self.stored.read_into(start, *buffers)

    def pieces(self) -> Iterator[memoryview]:
        """The whole file, verified, each piece valid until the next is requested.

        A block's hash is known only after its last piece was yielded: an altered block raises before the next one, so
        whatever consumes the pieces must publish nothing before the iterator has ended.
        """
        buffer = memoryview(bytearray(min(WINDOW, self.record.size)))
        for index in range(len(self.record.blocks)):
            hasher = self.hasher()
            yield from hasher.through(self._block_pieces(index, buffer))
            problem = self.hash_problem(index, hasher)
            if problem:
                self._refuse(problem)

    def span(self, index: int) -> tuple[int, int]:
        """The offsets at which a block begins and ends."""
        start = index * self.record.block_size
        return start, min(self.record.size, start + self.record.block_size)

    def verify_block(
        self, index: int, buffer: memoryview, advance: Callable[[float], None] = lambda size: None
    ) -> str | None:
        """Read a block through `buffer`. Returns what is wrong with it; None if it matches its hash."""
        hasher = self.hasher()
        for piece in hasher.through(self._block_pieces(index, buffer, again=True)):
            advance(len(piece))
        return self.hash_problem(index, hasher)

    def hasher(self) -> BlockHasher:
        """What the bytes of a block go through."""
        return BlockHasher(self.record.block_size, sha256=self.sha256)

    def hash_problem(self, index: int, hasher: BlockHasher) -> str | None:
        """What is wrong with a block whose bytes went through `hasher`; None if they match the manifest's hash."""
        start, stop = self.span(index)
        same = hasher.digests == (self.record.blocks[index],)
        same = same and (not self.sha256 or hasher.sha256_digests == (self.record.sha256[index],))
        return None if same else f"{self.record.path} was altered (bytes {start} to {stop})"

    def _head(self) -> bytes:
        assert self.record.head is not None
        if not self._heads:
            size, expected = self.record.head
            found = self.stored.read(0, size)
            if digest(found) != expected:
                self._refuse(f"{self.record.path} was altered (bytes 0 to {size})")
            if self.sha256 and sha256(found) != self.record.head_sha256:
                self._refuse(f"{self.record.path} was altered (bytes 0 to {size}): its SHA-256 is another")
            self._heads.append(found)
        return self._heads[0]

    def _read_once(self, blocks: range, start: int, stop: int) -> bytes:
        """Read whole blocks, verify them, and return of the same bytes those that are asked for."""
        first, last = blocks.start * self.record.block_size, min(blocks.stop * self.record.block_size, self.record.size)
        found = memoryview(bytearray(last - first))
        self.stored.read_into(first, found)
        for index in blocks:
            begin, end = self.span(index)
            hasher = self.hasher()
            hasher.update(found[begin - first : end - first])
            if problem := self.hash_problem(index, hasher):
                self._refuse(problem)
        return bytes(found[start - first : stop - first])

    def _block_pieces(self, index: int, buffer: memoryview, *, again: bool = False) -> Iterator[memoryview]:
        start, stop = self.span(index)
        while start < stop:
            piece = buffer[: stop - start]
            try:
                self.stored.read_into(start, piece, again=again)
            except (AbsentError, TruncatedError) as error:
                self._refuse(f"{self.record.path} is missing or cut short: {str(error).rstrip('.')}")
            yield piece
            start += len(piece)

    def _refuse(self, problem: str) -> NoReturn:
        raise DamagedError(f"{self.stored.key.partition('/')[0]} is damaged: {problem}.")
