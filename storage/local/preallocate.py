"""Disk space: reservation with fallocate(2), and what to do where there is none."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def reserve(descriptor: int, start: int, size: int) -> bool:
    """Reserve `size` bytes of a file from `start` on. False where the filesystem does not support that.

    Not by `os.posix_fallocate`: where a filesystem has no fallocate(2), as NFS 3, that writes to every block, and all
    bytes go over the network twice. Raises an `OSError` if there is not enough space.
    """
    fallocate = _fallocate()
    if fallocate is None:
        return False
    while fallocate(descriptor, 0, start, size) != 0:
        code = ctypes.get_errno()
        if code in _NO_ROOM:
            raise OSError(code, os.strerror(code))
        if code != errno.EINTR:
            return False  # whatever it is, the write will show it
    return True


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """fallocate of the C library; None where it has none."""
    try:
        found = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    found.restype = ctypes.c_int
    call: Callable[[int, int, int, int], int] = found
    return call


def advice_on_room(folder: Path) -> str:
    """How much space is left on the disk of a folder, and what to do about it: the end of an error message."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return "Free some space, then save again."
    free = status.f_bavail * status.f_frsize
    return f"{free / 1e9:.2f} GB are free there. Free some space (or lower Keep(last=...)), then save again."
