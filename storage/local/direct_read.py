"""Reads from a file into several buffers: from the page cache if the bytes are there, with direct I/O otherwise.

A checkpoint is read once, when a run begins. Through the page cache its bytes would be copied into new pages first,
which takes as long as the disk itself, and evicts pages that are in use.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from contextlib import suppress

from ckpt.storage.local.regular_file import open_regular
from ckpt.util.aligned_memory import ALIGNMENT, O_DIRECT, allocate_aligned, copy_bytes

_CACHESTAT = 451  # the same on every architecture; since Linux 6.5
_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM}
_WORTH_IT = 256 << 10  # bytes
_BOUNCE = 4 << 20
_BYTES_AT_ONCE = 1 << 30
_BUFFERS_AT_ONCE = 1024  # IOV_MAX, as every system has it

_own = threading.local()
_libc = ctypes.CDLL(None)


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("size", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def read_scattered(path: str, start: int, buffers: list[memoryview], *, cached: bool = False) -> int:
    """Fill the buffers in turn from `start`. Returns how many bytes are missing because the file ends earlier.

    With `cached`, all is read through the page cache.
    """
    left = [buffer for buffer in buffers if len(buffer)]
    descriptor = open_regular(path)
    try:
        size = sum(map(len, left))
        if size >= _WORTH_IT and not cached and not _is_cached(descriptor, start, size):
            start, left = _past_cache(path, start, left)
        while left:
            got = os.preadv(descriptor, _at_once(left), start)
            if not got:
                break
            start, left = start + got, _rest(left, got)
    finally:
        os.close(descriptor)
    return sum(map(len, left))


def evict(path: str) -> None:
    """Drop the clean pages of a file from the page cache, where the system can."""
    descriptor = open_regular(path)
    try:
        with suppress(AttributeError, OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _is_cached(descriptor: int, start: int, size: int) -> bool:
    """Whether most of these bytes are in the page cache. True where the kernel has no call to ask."""
    span, found = _Range(start, size), _Pages()
    known = _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(span), ctypes.byref(found), 0) == 0
    return not known or found.cached * mmap.PAGESIZE * 2 > size


def _past_cache(path: str, start: int, left: list[memoryview]) -> tuple[int, list[memoryview]]:
    """Read aligned blocks with direct I/O. Stops where that is refused, or the file ends."""
    try:
        descriptor = open_regular(path, os.O_RDONLY | O_DIRECT)
    except OSError:
        return start, left
    bounce = _bounce()
    try:
        while left:
            before = start % ALIGNMENT
            wanted = min(len(bounce), -(-(before + sum(map(len, left))) // ALIGNMENT) * ALIGNMENT)
            got = os.preadv(descriptor, [bounce[:wanted]], start - before) - before
            if got <= 0:
                break
            got = min(got, sum(map(len, left)))
            _scatter(bounce[before : before + got], left)
            start, left = start + got, _rest(left, got)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
    finally:
        os.close(descriptor)
    return start, left


def _bounce() -> memoryview:
    """An aligned bounce buffer, one per thread."""
    if not hasattr(_own, "bounce"):
        _own.bounce = allocate_aligned(_BOUNCE)
    bounce: memoryview = _own.bounce
    return bounce


def _scatter(source: memoryview, targets: list[memoryview]) -> None:
    """Copy a buffer to several in turn."""
    for target in targets:
        count = min(len(source), len(target))
        copy_bytes(source[:count], target[:count])
        source = source[count:]


def _at_once(buffers: list[memoryview]) -> list[memoryview]:
    """As many of the buffers as one system call fills."""
    room = _BYTES_AT_ONCE
    taken = []
    for buffer in buffers[:_BUFFERS_AT_ONCE]:
        if room:
            taken.append(buffer[:room])
            room -= len(taken[-1])
    return taken


def _rest(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The rest of the buffers once their first `count` bytes are filled."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
