"""The storage of a folder in a tmpfs: nothing is synced, and the pages of deleted files are used again."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt.storage.base import Buffer, ReservedFile, StablePieces
from ckpt.storage.local.files import (
    NOTHING_THERE,
    NotRegularError,
    has_one_name,
    make_directories,
    not_regular,
    open_regular,
)
from ckpt.storage.local.storage import TEMPORARY, LocalStorage
from ckpt.storage.local.tmpfs_write import overwrite

_WORTH_RECYCLING = 1 << 20  # bytes
_SPARE = re.compile(rf"\.spare-(\d+)-[0-9a-f]{{12}}{re.escape(TEMPORARY)}")


class VolatileStorage(LocalStorage):
    """A directory in memory: what is written outlives the process, not the machine. Files are for their user alone.

    A large file that is deleted is kept as a spare, which the next one overwrites: new pages of a tmpfs cost three
    times as much as those that exist. Spares are temporary files, which `sweep` removes; `trim` does so earlier.
    """

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Files that are written together are written one by one: nothing would be synced once for all of them."""
        yield

    def trim(self) -> None:
        """Give back the memory of deleted files that no other has taken."""
        for _, path in self._spares():
            with suppress(OSError):
                path.unlink()

    def _sync_folder(self, folder: Path, *keys: str) -> None:
        """Nothing in memory would survive a crash of the machine."""

    def reserve(self, size: int) -> tuple[int, ReservedFile]:
        """A file of that size, of the memory of a deleted one if there is any, until it is written or given up."""
        make_directories(self._root)
        path = self._root / f".reserved-{size}-{secrets.token_hex(6)}{TEMPORARY}"
        with self._translated_errors("write", path.name):
            descriptor = self._opened(path, size)
            try:
                os.ftruncate(descriptor, size)
                return descriptor, ReservedFile(str(path), os.fstat(descriptor).st_ino, size)
            except BaseException:
                os.close(descriptor)
                path.unlink()
                raise

    def give_up(self, file: ReservedFile) -> None:
        """Keep its memory for the next file, unless it was written, which has given it another name."""
        with suppress(OSError):
            self._unlink(Path(file.path))

    def _write_file(self, path: Path, pieces: Iterable[Buffer]) -> None:
        stable = StablePieces.of(pieces)
        if stable is not None and stable.file is not None and _is_named(stable, stable.file, path):
            return
        descriptor = self._opened(path, stable.size if stable is not None else 0)
        try:
            overwrite(descriptor, pieces if stable is None else stable)
        finally:
            os.close(descriptor)

    def _unlink(self, path: Path) -> None:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size < _WORTH_RECYCLING or status.st_nlink > 1:
            path.unlink()
            return
        os.rename(path, self._root / f".spare-{status.st_size}-{secrets.token_hex(6)}{TEMPORARY}")

    def _opened(self, path: Path, size: int) -> int:
        """A file to write to: the spare whose size is nearest, or a new one."""
        spares = self._spares() if size >= _WORTH_RECYCLING else []
        for _, spare in sorted(spares, key=lambda found: abs(found[0] - size)):
            with suppress(*NOTHING_THERE):  # another rank of this host has taken it, or it is none of ours
                os.rename(spare, path)
                return _reopened(path)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def _spares(self) -> list[tuple[int, Path]]:
        try:
            names = os.listdir(self._root)
        except OSError:
            return []
        return [(int(found.group(1)), self._root / name) for name in names if (found := _SPARE.fullmatch(name))]


def _is_named(pieces: StablePieces, file: ReservedFile, path: Path) -> bool:
    """Give a reserved file its name when all its bytes have arrived. False if it is gone, or not what it was."""
    for _ in pieces:  # waits
        pass
    try:
        status = os.lstat(file.path)
        if (status.st_ino, status.st_size, status.st_nlink) != (file.inode, pieces.size, 1):
            return False
        os.rename(file.path, path)
    except OSError:  # swept by another process, say: the bytes are in memory, and are written as any other
        return False
    return True


def _reopened(path: Path) -> int:
    """A spare, to write to. What has a second name is not overwritten: it is removed, and the next one is taken."""
    try:
        descriptor = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
        if has_one_name(descriptor):
            return descriptor
        os.close(descriptor)
        raise not_regular(path)
    except NotRegularError:
        path.unlink()
        raise
