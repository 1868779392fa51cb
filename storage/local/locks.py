"""Locks on files and folders below a directory. The kernel releases them when their process dies."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt.errors import LockedError, StorageError
from ckpt.storage.base import LostError
from ckpt.storage.local.files import NO_LOCKS, NotRegularError, has_one_name, make_directories, open_regular

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, eq=False)
class HeldLock:
    """An flock that this process holds."""

    key: str
    path: Path
    descriptor: int
    noted: bool  # it is a lock file with the holder's note in it
    made: bool  # it is an empty folder, created for the lock and removed with it

    def is_in_place(self) -> bool:
        """Whether the path still leads to the locked file. A lock on a file that was removed excludes nobody."""
        try:
            there = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(self.descriptor))

    def write_note(self, text: str) -> None:
        """Replace the note. A file with a second name is somebody else's too: it is locked, and not written to."""
        if has_one_name(self.descriptor):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, text.encode(), 0)


class LocalLocks:
    """The locks of one local storage that this process holds.

    A key whose name begins with a dot is a lock file, created if it is missing. For any other key the folder or file
    itself is locked; if there is none, an empty folder is created for as long as the lock lasts. A lock file would be
    in the way of the checkpoint that is saved under that name later.
    """

    def __init__(self, root: Path, shown: str) -> None:
        self._root = root
        self._shown = shown
        self._exclusive: list[HeldLock] = []  # lock files of the holders in this storage

    def acquire(self, key: str, path: Path, *, shared: bool, note: str) -> HeldLock | None:
        """Lock the file or folder at `path`. None where the filesystem has no locks."""
        while True:
            with no_fork:
                held = self._locked(key, path, shared=shared, note=note)
                if held is None:
                    return None
                with _closed_on_error(held.descriptor):
                    in_place = held.is_in_place()
                if in_place:
                    _held.add(held.descriptor)
                    break
                close(held.descriptor)  # its previous holder removed it before releasing it
        if held.noted:
            self._exclusive.append(held)
            try:
                held.write_note(note)
            except BaseException:
                self.release(held)
                raise
        return held

    def release(self, held: HeldLock) -> None:
        with no_fork:
            if held.descriptor not in _held:  # a forked child has closed its copy already
                return
            _held.discard(held.descriptor)
            try:
                self._leave(held)
            finally:
                close(held.descriptor)

    def _leave(self, held: HeldLock) -> None:
        """Remove the note and the folder of a lock. A failure is ignored: what is left does no harm."""
        if held.noted:
            self._exclusive.remove(held)
            with suppress(OSError):
                held.write_note("")  # the next holder may leave none
        with suppress(OSError):  # not empty any more
            if held.made and held.is_in_place():
                held.path.rmdir()

    def confirm(self) -> None:
        """Raise if a lock file that this process holds was removed: others may hold the root by now."""
        for held in self._exclusive:
            if held.descriptor in _held and not self._is_in_place(held):  # a forked child has closed its copy
                raise LostError(
                    f"{self._shown}/{held.key} was removed, alone or with all of {self._shown}, while this run held "
                    "it: nothing kept others from writing there."
                )

    def _is_in_place(self, held: HeldLock) -> bool:
        try:
            return held.is_in_place()
        except OSError as error:
            raise StorageError(
                f"could not check {self._shown}/{held.key}, by which this run holds {self._shown}: "
                f"{error.strerror or error}. Nothing was changed there. Try again."
            ) from error

    def _locked(self, key: str, path: Path, *, shared: bool, note: str) -> HeldLock | None:
        descriptor, made = self._opened(path, shared=shared)
        with _closed_on_error(descriptor):
            return self._flocked(key, path, descriptor, shared=shared, note=note, made=made)

    def _flocked(
        self, key: str, path: Path, descriptor: int, *, shared: bool, note: str, made: bool
    ) -> HeldLock | None:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            holder = _note_in(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise LockedError(f"{self._shown}/{key} is held: {holder or 'by somebody else.'}") from None
            if made:
                with suppress(OSError):
                    path.rmdir()
            if error.errno in NO_LOCKS:
                _warn_without_locks(str(self._root))
                close(descriptor)
                return None
            raise
        noted = bool(note) and not shared and _is_lock_file(path) and stat.S_ISREG(os.fstat(descriptor).st_mode)
        return HeldLock(key, path, descriptor, noted=noted, made=made)

    def _opened(self, path: Path, *, shared: bool) -> tuple[int, bool]:
        """A descriptor of the file or folder to lock, and whether the folder was created for it."""
        if _is_lock_file(path) and not shared and not path.is_dir():
            make_directories(path.parent)
            return self._lock_file(path), False
        made = False
        if not shared and not path.exists():
            make_directories(path.parent)
            with suppress(FileExistsError):
                path.mkdir()
                made = True
        return _file_or_folder(path), made

    def _lock_file(self, path: Path) -> int:
        try:
            return open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except NotRegularError as error:
            shown = f"{self._shown}/{path.relative_to(self._root)}"
            raise StorageError(
                f"could not lock {shown}: {error.strerror}, and not of ckpt. Remove it, then try again."
            ) from None


def _file_or_folder(path: Path) -> int:
    """A descriptor to lock. Whatever is neither a file nor a folder, such as a named pipe, is as good as absent."""
    try:
        return open_regular(path)
    except IsADirectoryError:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _note_in(descriptor: int) -> str:
    """The note of a holder; empty if it has none. The bytes of a file with a second name are not shown to anybody."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        return ""
    return os.pread(descriptor, 4096, 0).decode(errors="replace")


def close(descriptor: int) -> None:
    """Close a descriptor and so release its lock, which happens even if close(2) reports an error."""
    with suppress(OSError):
        os.close(descriptor)


@contextmanager
def _closed_on_error(descriptor: int) -> Iterator[None]:
    """Close a descriptor on an error, or its lock would last as long as the process."""
    try:
        yield
    except BaseException:
        close(descriptor)
        raise


def _is_lock_file(path: Path) -> bool:
    return path.name.startswith(".")


_held: set[int] = set()
no_fork = (
    threading.RLock()
)  # while it is held no child is forked, which would inherit a lock that `_held` does not have yet


def _release_in_child() -> None:
    # A data loader's worker is a fork that may outlive a killed trainer for seconds. With a copy of the descriptor it
    # would keep the lock, and the restarted trainer would be refused.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()
    no_fork.release()


os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=_release_in_child)

_warned: set[str] = set()


def _warn_without_locks(root: str) -> None:
    if root not in _warned:
        _warned.add(root)
        _log.warning("%s: this filesystem has no locks. Make sure that only one run writes there at a time.", root)


_PATIENCE = 30.0  # seconds: it is held for a rename


@contextmanager
def locked_directory(folder: Path) -> Iterator[None]:
    """Hold a directory exclusively, waiting for the present holder to release it, but not without end."""
    with no_fork:  # a child must not get a copy of the lock
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock_in_time(descriptor, folder)
            yield
        finally:
            close(descriptor)


def _lock_in_time(descriptor: int, folder: Path) -> None:
    end, pause = time.monotonic() + _PATIENCE, 0.001
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in NO_LOCKS:
                return
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        if time.monotonic() > end:
            raise StorageError(  # not a LockedError, for which a checkpoint would be taken to be in use
                f"{folder} has been locked for {_PATIENCE:.0f} s by {_holders(descriptor)}. ckpt itself locks it only "
                "while it renames a file. End that process, or keep other users out of the folder. Nothing was changed."
            )
        time.sleep(pause)
        pause = min(0.05, 2 * pause)


def _holders(descriptor: int) -> str:
    """Who holds an flock on an open file, as far as the system tells."""
    status, found = os.fstat(descriptor), []
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():  # 1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF
            words = line.split()
            if words[1] == "FLOCK" and int(words[5].rpartition(":")[2]) == status.st_ino:
                found.append(f"process {words[4]} of user {os.stat(f'/proc/{words[4]}').st_uid}")
    return " and ".join(found) or "another process"
