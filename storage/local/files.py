"""Files and folders of a local storage: opened, created, written so that they survive a crash; and the system's errors.

Others can write to these folders, too. A named pipe, a device or a socket in place of a file would block whoever opens
or reads it: only regular files are opened.

Large files are written with direct I/O, into space that was reserved. All files of a group are synced before the first
gets its name, and each folder is synced once.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from ckpt.errors import AbsentError, ConfigError, DeniedError, FullError, StorageError, TransientError
from ckpt.storage.base import ROOT_LOCK, Buffer, StablePieces, check_key
from ckpt.util.aligned_memory import ALIGNMENT, O_DIRECT, address_of, allocate_aligned, copy_bytes
from ckpt.util.filesystem import sync
from ckpt.util.threads import Worker

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


def open_regular(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666, *, dir_fd: int | None = None
) -> int:
    """A descriptor of a regular file. With `O_NOFOLLOW` among the flags, a symbolic link is none."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in _NO_DRIVER or (error.errno == errno.ELOOP and stat.S_ISLNK(_mode(path, dir_fd))):
            raise not_regular(path, dir_fd=dir_fd) from None
        raise
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(status.st_mode):
            raise not_regular(path, dir_fd=dir_fd)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def not_regular(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> NotRegularError:
    """The error about something that is no file, which says what it is."""
    mode = _mode(path, dir_fd)
    kind = next((name for matches, name in _KINDS if matches(mode)), "no regular file")
    return NotRegularError(errno.EINVAL, f"it is {kind} in place of a file", os.fspath(path))


def _mode(path: str | os.PathLike[str], dir_fd: int | None) -> int:
    try:
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode
    except OSError:
        return 0


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
    errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOLINK,
    getattr(errno, "EREMOTEIO", errno.EIO),  # not on macOS
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
            "No inodes are left there: it has room for bytes, but not for another file. Delete files (or lower "
            "Keep(last=...)), then save again."
        )
    free = status.f_bavail * status.f_frsize
    return f"{free / 1e9:.2f} GB is free there. Free some space (or lower Keep(last=...)), then save again."


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
        sync_directory(new.parent)  # also if another process made it, which may not have synced it yet


