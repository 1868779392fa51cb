"""Errors of the operating system as errors of a storage: what, where, why, what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ckpt.errors import AbsentError, DeniedError, FullError, StorageError, TransientError
from ckpt.storage.local.regular_file import NotRegularError

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
