"""Writes a file of a tmpfs, or a memfd, through a mapping, in several threads: `pwrite` lets one at a time write.

The pages of a range are asked for before it is written to. Where there is no memory for them the kernel says so, and
`pwrite` then raises the error; to write to a mapping without them would end the process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ckpt.storage.base import Buffer, StablePieces
from ckpt.util.aligned_memory import copy_bytes, forget_pages, make_resident
from ckpt.util.threads import CORES, WorkerThread

_CHUNK = 16 << 20
_WRITERS = min(4, CORES)


def overwrite(descriptor: int, pieces: Iterable[Buffer]) -> None:
    """Write pieces over what a file has, and cut it to their size. It must be open for reading, too."""
    stable = StablePieces.of(pieces)
    is_large = stable is not None and stable.size >= _CHUNK
    size = _write_in_threads(descriptor, stable) if stable is not None and is_large else _write(descriptor, pieces)
    os.ftruncate(descriptor, size)


def _write(descriptor: int, pieces: Iterable[Buffer]) -> int:
    """Write pieces in turn. Returns how many bytes they are."""
    start = 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        _write_at(descriptor, view, start)
        start += len(view)
    return start


def _write_in_threads(descriptor: int, pieces: StablePieces) -> int:
    """Write pieces that do not change while the next ones are asked for."""
    os.ftruncate(descriptor, pieces.size)
    with mmap.mmap(descriptor, pieces.size) as file, memoryview(file) as mapped, _open_writers() as writers:
        start = turn = 0
        for piece in pieces:
            for offset in range(0, len(piece), _CHUNK):
                chunk = piece[offset : offset + _CHUNK]
                _start(writers[turn % len(writers)], descriptor, mapped, chunk, start + offset)
                turn += 1
            start += len(piece)
    return start


@contextmanager
def _open_writers() -> Iterator[list[WorkerThread]]:
    """Threads, which are waited for also after an error: none may write to a mapping that is closed."""
    writers = [WorkerThread("ckpt-memory") for _ in range(_WRITERS)]
    try:
        yield writers
        for writer in writers:
            writer.wait()
    finally:
        for writer in writers:
            writer.close()


def _start(writer: WorkerThread, descriptor: int, mapped: memoryview, chunk: memoryview, start: int) -> None:
    writer.start(lambda: _copy(descriptor, mapped, chunk, start))


def _copy(descriptor: int, mapped: memoryview, chunk: memoryview, start: int) -> None:
    stop = start + len(chunk)
    with mapped[start - start % mmap.PAGESIZE : stop] as pages:
        if make_resident(pages):
            copy_bytes(chunk, mapped[start:stop])
            forget_pages(pages)
        else:
            _write_at(descriptor, chunk, start)


def _write_at(descriptor: int, view: memoryview, start: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written
