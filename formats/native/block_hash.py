"""Block hashes: a ranged read can verify what it read, and blocks can be hashed in parallel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

ALGORITHM = "xxh3-128"
BLOCK_SIZE = 32 << 20


def digest(data: bytes | bytearray | memoryview) -> str:
    """The hash of a block, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


class BlockHasher:
    """Hashes a stream: a digest for every `BLOCK_SIZE` bytes, and one for the remainder."""

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        self.size = 0
        self._block_size = block_size
        self._done: list[str] = []
        self._open = xxhash.xxh3_128()
        self._room = block_size

    def through(self, pieces: Iterable[bytes | bytearray | memoryview]) -> Iterator[memoryview]:
        """Yield the pieces unchanged, having hashed each."""
        for piece in pieces:
            view = memoryview(piece)
            self.update(view)
            yield view

    def update(self, view: memoryview) -> None:
        view = view.cast("B")
        self.size += len(view)
        if len(view) < self._room:  # the common case
            self._open.update(view)
            self._room -= len(view)
            return
        while view:
            part, view = view[: self._room], view[self._room :]
            self._open.update(part)
            self._room -= len(part)
            if not self._room:
                self._close_block()

    @property
    def digests(self) -> tuple[str, ...]:
        partial = self._room < self._block_size
        return (*self._done, self._open.hexdigest()) if partial else tuple(self._done)

    def _close_block(self) -> None:
        self._done.append(self._open.hexdigest())
        self._open = xxhash.xxh3_128()
        self._room = self._block_size
