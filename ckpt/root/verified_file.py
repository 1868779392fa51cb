"""One object of a storage, for a format that knows no storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckpt.errors import AbsentError, DamagedError, TruncatedError
from ckpt.formats.native.block_hash import BlockHasher, digest
from ckpt.formats.native.manifest import FileRecord
from ckpt.storage import Storage

WINDOW = 8 << 20  # bytes: they stay in the processor's cache until they are hashed


@dataclass(frozen=True)
class StoredFile:
    """The bytes under a key."""

    storage: Storage
    key: str

    def read(self, start: int, stop: int) -> bytes:
        return self.storage.read(self.key, start, stop)

    def read_into(self, start: int, *buffers: memoryview, again: bool = False) -> None:
        self.storage.read_into(self.key, start, *buffers, again=again)


@dataclass(frozen=True)
class VerifiedFile:
    """A file of a checkpoint. What is read from it alone is verified; `reading` does so for all that it reads."""

    stored: StoredFile
    record: FileRecord
    _intact: set[int] = field(default_factory=set)  # blocks that have been looked at
    _heads: list[bytes] = field(default_factory=list)  # the file's head, once it has been read

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`, out of the file's head, or of blocks, that match their hashes."""
        if self.record.head is not None and stop <= self.record.head[0]:
            return self._head()[start:stop]
        blocks = range(start // self.record.block_size, -(-min(stop, self.record.size) // self.record.block_size))
        for index in sorted(set(blocks) - self._intact):
            wrong = self.look(index, memoryview(bytearray(WINDOW)))
            if wrong:
                self._refuse(wrong)
            self._intact.add(index)
        return self.stored.read(start, stop)

    def _head(self) -> bytes:
        assert self.record.head is not None
        if not self._heads:
            size, expected = self.record.head
            found = self.stored.read(0, size)
            if digest(found) != expected:
                self._refuse(f"{self.record.path} was altered (bytes 0 to {size})")
            self._heads.append(found)
        return self._heads[0]

    def _refuse(self, wrong: str) -> None:
        raise DamagedError(f"{self.stored.key.partition('/')[0]} is damaged: {wrong}.")

    def read_into(self, start: int, *buffers: memoryview) -> None:
        """As they are there, not verified."""
        self.stored.read_into(start, *buffers)

    def span(self, index: int) -> tuple[int, int]:
        """From where to where a block goes."""
        start = index * self.record.block_size
        return start, min(self.record.size, start + self.record.block_size)

    def look(self, index: int, buffer: memoryview, advance: Callable[[float], None] = lambda size: None) -> str | None:
        """What is wrong with a block, if anything is. It is read a buffer at a time."""
        hasher = BlockHasher(self.record.block_size)
        for piece in hasher.through(self._through(index, buffer, again=True)):
            advance(len(piece))
        return self.compared(index, hasher)

    def pieces(self) -> Iterator[memoryview]:
        """The file, a little at a time, each piece until the next is asked for. A block that was altered ends it."""
        buffer = memoryview(bytearray(min(WINDOW, self.record.size)))
        for index in range(len(self.record.blocks)):
            hasher = BlockHasher(self.record.block_size)
            yield from hasher.through(self._through(index, buffer))
            wrong = self.compared(index, hasher)
            if wrong:
                self._refuse(wrong)

    def _through(self, index: int, buffer: memoryview, *, again: bool = False) -> Iterator[memoryview]:
        start, stop = self.span(index)
        while start < stop:
            piece = buffer[: stop - start]
            try:
                self.stored.read_into(start, piece, again=again)
            except (AbsentError, TruncatedError) as error:
                self._refuse(f"{self.record.path} is missing or cut short: {str(error).rstrip('.')}")
            yield piece
            start += len(piece)

    def compared(self, index: int, hasher: BlockHasher) -> str | None:
        """What is wrong with a block, if its hash is not that of what was read."""
        start, stop = self.span(index)
        same = hasher.digests == (self.record.blocks[index],)
        return None if same else f"{self.record.path} was altered (bytes {start} to {stop})"
