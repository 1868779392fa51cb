"""Large files are written past the page cache, where the filesystem lets us: durable in half the time.

Through the cache every byte is copied into fresh pages, and `fsync` waits for all of them at the end. Directly, the
disk works from the first block on, while the next one is being gathered.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckpt.storage.base import Buffer

BLOCK = 8 << 20
_DIRECT: int = getattr(os, "O_DIRECT", 0)


def write_durably(descriptor: int, pieces: Iterable[Buffer]) -> None:
    """Write the pieces to a new file, one after the other, and wait until they outlive a crash.

    Holds two blocks of memory. A piece is done with when the next one is asked for.
    """
    behind = _Behind()
    try:
        for block in _blocks(pieces):
            behind.wait()
            if len(block) < BLOCK:
                _write_through_cache(descriptor, block)
            else:
                behind.start(_write_directly, descriptor, block)
    finally:
        behind.wait()  # nothing may be on its way to a file that is closed
    os.fsync(descriptor)


class _Behind:
    """One call at a time that goes on in the background.

    Not an executor: those refuse work while the interpreter shuts down, and a last save may just be under way then.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, function: Callable[..., None], *arguments: Any) -> None:
        self._thread = threading.Thread(target=self._run, args=(function, *arguments), name="ckpt-write")
        self._thread.start()

    def wait(self) -> None:
        """Until the call is done. What it raised is raised here, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # for whoever waits
            self._error = error


def _blocks(pieces: Iterable[Buffer]) -> Iterator[memoryview]:
    """The same bytes in aligned blocks of one length; the last is shorter. A block is filled again two blocks later."""
    buffers: list[memoryview] = []
    filled, number = 0, 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while view:
            if not filled and len(buffers) < 2:
                buffers.append(memoryview(mmap.mmap(-1, BLOCK)))  # pages of its own, so it is aligned
            taken = min(len(view), BLOCK - filled)
            buffers[number % 2][filled : filled + taken] = view[:taken]
            view, filled = view[taken:], filled + taken
            if filled == BLOCK:
                yield buffers[number % 2]
                filled, number = 0, number + 1
    if filled:
        yield buffers[number % 2][:filled]


def _write_directly(descriptor: int, block: memoryview) -> None:
    """Write a block; through the cache where direct writing is refused."""
    try:
        _set_direct(descriptor, _DIRECT)
        written = os.write(descriptor, block)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        written = 0
    if written < BLOCK:
        _write_through_cache(descriptor, block[written:])


def _write_through_cache(descriptor: int, view: memoryview) -> None:
    _set_direct(descriptor, 0)
    while view:
        view = view[os.write(descriptor, view) :]


def _set_direct(descriptor: int, wanted: int) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if flags & _DIRECT != wanted:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT | wanted)
