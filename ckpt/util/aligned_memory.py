"""Page-aligned memory for direct I/O and pinning, ranges of addresses that are files, and copies without the GIL."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from contextlib import suppress
from functools import cache
from typing import Any

O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # 0 where the system does not have it
ALIGNMENT = 4096
HUGE_PAGE = 2 << 20  # bytes
_WIPE_ON_FORK = 18 if sys.platform == "linux" else None  # MADV_WIPEONFORK, which Python does not name
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14, likewise
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1, likewise


def allocate_pages(size: int) -> mmap.mmap:
    """Allocate private memory, in huge pages where the system has them: they are faulted in twenty times faster.

    A forked child sees zeros. If it shared the pages copy-on-write, the first write in the parent would move the
    parent's data to new pages, while the disk or a device still works on the old ones.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _WIPE_ON_FORK):
        with suppress(OSError):
            if advice is not None:
                memory.madvise(advice)
    return memory


def allocate_aligned(size: int) -> memoryview:
    """Allocate memory that starts at a huge page, from which direct writes are a fifth faster."""
    whole = memoryview(allocate_pages(size + HUGE_PAGE))
    start = -address_of(whole) % HUGE_PAGE
    return whole[start : start + size]


def address_of(view: memoryview) -> int:
    """The address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def make_resident(view: memoryview) -> bool:
    """Give memory its pages, to be written to, without the GIL; False where there are none, or the system cannot.

    It must start at a page. What is full is found out here: a write to a mapping without pages would be a SIGBUS.
    """
    return _advise(view, _POPULATE_WRITE)


def forget_pages(view: memoryview) -> None:
    """Take the pages of a file out of a mapping, without the GIL. The file keeps them, and its bytes.

    To close a mapping takes out all of them at once, in 0.02 s for each gigabyte: threads that write do it on the way.
    """
    _advise(view, mmap.MADV_DONTNEED)


def make_huge(view: memoryview) -> bool:
    """Move the pages of a file in memory into huge ones, without the GIL; False where the system cannot.

    It must start at a huge page. Where that is done already it takes no time, and so do `make_resident` and
    `forget_pages` from then on.
    """
    return _advise(view, _COLLAPSE)


def _advise(view: memoryview, advice: int) -> bool:
    """Whether the system has followed it. The function of `mmap` keeps the GIL."""
    if sys.platform != "linux" or not view:
        return False
    place, size = ctypes.c_void_p(address_of(view)), ctypes.c_size_t(len(view))
    return bool(system_library().madvise(place, size, advice) == 0)


@cache
def system_library() -> Any:
    """The C library. Once: every `CDLL` is a cycle of objects that only the garbage collector frees."""
    return ctypes.CDLL(None, use_errno=True)


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy to a target of the same length without the GIL; ctypes gives no address of a read-only source: with it."""
    if source.readonly:
        target[:] = source
    elif source:
        ctypes.memmove(address_of(target), address_of(source), len(source))


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
        self._has_huge = True  # as far as is known

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
        first, stop = start - start % mmap.PAGESIZE, start + size
        self._make_huge(-(-first // HUGE_PAGE) * HUGE_PAGE, stop // HUGE_PAGE * HUGE_PAGE)
        return make_resident(self.memory[first:stop])

    def _make_huge(self, start: int, stop: int) -> None:
        """Huge pages come five times faster than small ones, also in a tmpfs that gives none by itself: of a range
        that has one page, the system makes a huge one."""
        for place in range(start, stop, HUGE_PAGE) if self._has_huge else ():
            if not make_resident(self.memory[place : place + mmap.PAGESIZE]):
                return
        if self._has_huge and start < stop:
            self._has_huge = make_huge(self.memory[start:stop])

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
            raise ValueError(f"ckpt can't map {size} bytes at offset {start} of {self.size} bytes of memory")
        place = ctypes.c_void_p(self._address + start)
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        found = _mmap()(place, in_pages(size), writable, flags | _FIXED, descriptor, 0)
        if found != self._address + start:
            number = ctypes.get_errno()
            raise OSError(number, f"ckpt could not map {size} bytes of memory")


_with_files: weakref.WeakSet[MappedRange] = weakref.WeakSet()
_most_mapped = 0


def most_mapped() -> int:
    """The most bytes of files that were mapped here at a time."""
    return _most_mapped


def now_mapped() -> int:
    """The bytes of files that are mapped here now."""
    return sum(size for found in list(_with_files) for _, size in found._mapped)


def _count_mapped() -> None:
    global _most_mapped
    _most_mapped = max(_most_mapped, now_mapped())


def _unmap_in_child() -> None:
    for mapped in list(_with_files):
        mapped._unmap()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unmap_in_child)


def can_map_files() -> bool:
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