def sync_directory(folder: str | Path) -> None:
    """fsync a directory, so that the names in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


TEMPORARY = ".ckpt-tmp"  # how the names end of what is being written
OWN_LOCK = ".ckpt-lock"  # and of files that are there while somebody holds a lock

# What is below a folder: where keys lead, and what may be followed.
_SNAPSHOT = re.compile(r"((.*)/models--[^/]+)/snapshots/[0-9a-f]{40}(?:/.*)?")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LONGEST_PATH = 4096
_EXCHANGES = 10


class OutsideError(AbsentError, ConfigError):
    """A symbolic link leads out of the root: for whoever reads the root, nothing is there."""


class HeldFolder:
    """The folder of a key, open, and the key's name in it.

    Not by `contextmanager`, for the reason that `storage.py::_Translated` gives.
    """

    def __init__(self, folder: int, name: str) -> None:
        self._folder, self._name = folder, name

    def __enter__(self) -> tuple[int, str]:
        return self._folder, self._name

    def __exit__(self, *error: object) -> None:
        os.close(self._folder)


class Tree:
    """Resolves the keys of a storage to an open folder and a name in it, by which everything there is done.

    Whoever exchanges a folder for a symbolic link in the meantime leads nobody out. Links that were there before are
    followed only where they do not lead out of the root.
    """

    def __init__(self, root: Path, shown: str) -> None:
        self._root = str(root)
        self._shown = shown
        # a snapshot in Hugging Face's cache is made of links to the blobs of its repository, or to those that all share
        snapshot = _SNAPSHOT.fullmatch(self._root)
        self._bounds = (snapshot.group(1), f"{snapshot.group(2)}/blobs") if snapshot else (self._root,)

    def held(self, key: str, *, make: bool = False) -> HeldFolder:
        """The folder of `key`, and its name there. A link of that name is itself read, replaced or removed."""
        above, _, name = check_key(key).rpartition("/")
        return HeldFolder(self.made(above) if make else self.folder(above), name)

    def folder(self, key: str) -> int:
        """A descriptor of a folder; with an empty key, of the root."""
        if not key:
            return os.open(self._root, _FOLDER)  # which may be a link, or below one: its owner has named it
        first, *others = key.split("/")
        try:
            return _descend(f"{self._root}/{first}", others, os.O_NOFOLLOW)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
        return self._behind_links(key, key)

    def made(self, key: str) -> int:
        """A descriptor of a folder, which is made where it is missing, and then outlives a crash."""
        with suppress(FileNotFoundError):
            return self.folder(key)
        make_directories(Path(self._root))
        for part in accumulate(key.split("/") if key else (), "{}/{}".format):
            with self.held(part) as (above, name):
                try:
                    os.mkdir(name, dir_fd=above)
                except FileExistsError:
                    continue
                sync(above)
        return self.folder(key)

    def open(self, key: str) -> int:
        """A descriptor to read a file by. Only what is opened last is looked at: nothing else is ever read."""
        with self.held(key) as (folder, name):
            try:
                return open_regular(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
            except NotRegularError:
                pass
        return self._open_link(key)

    def _open_link(self, key: str) -> int:
        with self.behind(key) as (folder, name):
            return open_regular(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)

    def behind(self, key: str) -> HeldFolder:
        """The folder and the name of what a link leads to."""
        real = real_path(f"{self._root}/{key}")
        return HeldFolder(self._behind_links(os.path.dirname(real), key), os.path.basename(real))

    def _behind_links(self, path: str, key: str) -> int:
        """A descriptor of the folder that a path leads to: found through its links, and opened through none."""
        real = real_path(os.path.join(self._root, path))  # where it is absolute, without the root
        base = next((base for base in map(os.path.realpath, self._bounds) if is_below(real, base)), None)
        if base is None:
            raise self._outside(key)
        return _descend(base, Path(real).relative_to(base).parts, 0)

    def _outside(self, key: str) -> OutsideError:
        return OutsideError(
            f"{self._shown}/{key} leads out of the root through a symbolic link. ckpt leaves it unchanged."
        )

    def status(self, key: str) -> os.stat_result:
        """What is under a key: of a link, what it leads to."""
        with self.held(key) as (folder, name):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return self._status_of_link(key) if stat.S_ISLNK(status.st_mode) else status

    def _status_of_link(self, key: str) -> os.stat_result:
        with self.behind(key) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def walk(
        self, prefix: str, takes: Callable[[str], bool], *, other_roots: bool = True
    ) -> Iterator[tuple[str, os.stat_result]]:
        """The keys below `prefix` whose names it `takes`, and what is there. No folder is entered through a link.

        A folder that cannot be read is an error. Deeper than the longest path of the system nothing is seen.
        `other_roots`: whether to go into folders that are the root of another run.
        """
        left = [check_key(prefix) if prefix else ""]
        while left:
            key = left.pop()
            if len(self._root) + len(key) >= _LONGEST_PATH:
                continue
            try:
                folder = self.folder(key)
            except OutsideError:
                continue  # a link, which perhaps was a folder a moment ago
            except OSError as error:
                if not is_nothing_there(error):  # or a run would start anew beside its checkpoints
                    raise
                continue
            try:
                with os.scandir(folder) as found:
                    entries = list(found)
                if not other_roots and key and any(entry.name == ROOT_LOCK for entry in entries):
                    continue
                below = f"{key}/" if key else ""
                left += [below + entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
                for entry in entries:
                    if takes(entry.name) and not _is_folder(entry):
                        with suppress(*NOTHING_THERE):  # removed while we walk
                            yield below + entry.name, self._listed(folder, below, entry.name)
            finally:
                os.close(folder)

    def _listed(self, folder: int, below: str, name: str) -> os.stat_result:
        """What is there: of a link that may be followed what it leads to, else the link itself."""
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            with suppress(OSError):  # it leads out, or nowhere
                return self._status_of_link(below + name)
        return status


def _descend(path: str, words: Iterable[str], flags: int) -> int:
    """A descriptor of the folder at `path`, or below it, where no word may be a link."""
    folder = os.open(path, _FOLDER | flags)
    for word in words:
        try:
            inner = os.open(word, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.close(folder)
        folder = inner
    return folder


def real_path(path: str) -> str:
    """Where a path leads through its links; nowhere, if somebody goes on exchanging them."""
    for _ in range(_EXCHANGES):
        try:
            return os.path.realpath(path)
        except OSError as error:
            if error.errno != errno.EINVAL:  # it was a link, and is none any more
                raise
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def is_below(real: str, base: str) -> bool:
    return os.path.commonpath([base, real]) == base


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder, or a link to one. A link that leads nowhere is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


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


# Durable writes of large files with direct I/O, where the filesystem allows it: in half the time.
#
# Through the page cache every byte is copied into new pages, and `fsync` waits for all of them at the end. With direct
# I/O the disk works from the first block on, while the next one is being filled.
BLOCK = 8 << 20
_WRITERS = 8
_RESERVED = 256 << 20
_PIECES_AT_ONCE = 1024  # IOV_MAX, as every system has it

_spare: list[memoryview] = []  # blocks of finished files, for the next ones: allocating memory takes time


def write_durably(descriptor: int, pieces: Iterable[Buffer]) -> None:
    """Write the pieces to a new file in turn, and return when they would survive a crash.

    Small stable pieces, and large aligned ones, are written without a copy. Others are copied into a few blocks of
    memory: a piece is not used any more when the next one is asked for.
    """
    stable = StablePieces.of(pieces)
    if stable is not None and is_small(stable):
        write_small(descriptor, stable)
        sync(descriptor)
        return
    file = _File(descriptor, stable.size if stable is not None else None)
    try:
        for piece in pieces if stable is None else stable:
            view = memoryview(piece).cast("B")
            if stable is not None and file.is_at_a_block and _is_aligned(view):
                file.write_blocks(view)
            else:
                file.add(view)
    finally:
        file.finish()
    sync(descriptor)


def is_small(pieces: StablePieces) -> bool:
    """Whether these pieces take less than a block: then direct I/O, and threads, cost more than they save."""
    return pieces.size < BLOCK


def write_small(descriptor: int, pieces: StablePieces) -> None:
    """Write the pieces to a new file in turn, through the page cache. They are not durable yet."""
    left = [view for view in pieces if view]
    start = 0
    while left:
        written = os.pwritev(descriptor, left[:_PIECES_AT_ONCE], start)
        start += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]


def _is_aligned(view: memoryview) -> bool:
    return not view.readonly and len(view) >= BLOCK and address_of(view) % ALIGNMENT == 0


class _File:
    """A file that several threads write block by block, into space reserved beforehand."""

    def __init__(self, descriptor: int, expected: int | None) -> None:
        self._descriptor = descriptor
        self._expected = expected
        self._writers = [Worker("ckpt-write", kept=True) for _ in range(_WRITERS)]
        self._buffers: dict[int, memoryview] = {}  # by writer
        self._number = 0  # of the current block
        self._filled = 0  # bytes in it
        self._size = 0
        self._reserved = 0
        self._can_reserve = True
        self._direct = _opened_directly(descriptor)

    @property
    def is_at_a_block(self) -> bool:
        """Whether no bytes are left over from the pieces before."""
        return not self._filled

    def write_blocks(self, view: memoryview) -> None:
        """Write whole blocks of a view, which must not change until the file is finished, and keep the remainder."""
        whole = len(view) - len(view) % BLOCK
        for start in range(0, whole, BLOCK):
            self.write(view[start : start + BLOCK])
        self.add(view[whole:])

    def add(self, view: memoryview) -> None:
        """Copy bytes into the current block, which is written when it is full."""
        while view:
            buffer = self._buffer()
            taken = min(len(view), BLOCK - self._filled)
            copy_bytes(view[:taken], buffer[self._filled : self._filled + taken])
            view, self._filled = view[taken:], self._filled + taken
            if self._filled == BLOCK:
                self._filled = 0
                self.write(buffer)

    def write(self, block: memoryview) -> None:
        """Write a block, which must not change until this writer's next turn."""
        writer = self._writers[self._number % _WRITERS]
        writer.wait()
        self._reserve(len(block))
        start, self._size = self._size, self._size + len(block)
        self._number += 1
        if len(block) == BLOCK:
            writer.start(lambda: self._write_directly(block, start))
        else:
            self._wait()
            self._write_through_cache(block, start)

    def finish(self) -> None:
        """Write the last block, and wait for all writers: none may write to a descriptor that is closed."""
        try:
            if self._filled:
                self.write(self._buffer()[: self._filled])
        finally:
            try:
                self._wait()
            finally:
                self._close()

    def _close(self) -> None:
        for writer in self._writers:
            writer.close()
        _spare.extend(self._buffers.values())
        del _spare[_WRITERS:]
        if self._direct is not None:
            os.close(self._direct)
        if self._reserved > self._size:  # to reserve space has made the file longer
            os.ftruncate(self._descriptor, self._size)

    def _buffer(self) -> memoryview:
        """The current block. Its previous content has been written."""
        turn = self._number % _WRITERS
        if turn not in self._buffers:
            self._buffers[turn] = _block()
        if not self._filled:
            self._writers[turn].wait()
        return self._buffers[turn]

    def _reserve(self, more: int) -> None:
        if not self._can_reserve or self._size + more <= self._reserved or more < BLOCK:
            return
        step = _RESERVED if self._expected is None else min(_RESERVED, self._expected - self._size)
        try:
            self._can_reserve = reserve(self._descriptor, self._size, step)
        except OSError:
            if self._expected is not None:  # all of these bytes will be written
                raise
            self._can_reserve = False  # the bytes that really come may fit: the write will show it
        if self._can_reserve:
            self._reserved = self._size + step

    def _wait(self) -> None:
        """Wait for all writers, also after an error or an interrupt, then raise the first of them."""
        errors = []
        for writer in self._writers:
            while True:
                try:
                    writer.wait()
                except BaseException as error:
                    errors.append(error)
                if not writer.busy:
                    break
        if errors:
            raise errors[0]

    def _write_directly(self, block: memoryview, start: int) -> None:
        """Write a block with direct I/O; through the page cache where that is refused."""
        written = 0
        if self._direct is not None:
            try:
                written = os.pwrite(self._direct, block, start)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        if written < len(block):
            self._write_through_cache(block[written:], start + written)

    def _write_through_cache(self, view: memoryview, start: int) -> None:
        while view:
            written = os.pwrite(self._descriptor, view, start)
            view, start = view[written:], start + written


