"""Directories whose creation survives a crash."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger("ckpt")

NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EINVAL, errno.EISDIR}


def make_directories(folder: Path, root: Path) -> None:
    """Like mkdir -p, with fsync of the parent of every new directory.

    Below `root`, a lock file that an older ckpt left under the name of a folder is replaced by the folder.
    """
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        try:
            new.mkdir()
        except FileExistsError:
            if root in new.parents and _remove_leftover_lock(new):
                with suppress(FileExistsError):
                    new.mkdir()
        sync_directory(new.parent)


def _remove_leftover_lock(path: Path) -> bool:
    """Remove a file that ckpt 0.x made by locking a name before its folder was there.

    Such a file is empty and not locked. Any other file is left as it is.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size or not _can_be_locked(descriptor):
            return False
        if not os.path.samestat(os.lstat(path), status):
            return False
        path.unlink()
    finally:
        os.close(descriptor)
    _log.warning("%s was an empty lock file where a checkpoint's folder belongs: it was removed", path)
    return True


def _can_be_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in NO_LOCKS  # where there are no locks, nobody holds one
    return True


def sync_directory(folder: str | Path) -> None:
    """fsync a directory, so that the names in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
