"""Directories whose creation survives a crash."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

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
