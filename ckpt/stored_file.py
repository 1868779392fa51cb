"""One object of a storage, for a format that knows no storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt.errors import DamagedError
from ckpt.formats.blocks import BlockHasher
from ckpt.formats.manifest import FileRecord
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

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`, out of blocks that match their hashes."""
        blocks = range(start // self.record.block_size, -(-min(stop, self.record.size) // self.record.block_size))
        for index in sorted(set(blocks) - self._intact):
            wrong = self.look(index, memoryview(bytearray(WINDOW)))
            if wrong:
                raise DamagedError(f"{self.stored.key.partition('/')[0]} is damaged: {wrong}.")
            self._intact.add(index)
        return self.stored.read(start, stop)

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
        start, stop = self.span(index)
        while start < stop:
            piece = buffer[: stop - start]
            self.stored.read_into(start, piece, again=True)
            hasher.update(piece)
            advance(len(piece))
            start += len(piece)
        return self.compared(index, hasher)

    def compared(self, index: int, hasher: BlockHasher) -> str | None:
        """What is wrong with a block, if its hash is not that of what was read."""
        start, stop = self.span(index)
        same = hasher.digests == (self.record.blocks[index],)
        return None if same else f"{self.record.path} was altered (bytes {start} to {stop})"
