"""Large files are written past the page cache, where the filesystem lets us: durable in half the time.

Through the cache every byte is copied into fresh pages, and `fsync` waits for all of them at the end. Directly, the
disk works from the first block on, while the next one is being gathered.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress

from ckpt.storage.base import Buffer
from ckpt.storage.local.preallocate import reserve
from ckpt.util.aligned_memory import ALIGNMENT, O_DIRECT, address_of, allocate_aligned, copy_bytes
from ckpt.util.threads import SerialWorker

BLOCK = 8 << 20
_WRITERS = 8
_RESERVED = 256 << 20

_spare: list[memoryview] = []  # blocks of files that are done, for those to come: new memory takes its time


def write_durably(descriptor: int, pieces: Iterable[Buffer]) -> None:
    """Write the pieces to a new file, one after the other, and wait until they outlive a crash.

    A list of one large piece is written from where it lies. Of others a piece is done with when the next one is asked
    for, and a few blocks of memory are held.
    """
    file = _File(descriptor, sum(memoryview(one).nbytes for one in pieces) if isinstance(pieces, list) else None)
    try:
        if isinstance(pieces, list) and len(pieces) == 1 and _is_aligned(pieces[0]):
            view = memoryview(pieces[0]).cast("B")
            for start in range(0, len(view), BLOCK):
                file.write(view[start : start + BLOCK])
        else:
            for piece in pieces:
                file.add(memoryview(piece).cast("B"))
    finally:
        file.finish()
    os.fsync(descriptor)


def _is_aligned(piece: Buffer) -> bool:
    view = memoryview(piece)
    return not view.readonly and view.nbytes >= BLOCK and address_of(view) % ALIGNMENT == 0


class _File:
    """A file that several threads write, a block each, into space that is reserved beforehand."""

    def __init__(self, descriptor: int, expected: int | None) -> None:
        self._descriptor = descriptor
        self._expected = expected
        self._writers = [SerialWorker("ckpt-write") for _ in range(_WRITERS)]
        self._buffers: list[memoryview] = []
        self._number = 0  # of the block in hand
        self._filled = 0  # bytes of it
        self._size = 0
        self._reserved = 0
        self._can_reserve = True
        self._direct = _opened_directly(descriptor)

    def add(self, view: memoryview) -> None:
        """Take bytes over, to write them when a block is full."""
        while view:
            buffer = self._buffer()
            taken = min(len(view), BLOCK - self._filled)
            copy_bytes(view[:taken], buffer[self._filled : self._filled + taken])
            view, self._filled = view[taken:], self._filled + taken
            if self._filled == BLOCK:
                self._filled = 0
                self.write(buffer)

    def write(self, block: memoryview) -> None:
        """Write a block that stays as it is until this writer's turn comes again."""
        writer = self._writers[self._number % _WRITERS]
        writer.wait()
        self._reserve(len(block))
        start, self._size = self._size, self._size + len(block)
        self._number += 1
        if len(block) == BLOCK:
            writer.start(lambda: self._write_directly(block, start))
        else:
            self._wait()
            self._write_through_cache(block, start)

    def finish(self) -> None:
        """Write what is left, and wait: nothing may be on its way to a file that is closed."""
        try:
            if self._filled:
                self.write(self._buffers[self._number % _WRITERS][: self._filled])
        finally:
            try:
                self._wait()
            finally:
                self._close()

    def _close(self) -> None:
        _spare.extend(self._buffers)
        del _spare[_WRITERS:]
        if self._direct is not None:
            os.close(self._direct)
        if self._reserved > self._size:
            os.ftruncate(self._descriptor, self._size)

    def _buffer(self) -> memoryview:
        """The block in hand. What it held before has been written."""
        if len(self._buffers) <= self._number % _WRITERS:
            self._buffers.append(_block())
        if not self._filled:
            self._writers[self._number % _WRITERS].wait()
        return self._buffers[self._number % _WRITERS]

    def _reserve(self, more: int) -> None:
        if not self._can_reserve or self._size + more <= self._reserved or more < BLOCK:
            return
        step = _RESERVED if self._expected is None else min(_RESERVED, self._expected - self._size)
        try:
            self._can_reserve = reserve(self._descriptor, self._size, step)
        except OSError:
            if self._expected is not None:  # all of these bytes are to come
                raise
            self._can_reserve = False  # perhaps there is room for those that are: writing will tell
        if self._can_reserve:
            self._reserved = self._size + step

    def _wait(self) -> None:
        """Until all writers are done. The first error is raised when they are, also that waiting was interrupted."""
        errors = []
        for writer in self._writers:
            while True:
                try:
                    writer.wait()
                except BaseException as error:
                    errors.append(error)
                if not writer.busy:
                    break
        if errors:
            raise errors[0]

    def _write_directly(self, block: memoryview, start: int) -> None:
        """Write a block; through the cache where direct writing is refused."""
        written = 0
        if self._direct is not None:
            try:
                written = os.pwrite(self._direct, block, start)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        if written < len(block):
            self._write_through_cache(block[written:], start + written)

    def _write_through_cache(self, view: memoryview, start: int) -> None:
        while view:
            written = os.pwrite(self._descriptor, view, start)
            view, start = view[written:], start + written


def _block() -> memoryview:
    with suppress(IndexError):
        return _spare.pop()
    return allocate_aligned(BLOCK)


def _opened_directly(descriptor: int) -> int | None:
    """The same file once more, for writing past the cache; none where that is refused."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_CLOEXEC | O_DIRECT) if O_DIRECT else None
    except OSError:
        return None
