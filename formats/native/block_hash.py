"""Block hashes: a ranged read can verify what it read, and blocks can be hashed in parallel.

xxh3-128 finds damage, and is as fast as memory. SHA-256 also withstands an attacker, where a signature covers it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import xxhash

ALGORITHM = "xxh3-128"
BLOCK_SIZE = 32 << 20


class Hash(Protocol):
    """A hash of a stream, as hashlib's and xxhash's are."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def digest(data: bytes | bytearray | memoryview) -> str:
    """The hash of a block, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def xxh3_128() -> Hash:
    """The hash of a block that is still to come."""
    return xxhash.xxh3_128()


def sha256(data: bytes | bytearray | memoryview) -> str:
    """The SHA-256 of a block, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digests_of_every(
    pieces: Iterable[memoryview], first: int, step: int, new: Callable[[], Hash], block_size: int = BLOCK_SIZE
) -> dict[int, str]:
    """The digests of the blocks `first`, `first + step` and so on: so that threads share a file.

    `new`: makes the hash of a block, `xxh3_128` or `hashlib.sha256`.
    """
    found: dict[int, str] = {}
    open_hash, at = new(), 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while view:
            room, index = block_size - at % block_size, at // block_size
            part, view = view[:room], view[room:]
            at += len(part)
            if index % step == first:
                open_hash.update(part)
                found[index] = ""
                if len(part) == room:
                    found[index], open_hash = open_hash.hexdigest(), new()
    return {index: block or open_hash.hexdigest() for index, block in found.items()}


class BlockHasher:
    """Hashes a stream: a digest for every `BLOCK_SIZE` bytes, and one for the remainder; SHA-256 too, if asked for."""

    def __init__(self, block_size: int = BLOCK_SIZE, *, sha256: bool = False) -> None:
        self.size = 0
        self._block_size = block_size
        self._done: list[str] = []
        self._open = xxhash.xxh3_128()
        self._sha256 = hashlib.sha256() if sha256 else None
        self._sha256_done: list[str] = []
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
            self._add(view)
            return
        while view:
            part, view = view[: self._room], view[self._room :]
            self._add(part)
            if not self._room:
                self._close_block()

    def _add(self, part: memoryview) -> None:
        self._open.update(part)
        if self._sha256 is not None:
            self._sha256.update(part)
        self._room -= len(part)

    @property
    def digests(self) -> tuple[str, ...]:
        partial = self._room < self._block_size
        return (*self._done, self._open.hexdigest()) if partial else tuple(self._done)

    @property
    def sha256_digests(self) -> tuple[str, ...]:
        """The same in SHA-256; none if it was not asked for."""
        partial = self._sha256 is not None and self._room < self._block_size
        last = (self._sha256.hexdigest(),) if partial and self._sha256 is not None else ()
        return (*self._sha256_done, *last)

    def _close_block(self) -> None:
        self._done.append(self._open.hexdigest())
        self._open = xxhash.xxh3_128()
        if self._sha256 is not None:
            self._sha256_done.append(self._sha256.hexdigest())
            self._sha256 = hashlib.sha256()
        self._room = self._block_size
