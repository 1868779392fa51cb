"""One object of a storage, for a format that knows no storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt.errors import DamagedError
from ckpt.formats.blocks import BlockHasher, digest
from ckpt.formats.manifest import FileRecord
from ckpt.storage import Storage


@dataclass(frozen=True)
class StoredFile:
    """The bytes under a key."""

    storage: Storage
    key: str

    def read(self, start: int, stop: int) -> bytes:
        return self.storage.read(self.key, start, stop)

    def read_into(self, start: int, *buffers: memoryview) -> None:
        self.storage.read_into(self.key, start, *buffers)


@dataclass
class VerifiedFile:
    """A file of a checkpoint. What is read from it alone is verified; `reading` does so for all that it reads."""

    stored: StoredFile
    record: FileRecord
    _last: tuple[int, bytes] = (-1, b"")  # a header is asked for in two steps, and lies in one block

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`, out of blocks that match their hashes."""
        size, stop = self.record.block_size, min(stop, self.record.size)
        first, last = start // size, -(-stop // size)
        blocks = [self._block(index) for index in range(first, last)]
        joined = blocks[0] if len(blocks) == 1 else b"".join(blocks)
        return joined[start - first * size : max(start, stop) - first * size]

    def forget(self) -> None:
        """Let go of the block that was read last."""
        self._last = (-1, b"")

    def read_into(self, start: int, *buffers: memoryview) -> None:
        """As they are there, not verified."""
        self.stored.read_into(start, *buffers)

    def span(self, index: int) -> tuple[int, int]:
        """From where to where a block goes."""
        start = index * self.record.block_size
        return start, min(self.record.size, start + self.record.block_size)

    def look(self, index: int, buffer: memoryview, advance: Callable[[float], None]) -> str | None:
        """What is wrong with a block, if anything is. It is read a buffer at a time."""
        hasher = BlockHasher(self.record.block_size)
        start, stop = self.span(index)
        while start < stop:
            piece = buffer[: stop - start]
            self.read_into(start, piece)
            hasher.update(piece)
            advance(len(piece))
            start += len(piece)
        return self.compared(index, hasher)

    def compared(self, index: int, hasher: BlockHasher) -> str | None:
        """What is wrong with a block, if its hash is not that of what was read."""
        start, stop = self.span(index)
        same = hasher.digests == (self.record.blocks[index],)
        return None if same else f"{self.record.path} was altered (bytes {start} to {stop})"

    def _block(self, index: int) -> bytes:
        if self._last[0] == index:
            return self._last[1]
        found = self.stored.read(*self.span(index))
        if digest(found) != self.record.blocks[index]:
            raise DamagedError(f"{self.stored.key} was altered (bytes {{}} to {{}}).".format(*self.span(index)))
        self._last = (index, found)
        return found
