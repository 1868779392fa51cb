"""Splitting of an object's pieces into the parts of a multipart upload, and a part as the body of a request."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from ckpt.storage.base import Buffer, StablePieces

PART_SIZE = 16 << 20  # bytes
_MOST_PARTS = 10_000  # of one object, by the rules of S3
_GROWS_AFTER = 1_000  # parts of a stream of unknown length, so that it ends before `_MOST_PARTS`
_SWALLOWED = 1 << 20  # bytes: so much is sent into the buffers of a network on which nobody listens
_CHUNK = 256 << 10  # bytes that are handed to the socket at once; parts for GCS must be multiples of it


def split_into_parts(pieces: Iterable[Buffer], size: int = PART_SIZE) -> Iterator[list[memoryview]]:
    """The pieces as parts of at least `size` bytes, except the last. Stable pieces are not copied."""
    stable = StablePieces.of(pieces)
    if stable is not None:
        least = -(-stable.size // _MOST_PARTS)
        return _slice_views(stable, max(size, -(-least // _CHUNK) * _CHUNK))
    return _gather_copies(pieces, size)


def _slice_views(views: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    part: list[memoryview] = []
    room = size
    for view in views:
        while view:
            part.append(view[:room])
            view, room = view[len(part[-1]) :], room - len(part[-1])
            if not room:
                yield part
                part, room = [], size
    if part:
        yield part


def _gather_copies(pieces: Iterable[Buffer], size: int) -> Iterator[list[memoryview]]:
    """Copies: a piece of a stream is valid only until the next one is asked for."""
    number, part, filled = 0, bytearray(), 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while view:
            if not part:
                part = bytearray(size * (1 + number // _GROWS_AFTER))
            taken = min(len(view), len(part) - filled)
            part[filled : filled + taken] = view[:taken]
            view, filled = view[taken:], filled + taken
            if filled == len(part):
                yield [memoryview(part)]
                number, part, filled = number + 1, bytearray(), 0
    if filled:
        yield [memoryview(part)[:filled]]


def scatter(chunk: bytes, views: list[memoryview]) -> list[memoryview]:
    """Copy bytes to the beginning of the views. Returns the rest of the views."""
    data = memoryview(chunk)
    while data:
        count = min(len(data), len(views[0]))
        views[0][:count] = data[:count]
        data = data[count:]
        views = views[1:] if count == len(views[0]) else [views[0][count:], *views[1:]]
    return views


class Body:
    """Views as the body of a request, sent in small chunks without a copy, and again if the request is.

    A file for clients that block, and for botocore, which signs it; an asynchronous iterator for aiohttp, which sends
    it. `on_more` is called when more has been sent than by any try before: what is sent again is no progress, and the
    first bytes are none either.
    """

    def __init__(self, views: list[memoryview], on_more: Callable[[], None] = lambda: None) -> None:
        self.views = views
        self.sent = 0  # bytes of all tries: a stalled one is known by it
        self._on_more = on_more
        self._size = sum(map(len, views))
        self._at = 0
        self._most = _SWALLOWED

    def __len__(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = begin + offset
        return self._at

    def read(self, size: int | None = None) -> bytes:
        stop = self._size if size is None or size < 0 else min(self._size, self._at + size)
        found = b"".join(self._between(self._at, stop))
        self._at += len(found)
        self.sent += len(found)  # no progress: botocore reads it to sign it
        return found

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        at = self._at
        for start in range(at, self._size, _CHUNK):
            for view in self._between(start, min(self._size, start + _CHUNK)):
                yield view
                at, self.sent = at + len(view), self.sent + len(view)
                if at > self._most:
                    self._most = at
                    self._on_more()

    def _between(self, start: int, stop: int) -> Iterator[memoryview]:
        for view in self.views:
            if start < len(view):
                yield view[max(0, start) : stop]
            start, stop = start - len(view), stop - len(view)
            if stop <= 0:
                return
