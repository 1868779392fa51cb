"""The storage of a folder in a tmpfs: nothing is synced, and the pages of deleted files are used again.

Large files are written through a mapping, in several threads: `pwrite` lets one at a time write. The pages of a range
are asked for before it is written to. Where there is no memory for them the kernel says so, and `pwrite` then raises
the error; to write to a mapping without them would end the process.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt.storage.base import Buffer, ReservedFile, StablePieces
from ckpt.storage.local.files import (
    NOTHING_THERE,
    TEMPORARY,
    Tree,
    make_directories,
    not_regular,
    open_regular,
    real_path,
)
from ckpt.storage.local.storage import LocalStorage
from ckpt.util.aligned_memory import copy_bytes, forget_pages, make_resident
from ckpt.util.threads import CORES, Worker

_CHUNK = 16 << 20
_WRITERS = min(4, CORES)


def overwrite(descriptor: int, pieces: Iterable[Buffer]) -> None:
    """Write pieces over what a file has, and cut it to their size. It must be open for reading, too."""
    stable = StablePieces.of(pieces)
    is_large = stable is not None and stable.size >= _CHUNK
    size = _write_in_threads(descriptor, stable) if stable is not None and is_large else _write(descriptor, pieces)
    os.ftruncate(descriptor, size)


def _write(descriptor: int, pieces: Iterable[Buffer]) -> int:
    """Write pieces in turn. Returns how many bytes they are."""
    start = 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        _write_at(descriptor, view, start)
        start += len(view)
    return start


def _write_in_threads(descriptor: int, pieces: StablePieces) -> int:
    """Write pieces that do not change while the next ones are asked for."""
    os.ftruncate(descriptor, pieces.size)
    with mmap.mmap(descriptor, pieces.size) as file, memoryview(file) as mapped, _open_writers() as writers:
        start = turn = 0
        for piece in pieces:
            for offset in range(0, len(piece), _CHUNK):
                chunk = piece[offset : offset + _CHUNK]
                _start(writers[turn % len(writers)], descriptor, mapped, chunk, start + offset)
                turn += 1
            start += len(piece)
    return start


@contextmanager
def _open_writers() -> Iterator[list[Worker]]:
    """Threads, which are waited for also after an error: none may write to a mapping that is closed."""
    writers = [Worker("ckpt-memory", kept=True) for _ in range(_WRITERS)]
    try:
        yield writers
        for writer in writers:
            writer.wait()
    finally:
        for writer in writers:
            writer.close()


def _start(writer: Worker, descriptor: int, mapped: memoryview, chunk: memoryview, start: int) -> None:
    writer.start(lambda: _copy(descriptor, mapped, chunk, start))


def _copy(descriptor: int, mapped: memoryview, chunk: memoryview, start: int) -> None:
    stop = start + len(chunk)
    with mapped[start - start % mmap.PAGESIZE : stop] as pages:
        if make_resident(pages):
            copy_bytes(chunk, mapped[start:stop])
            forget_pages(pages)
        else:
            _write_at(descriptor, chunk, start)


def _write_at(descriptor: int, view: memoryview, start: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written


HELD = "/memfd:ckpt (deleted)"  # where a link to memory leads that is held for ckpt
_LARGE = 64 << 10  # bytes: a smaller file is always one of the tmpfs, and its pages are not worth to be used again
_SPARE = re.compile(rf"\.spare-(\d+)-[0-9a-f]{{12}}{re.escape(TEMPORARY)}")


class _MemoryTree(Tree):
    """Follows links to held memory. Where its holder has ended, nothing is there."""

    def _open_link(self, key: str) -> int:
        with self.held(key) as (folder, name):
            descriptor = open_regular(name, dir_fd=folder)
        if os.readlink(f"/proc/self/fd/{descriptor}") == HELD:
            return descriptor
        os.close(descriptor)
        return super()._open_link(key)

    def _behind_links(self, path: str, key: str) -> int:
        if real_path(os.path.join(self._root, path)) == HELD:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return super()._behind_links(path, key)

    def _status_of_link(self, key: str) -> os.stat_result:
        descriptor = self._open_link(key)
        try:
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)


class VolatileStorage(LocalStorage):
    """A directory in memory: what is written outlives the process, not the machine. Files are for their user alone.

    A large file that is deleted is kept as a spare, which the next one overwrites: new pages cost three times as much
    as those that exist. Spares are temporary files, which `sweep` removes; `trim` does so earlier. `hold`: makes a new
    large file at a path, whose memory another process holds, and returns its descriptor.
    """

    _kind = _MemoryTree

    def __init__(self, root: str | os.PathLike[str], hold: Callable[[Path], int] | None = None) -> None:
        super().__init__(root)
        self._hold = hold

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Files that are written together are written one by one: nothing would be synced once for all of them."""
        yield

    def trim(self) -> None:
        """Give back the memory of deleted files that no other has taken."""
        for _, path in self._spares():
            with suppress(OSError):
                path.unlink()

    def unused(self) -> int:
        """Bytes of memory that no object has yet: of files that are reserved, and of deleted ones."""
        size = 0
        with suppress(FileNotFoundError), os.scandir(self._root) as entries:
            for entry in entries:
                with suppress(OSError):  # it has become an object
                    size += 512 * _File.at(entry.path).status.st_blocks if entry.name.endswith(TEMPORARY) else 0
        return size

    def _sync_folder(self, folder: int, *keys: str) -> None:
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

    def reserve_again(self, file: ReservedFile) -> ReservedFile | None:
        """The memory of this file, if the object that it became was deleted, and no other has taken it."""
        path = self._root / f".reserved-{file.size}-{secrets.token_hex(6)}{TEMPORARY}"
        for size, spare in self._spares():
            with suppress(OSError):  # another rank of this host has taken it
                if size == file.size and _File.at(spare).status.st_ino == file.inode:
                    os.rename(spare, path)
                    found = _File.at(path)
                    if found.is_ours and found.names == 1 and found.status.st_ino == file.inode:
                        return ReservedFile(str(path), file.inode, file.size)
                    path.unlink()
        return None

    def give_up(self, file: ReservedFile) -> None:
        """Keep its memory for the next file, unless it was written, which has given it another name."""
        with suppress(OSError):
            self._recycle(Path(file.path))

    def _write_file(self, folder: int, name: str, pieces: Iterable[Buffer]) -> None:
        stable, path = StablePieces.of(pieces), _path_of(folder, name)
        if stable is not None and stable.file is not None and _is_named(stable, stable.file, path):
            return
        descriptor = self._opened(path, stable.size if stable is not None else None)
        try:
            overwrite(descriptor, pieces if stable is None else stable)
        finally:
            os.close(descriptor)

    def _link(self, source: str, folder: int, name: str) -> None:
        with self._tree.held(source) as (there, old):
            os.link(old, name, src_dir_fd=there, dst_dir_fd=folder, follow_symlinks=False)

    def _unlink(self, folder: int, name: str) -> None:
        self._recycle(_path_of(folder, name))

    def _recycle(self, path: Path) -> None:
        file = _File.at(path)
        if not file.is_ours or file.status.st_size < _LARGE or file.names > 1:
            path.unlink()
            return
        os.rename(path, self._root / f".spare-{file.status.st_size}-{secrets.token_hex(6)}{TEMPORARY}")

    def _opened(self, path: Path, size: int | None) -> int:
        """A file to write to: the spare whose size is nearest, or a new one. `size`: None where it is not known."""
        spares = self._spares() if size is not None and size >= _LARGE else []
        for _, spare in sorted(spares, key=lambda found: abs(found[0] - (size or 0))):
            with suppress(*NOTHING_THERE):  # another rank of this host has taken it, or it is none of ours
                os.rename(spare, path)
                return _reopened(path)
        if self._hold is not None and (size is None or size >= _LARGE):
            return self._hold(path)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def _spares(self) -> list[tuple[int, Path]]:
        try:
            names = os.listdir(self._root)
        except OSError:
            return []
        return [(int(found.group(1)), self._root / name) for name in names if (found := _SPARE.fullmatch(name))]


