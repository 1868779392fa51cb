"""Room for a file, reserved by the filesystem itself."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def reserve(descriptor: int, start: int, size: int) -> bool:
    """Reserve so many bytes of a file from `start` on. False where the filesystem does not do that.

    By fallocate(2): where a filesystem lacks it (NFS 3), `os.posix_fallocate` writes to every block instead, and all
    bytes go over the network twice. Raises an `OSError` if there is no room.
    """
    fallocate = _fallocate()
    if fallocate is None:
        return False
    while fallocate(descriptor, 0, start, size) != 0:
        code = ctypes.get_errno()
        if code in _NO_ROOM:
            raise OSError(code, os.strerror(code))
        if code != errno.EINTR:
            return False  # whatever it is, writing will tell
    return True


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """The C library's function; None where it has none."""
    try:
        found = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    found.restype = ctypes.c_int
    call: Callable[[int, int, int, int], int] = found
    return call