def _block() -> memoryview:
    with suppress(IndexError):
        return _spare.pop()
    return allocate_aligned(BLOCK)


def _opened_directly(descriptor: int) -> int | None:
    """A second descriptor of the file, for direct I/O; None where that is refused."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_CLOEXEC | O_DIRECT) if O_DIRECT else None
    except OSError:
        return None


_MOST_FILES = 64  # of a group, each of which may hold a file descriptor
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_NO_HINTS = {errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP}


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def write_file(folder: int, name: str, pieces: Iterable[Buffer]) -> None:
    """Create a file in an open folder, and return when its bytes would survive a crash."""
    descriptor = os.open(name, _NEW, 0o666, dir_fd=folder)
    try:
        write_durably(descriptor, pieces)
    finally:
        os.close(descriptor)


@dataclass(eq=False)
class UnnamedFile:
    """A file under its temporary name, with the key it is written for and the version that it may replace."""

    key: str
    folder: int  # open until the group has ended
    temporary: str
    over: str | None
    descriptor: int | None = None  # open until the file is synced

    def sync(self) -> None:
        """Make the bytes durable, if they are not."""
        if self.descriptor is not None:
            sync(self.descriptor)
            self._close()

    def discard(self) -> None:
        """Close the file, and remove it where it has not got its name."""
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            os.unlink(self.temporary, dir_fd=self.folder)

    def _close(self) -> None:
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


@dataclass
class WriteGroup:
    """The files of a group that have been written, and have no names yet."""

    files: list[UnnamedFile] = field(default_factory=list)
    failed: Exception | None = None  # the first error: the kernel reports a failed fsync once
    _open: dict[tuple[int, str], int] = field(default_factory=dict)
    _folders: dict[str, int] = field(default_factory=dict)  # descriptors

    @property
    def is_full(self) -> bool:
        return len(self.files) >= _MOST_FILES

    def folder(self, key: str, make: Callable[[str], int]) -> int:
        """The folder of that key, which stays open until the group has ended."""
        if key not in self._folders:
            self._folders[key] = make(key)
        return self._folders[key]

    def write(self, folder: int, name: str, pieces: Iterable[Buffer]) -> None:
        """Write a file. A small one is only sent on its way to the disk: `UnnamedFile.sync` waits for it."""
        descriptor = self._open[folder, name] = os.open(name, _NEW, 0o666, dir_fd=folder)
        stable = StablePieces.of(pieces)
        if stable is not None and is_small(stable):
            write_small(descriptor, stable)
            _start_writeback(descriptor)
        else:
            write_durably(descriptor, pieces)
            os.close(self._open.pop((folder, name)))

    def add(self, file: UnnamedFile, make: Callable[[int, str], None]) -> None:
        """Create a file under its temporary name."""
        self.files.append(file)
        try:
            make(file.folder, file.temporary)
        except BaseException:
            self.files.remove(file)
            file.descriptor = self._open.pop((file.folder, file.temporary), None)
            file.discard()
            raise
        file.descriptor = self._open.pop((file.folder, file.temporary), None)

    def keys_by_folder(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for file in self.files:
            found.setdefault(file.folder, []).append(file.key)
        return found

    def discard(self) -> None:
        """Remove what has not got its name."""
        for file in self.files:
            file.discard()
        self.files.clear()
        for opened in (self._open, self._folders):  # an interrupt came before the file was noted
            while opened:
                with suppress(OSError):
                    os.close(opened.popitem()[1])


def _start_writeback(descriptor: int) -> None:
    """Let the disk begin, so that a later fsync of one file of a group commits all of them to the journal at once."""
    call = c_function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if call is None or call(descriptor, 0, 0, _WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code not in _NO_HINTS:  # space that was promised may turn out to be missing only here
        raise OSError(code, os.strerror(code))
