"""Files that are written together: all are synced before the first gets its name, and each folder is synced once."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ckpt.storage.base import Buffer, StablePieces
from ckpt.storage.local.direct_write import is_small, write_durably, write_small

_MOST_FILES = 64  # of a group, each of which may hold a file descriptor
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_NO_HINTS = {errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP}


def write_file(path: Path, pieces: Iterable[Buffer]) -> None:
    """Create a file, and return when its bytes would survive a crash."""
    with open(path, "xb", buffering=0) as file:
        write_durably(file.fileno(), pieces)


@dataclass(eq=False)
class UnnamedFile:
    """A file under its temporary name, with the key it is written for and the version that it may replace."""

    key: str
    temporary: Path
    over: str | None
    descriptor: int | None = None  # open until the file is synced

    def sync(self) -> None:
        """Make the bytes durable, if they are not."""
        if self.descriptor is not None:
            os.fsync(self.descriptor)
            self._close()

    def discard(self) -> None:
        """Close the file, and remove it where it has not got its name."""
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            self.temporary.unlink()

    def _close(self) -> None:
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


@dataclass
class WriteGroup:
    """The files of a group that have been written, and have no names yet."""

    files: list[UnnamedFile] = field(default_factory=list)
    failed: Exception | None = None  # the first error: the kernel reports a failed fsync once
    _open: dict[Path, int] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        return len(self.files) >= _MOST_FILES

    def write(self, path: Path, pieces: Iterable[Buffer]) -> None:
        """Write a file. A small one is only sent on its way to the disk: `UnnamedFile.sync` waits for it."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._open[path] = descriptor
        stable = StablePieces.of(pieces)
        if stable is not None and is_small(stable):
            write_small(descriptor, stable)
            _start_writeback(descriptor)
        else:
            write_durably(descriptor, pieces)
            os.close(self._open.pop(path))

    def add(self, key: str, temporary: Path, over: str | None, make: Callable[[Path], None]) -> None:
        """Create a file under its temporary name."""
        file = UnnamedFile(key, temporary, over)
        self.files.append(file)
        try:
            make(temporary)
        except BaseException:
            self.files.remove(file)
            file.descriptor = self._open.pop(temporary, None)
            file.discard()
            raise
        file.descriptor = self._open.pop(temporary, None)

    def keys_by_folder(self) -> dict[Path, list[str]]:
        found: dict[Path, list[str]] = {}
        for file in self.files:
            found.setdefault(file.temporary.parent, []).append(file.key)
        return found

    def discard(self) -> None:
        """Remove what has not got its name."""
        for file in self.files:
            file.discard()
        self.files.clear()
        while self._open:  # an interrupt came before the file was noted
            with suppress(OSError):
                os.close(self._open.popitem()[1])


def _start_writeback(descriptor: int) -> None:
    """Let the disk begin, so that a later fsync of one file of a group commits all of them to the journal at once."""
    call = _sync_file_range()
    if call is None or call(descriptor, 0, 0, _WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code not in _NO_HINTS:  # space that was promised may turn out to be missing only here
        raise OSError(code, os.strerror(code))


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """sync_file_range of the C library; None where it has none."""
    try:
        found = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    found.restype = ctypes.c_int
    call: Callable[[int, int, int, int], int] = found
    return call
