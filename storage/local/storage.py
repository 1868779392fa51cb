"""The storage of a local or network filesystem: files below a directory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from ckpt.errors import ConfigError, NotDurableError, StorageError, TruncatedError
from ckpt.storage.base import ANY, Buffer, Entry, Unfinished, changed, check_key
from ckpt.storage.local.files import (
    NOTHING_THERE,
    OWN_LOCK,
    TEMPORARY,
    Tree,
    UnnamedFile,
    WriteGroup,
    is_mostly_holes,
    is_nothing_there,
    not_regular,
    translated,
    write_file,
)
from ckpt.storage.local.locks import LocalLocks
from ckpt.util.aligned_memory import ALIGNMENT, O_DIRECT, allocate_aligned, copy_bytes
from ckpt.util.filesystem import sync
from ckpt.util.option_values import is_path, said

# Reads from a file into several buffers: from the page cache if the bytes are there, with direct I/O otherwise.
#
# A checkpoint is read once, when a run begins. Through the page cache its bytes would be copied into new pages first,
# which takes as long as the disk itself, and evicts pages that are in use.
_CACHESTAT = 451  # the same on every architecture; since Linux 6.5
_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM}
_WORTH_IT = 256 << 10  # bytes
_TRIES = 100  # to make a file in a folder that others remove while it is empty
_BOUNCE = 4 << 20
_BYTES_AT_ONCE = 1 << 30
_BUFFERS_AT_ONCE = 1024  # IOV_MAX, as every system has it

_own = threading.local()
_libc = ctypes.CDLL(None)


class _FolderGoneError(FileNotFoundError):
    """Somebody removed the folder, which was empty, before there was a file in it."""


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("size", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def read_scattered(descriptor: int, start: int, buffers: list[memoryview], *, cached: bool = False) -> int:
    """Fill the buffers in turn from `start`. Returns how many bytes are missing because the file ends earlier.

    With `cached`, all is read through the page cache.
    """
    left = [buffer for buffer in buffers if len(buffer)]
    size = sum(map(len, left))
    if size >= _WORTH_IT and not cached and not _is_cached(descriptor, start, size):
        start, left = _past_cache(descriptor, start, left)
    while left:
        got = os.preadv(descriptor, _at_once(left), start)
        if not got:
            break
        start, left = start + got, _rest(left, got)
    return sum(map(len, left))


def _is_cached(descriptor: int, start: int, size: int) -> bool:
    """Whether most of these bytes are in the page cache. True where the kernel has no call to ask."""
    span, found = _Range(start, size), _Pages()
    known = O_DIRECT and _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(span), ctypes.byref(found), 0) == 0
    return not known or found.cached * mmap.PAGESIZE * 2 > size


def _past_cache(cached: int, start: int, left: list[memoryview]) -> tuple[int, list[memoryview]]:
    """Read aligned blocks with direct I/O. Stops where that is refused, or the file ends."""
    try:
        descriptor = os.open(f"/proc/self/fd/{cached}", os.O_RDONLY | os.O_CLOEXEC | O_DIRECT)  # the same file again
    except OSError:
        return start, left
    bounce = _bounce()
    try:
        while left:
            before = start % ALIGNMENT
            wanted = min(len(bounce), -(-(before + sum(map(len, left))) // ALIGNMENT) * ALIGNMENT)
            got = os.preadv(descriptor, [bounce[:wanted]], start - before) - before
            if got <= 0:
                break
            got = min(got, sum(map(len, left)))
            _scatter(bounce[before : before + got], left)
            start, left = start + got, _rest(left, got)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
    finally:
        os.close(descriptor)
    return start, left


def _bounce() -> memoryview:
    """An aligned bounce buffer, one per thread."""
    if not hasattr(_own, "bounce"):
        _own.bounce = allocate_aligned(_BOUNCE)
    bounce: memoryview = _own.bounce
    return bounce


def _scatter(source: memoryview, targets: list[memoryview]) -> None:
    """Copy a buffer to several in turn."""
    for target in targets:
        count = min(len(source), len(target))
        copy_bytes(source[:count], target[:count])
        source = source[count:]


def _at_once(buffers: list[memoryview]) -> list[memoryview]:
    """As many of the buffers as one system call fills."""
    room = _BYTES_AT_ONCE
    taken = []
    for buffer in buffers[:_BUFFERS_AT_ONCE]:
        if room:
            taken.append(buffer[:room])
            room -= len(taken[-1])
    return taken


def _rest(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The rest of the buffers once their first `count` bytes are filled."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
_COPIED_AT_ONCE = 8 << 20


class LocalStorage:
    """A directory, created when the first object is written."""

    is_local = True
    _kind = Tree

    def __init__(self, root: str | os.PathLike[str]) -> None:
        if not is_path(root):
            raise ConfigError(f"a root must be a path, not {said(root)}.")
        self._root = Path(os.path.abspath(os.fspath(root)))
        self._shown = os.path.normpath(os.fspath(root))
        self._tree = self._kind(self._root, self._shown)
        if os.path.exists(self._root) and not os.path.isdir(self._root):
            raise ConfigError(f"{self._shown} is a file, but a root must be a folder. Choose another path.")
        self._locks = LocalLocks(self._tree, self._root, self._shown)
        self._in_thread = threading.local()  # `group`: of the thread that writes one

    @property
    def url(self) -> str:
        return self._shown

    @property
    def place(self) -> str:
        """The resolved path: equal for every spelling of this root, relative, absolute, or through symbolic links."""
        return os.path.realpath(self._root)

    def __repr__(self) -> str:
        return f"LocalStorage({self._shown!r})"

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        write = self._write_file if self._group is None else self._group.write
        self._make(key, lambda folder, name: write(folder, name, pieces), over=over)

    def _write_file(self, folder: int, name: str, pieces: Iterable[Buffer]) -> None:
        write_file(folder, name, pieces)

    @property
    def _group(self) -> WriteGroup | None:
        return getattr(self._in_thread, "group", None)

    @contextmanager
    def grouped(self) -> Iterator[None]:
        group = self._in_thread.group = WriteGroup()
        try:
            yield
            self._finish(group)
        finally:
            self._in_thread.group = None
            group.discard()

    def _finish(self, group: WriteGroup) -> None:
        """Sync the files of a group, then give them their names, then sync each folder once."""
        if group.failed is not None:
            raise group.failed
        try:
            self._name_all(group)
        except Exception as error:
            group.failed = error
            raise
        group.discard()

    def _name_all(self, group: WriteGroup) -> None:
        for file in group.files:
            with self._translated_errors("write", file.key):
                file.sync()
        for file in group.files:
            with self._translated_errors("write", file.key):
                self._locks.confirm()
                self._name(file.folder, file.temporary, file.key, file.over)
        for folder, keys in group.keys_by_folder().items():
            self._sync_folder(folder, *keys)

    def version(self, key: str) -> str | None:
        with self._translated_errors("read", key):
            try:
                status = self._tree.status(key)
            except OSError as error:
                if is_nothing_there(error):
                    return None
                raise
        if not stat.S_ISREG(status.st_mode):
            return None
        return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"

    def link(self, source: str, target: str) -> None:
        """A hard link: the bytes are stored once, until the last of their names is removed."""
        with self._translated_errors("read", source):
            if not stat.S_ISREG(self._tree.status(source).st_mode):
                raise not_regular(self._root / source)
        try:
            self._make(target, lambda folder, name: self._link(source, folder, name))
        except StorageError as error:
            if getattr(error.__cause__, "errno", None) not in _NO_LINKS:
                raise
            self.write(target, self._pieces(source))

    def _link(self, source: str, folder: int, name: str) -> None:
        for find in (self._tree.held, self._tree.behind):
            with find(source) as (there, old):
                os.link(old, name, src_dir_fd=there, dst_dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                return
            os.unlink(name, dir_fd=folder)  # it was a link, or has become one
        raise not_regular(self._root / source)

    def _make(self, key: str, make: Callable[[int, str], None], *, over: str | None = ANY) -> None:
        """Create a file under a temporary name, and rename it when it is complete."""
        above, _, name = check_key(key).rpartition("/")
        temporary = f".{name}.{secrets.token_hex(6)}{TEMPORARY}"
        with self._translated_errors("write", key):
            self._locks.confirm()
            if self._group is not None:
                folder = self._group.folder(above, self._tree.made)
                self._group.add(UnnamedFile(key, folder, temporary, over), make)
                if self._group.is_full:
                    self._finish(self._group)
                return
            for tries_left in reversed(range(_TRIES)):
                try:
                    self._make_in_place(key, temporary, make, over)
                    return
                except _FolderGoneError:
                    if not tries_left:
                        raise

    def _make_in_place(self, key: str, temporary: str, make: Callable[[int, str], None], over: str | None) -> None:
        """Create the file in its folder, which is made where it is missing."""
        with self._tree.held(key, make=True) as (folder, _):
            try:
                make(folder, temporary)
                self._locks.confirm()
                self._name(folder, temporary, key, over)
            except FileNotFoundError:
                if os.fstat(folder).st_nlink:  # the folder is there
                    raise
                raise _FolderGoneError(errno.ENOENT, "another program keeps removing the file's folder", key) from None
            finally:
                # left by an error or a KeyboardInterrupt, or where both are links to one file already; only a
                # killed process leaves it to `sweep`
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
            self._sync_folder(folder, key)

    def _sync_folder(self, folder: int, *keys: str) -> None:
        try:
            sync(folder)
        except OSError as error:
            files = ", ".join(f"{self._shown}/{key}" for key in keys)
            raise NotDurableError(
                f"ckpt wrote {files}, but could not sync the folder: {error.strerror or error}."
            ) from error

    def _name(self, folder: int, temporary: str, key: str, over: str | None) -> None:
        """Give a file its name if that is still the one of `over`.

        A new file's name is a second link to it, which the kernel makes only where nothing is: a thousand ranks that
        write their files do not wait for each other. To replace a version, one at a time compares and renames.
        """
        name = key.rpartition("/")[2]
        if over == ANY:
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        elif over is not None or not self._name_new(folder, temporary, key):
            with self._locks.renaming():
                if self.version(key) != over:
                    raise changed(f"{self._shown}/{key}")
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)

    def _name_new(self, folder: int, temporary: str, key: str) -> bool:
        """Whether the name could be given by a link, and was.

        Not every filesystem has links, and a pipe, a socket or a link to nothing under the name is replaced instead.
        """
        name = key.rpartition("/")[2]
        try:
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            # NFS repeats a request whose answer was lost: then the link that is there is this one
            there, mine = (os.stat(each, dir_fd=folder, follow_symlinks=False) for each in (name, temporary))
            if not os.path.samestat(there, mine):
                if self.version(key) is not None:
                    raise changed(f"{self._shown}/{key}") from None
                return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        with suppress(OSError):  # or `sweep` removes it
            os.unlink(temporary, dir_fd=folder)
        return True

    def _pieces(self, key: str) -> Iterator[bytes]:
        with self._translated_errors("read", key), open(self._tree.open(key), "rb", buffering=0) as file:
            while piece := file.read(_COPIED_AT_ONCE):
                yield piece

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._translated_errors("read", key), open(self._tree.open(key), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            stop = size if stop is None else min(stop, size)
            if is_mostly_holes(file.fileno(), start, stop):
                raise TruncatedError(
                    f"{self._shown}/{key} has {stop - start} bytes, but almost all of them were never written (holes)."
                )
            file.seek(start)
            return file.read(max(0, stop - start))

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        with self._translated_errors("read", key), open(self._tree.open(key), "rb", buffering=0) as file:
            views = [memoryview(buffer).cast("B") for buffer in buffers]
            missing = read_scattered(file.fileno(), start, views, cached=again)
            if missing:
                raise TruncatedError(f"{self._shown}/{key} is {missing} bytes too short.")

    def evict(self, key: str) -> None:
        """Drop the clean pages of a file from the page cache, where the system can."""
        read = self._translated_errors("read", key)
        with read, open(self._tree.open(key), "rb", buffering=0) as file, suppress(AttributeError, OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        with self._translated_errors("list", prefix):
            for key, status in self._tree.walk(prefix, lambda name: not name.endswith((TEMPORARY, OWN_LOCK))):
                if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                    yield Entry(key, status.st_size)

    def delete(self, keys: Iterable[str]) -> None:
        self._locks.confirm()
        for key in keys:
            told = self._translated_errors("delete", key)
            with told, suppress(*NOTHING_THERE), self._tree.held(key) as (folder, name):
                self._unlink(folder, name)
            self._drop_empty(key)

    def _unlink(self, folder: int, name: str) -> None:
        os.unlink(name, dir_fd=folder)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        with self._translated_errors("list", prefix):  # not in roots of others, whose runs may be writing just now
            for key, status in self._tree.walk(prefix, lambda name: name.endswith(TEMPORARY), other_roots=False):
                yield Unfinished(key, status.st_size, time.time() - status.st_mtime)

    def sweep(self, prefix: str = "", *, age: float | None = None) -> None:
        self._locks.confirm()
        with self._translated_errors("sweep", prefix):
            for left in list(self.unfinished(prefix)):
                if age is None or left.age >= age:
                    with suppress(*NOTHING_THERE), self._tree.held(left.key) as (folder, name):
                        os.unlink(name, dir_fd=folder)
                    self._drop_empty(left.key)

    @contextmanager
    def lock(self, key: str, *, shared: bool = False, note: str = "") -> Iterator[None]:
        """An flock on a file of our own, which the kernel releases when the process dies.

        A key whose name begins with a dot is a lock file, which contains the note of its exclusive holder. For any
        other key it is a file beside it, as long as somebody holds it.
        """
        with self._translated_errors("lock", key):
            held = self._locks.acquire(key, shared=shared, note=note)
        try:
            yield
        finally:
            if held is not None:
                self._locks.release(held)

    def _drop_empty(self, key: str) -> None:
        """Remove the folders of a key that have nothing left in them."""
        while "/" in key:
            key = key.rpartition("/")[0]
            try:
                with self._tree.held(key) as (folder, name):
                    os.rmdir(name, dir_fd=folder)
            except OSError:
                return

    def _translated_errors(self, verb: str, key: str) -> _Translated:
        return _Translated(verb, f"{self._shown}/{key}", self._root, self._shown)


class _Translated:
    """Turns what the system says into the errors of a storage.

    Not by `contextmanager`, whose frames and the error would keep each other alive, and, since Python 3.12, all that
    called: among them the loop over batches in which a save was made, which then does not end at its `break`.
    """

    def __init__(self, verb: str, what: str, root: Path, shown: str) -> None:
        self._words = verb, what, root, shown

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise translated(error, *self._words) from error


class OneFolder(LocalStorage):
    """The directory above a folder that may lie anywhere, such as /tmp: only keys in that folder are listed.

    Lock files, whose names begin with a dot, are inside it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = os.path.normpath(os.fspath(folder))
        super().__init__(os.path.dirname(path) or ".")
        self.name = os.path.basename(path)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        return super().list(prefix or self.name)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        return super().unfinished(prefix or self.name)

    @contextmanager
    def lock(self, key: str, *, shared: bool = False, note: str = "") -> Iterator[None]:
        inside = f"{self.name}/{key}" if key.startswith(".") else key
        with super().lock(inside, shared=shared, note=note):
            yield
