"""A range of addresses, parts of which are files: what is written there is in the files, without another copy."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from functools import cache
from typing import Any

from ckpt.util.aligned_memory import HUGE_PAGE, address_of, forget_pages, make_huge, make_resident, system_library

_FIXED = 0x10  # MAP_FIXED of Linux, which Python does not name
_CHUNK = 16 << 20  # bytes that are taken out of the range at a time: training may need the memory map in between


class MappedRange:
    """Memory of a given size from a huge page on, which is private and empty where no file is mapped. Only on Linux.

    A forked child sees zeros: the files would stay allocated until the child ends. The addresses stay its own, as
    Python unmaps them when the child drops this.
    """

    def __init__(self, size: int) -> None:
        self.size = in_pages(max(1, size))
        reserved = memoryview(mmap.mmap(-1, self.size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        start = -address_of(reserved) % HUGE_PAGE
        self.memory = reserved[start : start + self.size]
        self._address = address_of(self.memory)
        self._mapped: list[tuple[int, int]] = []  # start and size

    def map_file(self, descriptor: int, start: int, size: int) -> None:
        """Make the file the memory from `start` on, which must be a page. It may be closed afterwards.

        The file must have that size, and keep it: beyond its end there is nothing to write to.
        """
        self._map(start, size, mmap.MAP_SHARED, descriptor)
        self._mapped.append((start, size))
        _with_files.add(self)
        _count_mapped()

    def make_resident(self, start: int, size: int) -> bool:
        """Give this part its pages before it is written to; False where there is no memory for them."""
        first = start - start % mmap.PAGESIZE
        return make_resident(self.memory[first : start + size])

    def release(self) -> None:
        """Take the files out. Whoever still looks at the range sees zeros.

        Their memory is made huge pages on the way: whoever maps a file the next time has no cost of pages.
        """
        for start, size in self._mapped:
            is_huge = True
            for first in range(start, start + size, _CHUNK):
                part = self.memory[first : min(first + _CHUNK, start + size)]
                is_huge = is_huge and len(part) == _CHUNK and make_huge(part)
                forget_pages(part)
        self._unmap()

    def _unmap(self) -> None:
        for start, size in self._mapped:
            self._map(start, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._mapped = []

    def _map(self, start: int, size: int, flags: int, descriptor: int) -> None:
        if start % mmap.PAGESIZE or start < 0 or start + in_pages(size) > self.size:  # it would be another's memory
            raise ValueError(f"{size} bytes at {start} of {self.size} cannot be mapped")
        place = ctypes.c_void_p(self._address + start)
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        found = _mmap()(place, in_pages(size), writable, flags | _FIXED, descriptor, 0)
        if found != self._address + start:
            number = ctypes.get_errno()
            raise OSError(number, f"{size} bytes could not be mapped")


_with_files: weakref.WeakSet[MappedRange] = weakref.WeakSet()
_most_mapped = 0


def most_mapped() -> int:
    """The most bytes of files that were mapped here at a time."""
    return _most_mapped


def _count_mapped() -> None:
    global _most_mapped
    mapped = sum(size for found in list(_with_files) for _, size in found._mapped)
    _most_mapped = max(_most_mapped, mapped)


def _unmap_in_child() -> None:
    for mapped in list(_with_files):
        mapped._unmap()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unmap_in_child)


def is_possible() -> bool:
    """Whether this system has mappings at a given address with pages that can be asked for."""
    return sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8


def in_pages(size: int) -> int:
    """A number of bytes, rounded up to whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


@cache
def _mmap() -> Any:
    function = system_library().mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    return function
