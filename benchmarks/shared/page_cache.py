"""How much of a folder is in the page cache. Asking reads nothing, and changes nothing there."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from benchmarks.shared.measure import files_in

COMPLETE = 0.99  # of the bytes: the last page of a file may be missing
_CACHESTAT = 451  # the same on every architecture; since Linux 6.5
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def resident(folder: Path) -> float:
    """The share of the bytes of all files that the page cache has."""
    found = total = 0
    for path in files_in(folder):
        with suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:  # the marker of a save goes last
            size = os.fstat(file.fileno()).st_size
            found += min(size, mmap.PAGESIZE * _cached_pages(file.fileno(), size))
            total += size
    return found / total if total else 0.0


def wait_until_resident(folder: Path, seconds: float, give_up: Callable[[float], object] = time.sleep) -> bool:
    """Wait until the page cache has all of it, for at most so many seconds. `give_up` pauses, and ends it if true."""
    deadline = time.monotonic() + seconds
    while resident(folder) < COMPLETE:
        if time.monotonic() > deadline or give_up(0.2):
            return False
    return True


def _cached_pages(descriptor: int, size: int) -> int:
    span, answer = (ctypes.c_uint64 * 2)(0, size), (ctypes.c_uint64 * 5)()
    if _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(span), ctypes.byref(answer), 0) == 0:
        return int(answer[0])
    return _mapped_pages(descriptor, size) if size else 0


def _mapped_pages(descriptor: int, size: int) -> int:
    """By mincore(2), for kernels without cachestat(2)."""
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        if _libc.mincore(address, size, pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        _libc.munmap(address, size)
    return sum(pages.raw.translate(bytes(value & 1 for value in range(256))))
