"""Page-aligned memory for direct I/O and pinning, and copies between buffers that release the GIL."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
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
