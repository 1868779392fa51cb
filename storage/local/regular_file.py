"""Opens files in folders that others can write to: regular files alone, and without waiting for anybody.

A named pipe, a device or a socket in place of a file would block whoever opens or reads it.
"""

from __future__ import annotations

import errno
import os
import stat

_NO_DRIVER = {errno.ENXIO, errno.ENODEV}  # a socket, or a device: it cannot be opened like a file
_LARGE = 128 << 20  # bytes
_MOST_EXTENTS = 10_000
_SPARSEST = 8  # bytes that a file may claim for each that it has

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a symbolic link"),
)


class NotRegularError(OSError):
    """What is under that name is neither a file nor a folder."""


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """A descriptor of a regular file. With `O_NOFOLLOW` among the flags, a symbolic link is none."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in _NO_DRIVER or (error.errno == errno.ELOOP and os.path.islink(path)):
            raise not_regular(path) from None
        raise
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(status.st_mode):
            raise not_regular(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def not_regular(path: str | os.PathLike[str]) -> NotRegularError:
    """The error about something that is no file, which says what it is."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        mode = 0
    kind = next((name for matches, name in _KINDS if matches(mode)), "no regular file")
    return NotRegularError(errno.EINVAL, f"it is {kind} in place of a file", os.fspath(path))


def has_one_name(descriptor: int) -> bool:
    """Whether an open file has no other name: what is written to it is written to nobody else's file."""
    return os.fstat(descriptor).st_nlink <= 1


def is_mostly_holes(descriptor: int, start: int, stop: int) -> bool:
    """Whether a large part of a sparse file would be read into memory that the file itself does not take.

    Where the filesystem knows no holes, every byte counts as data.
    """
    if stop - start < _LARGE:
        return False
    data, at = 0, start
    for _ in range(_MOST_EXTENTS):
        try:
            first = os.lseek(descriptor, at, os.SEEK_DATA)
            at = os.lseek(descriptor, first, os.SEEK_HOLE)
        except OSError:  # nothing but a hole up to the end
            break
        data += max(0, min(at, stop) - first)
        if at >= stop:
            break
    else:
        return False
    return data * _SPARSEST < stop - start
