"""Reservation of disk space with fallocate(2)."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from typing import Any

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def reserve(descriptor: int, start: int, size: int) -> bool:
    """Reserve `size` bytes of a file from `start` on. False where the filesystem does not support that.

    Not by `os.posix_fallocate`: where a filesystem has no fallocate(2), as NFS 3, that writes to every block, and all
    bytes go over the network twice. Raises an `OSError` if there is not enough space.
    """
    fallocate = c_function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
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
def c_function(name: str, *arguments: type[Any]) -> Callable[..., int] | None:
    """A function of the C library that returns a number; None where it has none."""
    try:
        found = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = arguments, ctypes.c_int
    call: Callable[..., int] = found
    return call
