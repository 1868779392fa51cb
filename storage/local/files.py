"""Files and folders that others can write to, too: opened without waiting for anybody, created so that they survive a
crash, and errors of the system as errors of a storage.

A named pipe, a device or a socket in place of a file would block whoever opens or reads it: only regular files are
opened.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from ckpt.errors import AbsentError, DeniedError, FullError, StorageError, TransientError

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


NOTHING_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotRegularError)
_NOWHERE = {errno.ENAMETOOLONG, errno.ELOOP}  # no file can be there
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
# errors that do not mean the bytes are gone: a failing disk, an unreachable server, a limit of this process
_PASSING = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR,
    errno.EBUSY, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED,
    errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EREMOTEIO, errno.ENOLINK,
}  # fmt: skip


def is_nothing_there(error: OSError) -> bool:
    """Whether an error says that there is no file under a name, and can be none."""
    return isinstance(error, NOTHING_THERE) or error.errno in _NOWHERE


def translated(error: OSError, verb: str, where: str, root: Path, shown: str) -> StorageError:
    """The error of a storage for one of the system, which was met on the attempt to `verb` what is at `where`.

    `shown`: the root, as the user wrote it.
    """
    begin = f"could not {verb} {where}: {error.strerror or error}."
    if is_nothing_there(error) and verb != "write":
        known = isinstance(error, NotRegularError) or error.errno in _NOWHERE
        return AbsentError(f"{where} is no object: {error.strerror}." if known else f"{where} does not exist.")
    if error.errno in _FULL:
        return FullError(f"{begin} {_advice_on_room(root)}")
    if error.errno in _DENIED:
        access = "readable" if verb in ("read", "list") else "writable"
        return DeniedError(f"{begin} Make {shown} {access} for this user, or choose another root.")
    return (TransientError if error.errno in _PASSING else StorageError)(begin)


def _advice_on_room(folder: Path) -> str:
    """How much space is left on the disk of a folder, and what to do about it: the end of an error message."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return "Free some space, then save again."
    if status.f_files and not status.f_favail:
        return (
            "No inodes are left there: it has room for bytes, but for no further file. Delete files (or lower "
            "Keep(last=...)), then save again."
        )
    free = status.f_bavail * status.f_frsize
    return f"{free / 1e9:.2f} GB are free there. Free some space (or lower Keep(last=...)), then save again."


NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EINVAL, errno.EISDIR}


def make_directories(folder: Path) -> None:
    """Like mkdir -p, with fsync of the parent of every new directory."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        with suppress(FileExistsError):
            new.mkdir()
        sync_directory(new.parent)


def sync_directory(folder: str | Path) -> None:
    """fsync a directory, so that the names in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