def _path_of(folder: int, name: str) -> Path:
    """A path that goes by the descriptor of the folder. A tmpfs is one of Linux, which has such paths."""
    return Path(f"/proc/self/fd/{folder}", name)


@dataclass(frozen=True)
class _File:
    """What a name leads to: a file, or memory that is held. `names`: how many it has, without that of its holder."""

    status: os.stat_result
    names: int
    is_ours: bool  # neither a pipe, say, nor a link to anything else

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> _File:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode) and os.path.realpath(path) == HELD:
            return cls(os.stat(path), status.st_nlink - 1, True)
        return cls(status, status.st_nlink, stat.S_ISREG(status.st_mode))


def _is_named(pieces: StablePieces, file: ReservedFile, path: Path) -> bool:
    """Give a reserved file its name when all its bytes have arrived. False if it is gone, or not what it was."""
    for _ in pieces:  # waits
        pass
    try:
        found = _File.at(file.path)
        if (found.status.st_ino, found.status.st_size, found.names) != (file.inode, pieces.size, 1):
            return False
        os.rename(file.path, path)
    except OSError:  # swept by another process, say: the bytes are in memory, and are written as any other
        return False
    return True


def _reopened(path: Path) -> int:
    """A spare, to write to. What has a second name is not overwritten: it is removed, and the next one is taken."""
    file = _File.at(path)
    if file.is_ours and file.names == 1:
        descriptor = open_regular(path, os.O_RDWR)
        if os.path.samestat(os.fstat(descriptor), file.status):  # or its holder has ended, and another has its number
            return descriptor
        os.close(descriptor)
    error = not_regular(path)
    path.unlink()
    raise error
