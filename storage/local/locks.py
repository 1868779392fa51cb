"""Locks on files and folders below a directory. The kernel releases them when their process dies."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import pwd
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.errors import LockedError, StorageError
from ckpt.storage.base import LostError
from ckpt.storage.local.files import (
    NO_LOCKS,
    NOTHING_THERE,
    OWN_LOCK,
    NotRegularError,
    Tree,
    has_one_name,
    not_regular,
    open_regular,
)

_log = logging.getLogger("ckpt")


_PATIENCE = 30.0  # seconds that a rename, which is all that is done under its lock, may take others
_RELEASING = 0.5  # seconds that a reader waits for the one who is just removing the file of the lock
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_RENAMES = f".renames{OWN_LOCK}"
_LONGEST_NAME = 255  # bytes


@dataclass(frozen=True, eq=False)
class HeldLock:
    """An flock that this process holds."""

    key: str  # of its file
    path: Path
    descriptor: int
    noted: bool  # the holder's note is in it
    lasting: bool  # it stays when it is released

    def is_in_place(self) -> bool:
        """Whether the path still leads to the locked file. A lock on a file that was removed excludes nobody."""
        try:
            there = os.lstat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(self.descriptor))

    def write_note(self, text: str) -> None:
        """Replace the note. A file with a second name is somebody else's too: it is locked, and not written to."""
        if has_one_name(self.descriptor):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, text.encode(), 0)


class LocalLocks:
    """The locks of one local storage that this process holds, each an flock on a file of ckpt's own.

    Whoever may only read a folder can open none of these files, and so can keep nobody from anything: an flock on the
    folder itself needs no more than that. Such a reader holds nothing.

    A key whose name begins with a dot is a lock file, which stays. For any other key it is a file beside it, with
    `OWN_LOCK` in its name, which the last holder removes.
    """

    def __init__(self, tree: Tree, root: Path, shown: str) -> None:
        self._tree = tree
        self._root = root
        self._shown = shown
        self._exclusive: list[HeldLock] = []  # lock files of the holders in this storage

    def acquire(self, key: str, *, shared: bool, note: str) -> HeldLock | None:
        """Lock a key. None where the filesystem has no locks, or this process may only read."""
        above, _, name = key.rpartition("/")
        lasting = self._is_lock_file(key, shared=shared)
        file = key if lasting else f"{above}/{_lock_name(name)}".lstrip("/")
        try:
            held = self._wait(key, file, shared=shared, lasting=lasting, patience=_RELEASING if shared else 0.0)
        except OSError as error:
            if not shared or error.errno not in _REFUSED:
                raise
            _say_once(
                logging.INFO,
                "%s is read-only for this process, so others may remove files while ckpt reads them.",
                self._shown,
            )
            return None
        if held is not None and note and not shared and lasting:
            held = replace(held, noted=True)
            self._exclusive.append(held)
            try:
                held.write_note(note)
            except BaseException:
                self.release(held)
                raise
        return held

    @contextmanager
    def renaming(self) -> Iterator[None]:
        """One at a time gives a file a name that may be taken. Waits for the others, but not without end."""
        try:
            held = self._wait("", _RENAMES, shared=False, lasting=False, patience=_PATIENCE)
        except LockedError as error:  # for which a checkpoint would be taken to be in use
            raise StorageError(
                f"{error} A process needs that lock only to rename a file, but ckpt has waited {_PATIENCE:.0f} s for "
                "it. Nothing was changed. End that process."
            ) from None
        try:
            yield
        finally:
            if held is not None:
                self.release(held)

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
        """Remove the note, or the file. A failure is ignored: what is left does no harm."""
        if held.noted:
            self._exclusive.remove(held)
        with suppress(OSError):
            if held.noted:
                held.write_note("")  # the next holder may leave none
            elif not held.lasting:
                fcntl.flock(held.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # or others hold it too
                if held.is_in_place():
                    self._remove(held.key)

    def _remove(self, key: str) -> None:
        with self._tree.held(key) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def confirm(self) -> None:
        """Raise if a lock file that this process holds was removed: others may hold the root by now."""
        for held in self._exclusive:
            if held.descriptor in _held and not self._is_in_place(held):  # a forked child has closed its copy
                raise LostError(
                    f"somebody removed {self._shown}/{held.key}, or all of {self._shown}, while this run held the "
                    "lock. Another run may have written to the root."
                )

    def _is_in_place(self, held: HeldLock) -> bool:
        try:
            return held.is_in_place()
        except OSError as error:
            raise StorageError(
                f"could not check this run's lock {self._shown}/{held.key}: {error.strerror or error}. Nothing was "
                "changed there. Try again."
            ) from error

    def _is_lock_file(self, key: str, *, shared: bool) -> bool:
        """Whether the key itself is the file to lock. What is under it must be a file or a folder, if anything."""
        try:
            mode = self._tree.status(key).st_mode
        except NOTHING_THERE:
            if shared:
                raise
            mode = stat.S_IFREG
        is_named_so = key.rpartition("/")[2].startswith(".")
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            error = not_regular(self._root / key)
            raise self._none_of_ours(key, error) if is_named_so else error  # which is: nothing is there
        return is_named_so and not stat.S_ISDIR(mode)

    def _wait(self, key: str, file: str, *, shared: bool, lasting: bool, patience: float) -> HeldLock | None:
        """Lock a file, and be sure that it is the one that others would lock."""
        end, pause = time.monotonic() + patience, 0.001
        while True:
            is_last = time.monotonic() >= end  # who holds it is asked then only: the system lists all locks of all
            try:
                with no_fork:
                    held = self._locked(key, file, shared=shared, lasting=lasting, tell=is_last)
                    if held is None:
                        return None
                    with _closed_on_error(held.descriptor):
                        in_place = held.is_in_place()
                    if in_place:
                        _held.add(held.descriptor)
                        return held
                    close(held.descriptor)  # its previous holder removed it before releasing it
            except LockedError:
                if is_last:
                    raise
                time.sleep(pause)
                pause = min(0.05, 2 * pause)

    def _locked(self, key: str, file: str, *, shared: bool, lasting: bool, tell: bool) -> HeldLock | None:
        descriptor = self._opened(file, make=not (shared and lasting))
        with _closed_on_error(descriptor):
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    where = "/".join(filter(None, (self._shown, key)))
                    holder = (_note_in(descriptor) or _holders(descriptor)) if tell else "by somebody else."
                    raise LockedError(f"{where} is held: {holder}") from None
                if error.errno not in NO_LOCKS:
                    raise
                _say_once(
                    logging.WARNING,
                    "%s: this filesystem has no locks. Make sure that only one run writes there at a time.",
                    str(self._root),
                )
                close(descriptor)
                if not lasting:
                    self._remove(file)
                return None
            return HeldLock(file, self._root / file, descriptor, noted=False, lasting=lasting)

    def _opened(self, file: str, *, make: bool) -> int:
        """A descriptor of a lock's file, which nobody may open who may not write to its folder."""
        with self._tree.held(file, make=make) as (folder, name):
            try:
                flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
                descriptor = open_regular(name, flags, 0o600, dir_fd=folder)
            except NotRegularError as error:
                raise self._none_of_ours(file, error) from None
            with _closed_on_error(descriptor), suppress(PermissionError):
                _keep_to_writers(descriptor, folder)
            return descriptor

    def _none_of_ours(self, key: str, error: NotRegularError) -> StorageError:
        return StorageError(
            f"could not lock {self._shown}/{key}: {error.strerror}, not made by ckpt. Remove it, then try again."
        )


def _lock_name(name: str) -> str:
    """The name of the file beside another by which that is locked."""
    beside = f".{name}{OWN_LOCK}"
    if len(os.fsencode(beside)) > _LONGEST_NAME:
        beside = f".{hashlib.sha256(os.fsencode(name)).hexdigest()}{OWN_LOCK}"
    return beside


def _keep_to_writers(descriptor: int, folder: int) -> None:
    """Let those open the file of a lock who may remove it: its owner, and whoever may write to its folder."""
    about, above = os.fstat(descriptor), os.fstat(folder).st_mode
    others = 0 if above & stat.S_ISVTX else above & 0o022
    wanted = 0o600 | others | others << 1
    if about.st_uid == os.geteuid() and stat.S_IMODE(about.st_mode) != wanted and about.st_nlink == 1:
        os.fchmod(descriptor, wanted)


def _note_in(descriptor: int) -> str:
    """The note of a holder; empty if it has none. The bytes of a file with a second name are not shown to anybody."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        return ""
    return os.pread(descriptor, 4096, 0).decode(errors="replace")


def _holders(descriptor: int) -> str:
    """Who holds an flock on an open file, as far as the system tells."""
    inode, found = os.fstat(descriptor).st_ino, []
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():  # 1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF
            words = line.split()
            if words[1] == "FLOCK" and int(words[5].rpartition(":")[2]) == inode:
                found.append(_process(words[4]))
    return f"by {' and '.join(found) or 'somebody else'}."


def _process(pid: str) -> str:
    """A process, its user, and since when it runs."""
    uid = os.stat(f"/proc/{pid}").st_uid
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    began = time.time() - float(Path("/proc/uptime").read_text().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began))
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return f"process {pid} of user {user}, running since {since}"


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


_held: set[int] = set()
# while it is held no child is forked, which would inherit a lock that `_held` does not have yet
no_fork = threading.RLock()


def _release_in_child() -> None:
    # A data loader's worker is a fork that may outlive a killed trainer for seconds. With a copy of the descriptor it
    # would keep the lock, and the restarted trainer would be refused.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()
    no_fork.release()


os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=_release_in_child)

_said: set[tuple[int, str]] = set()


def _say_once(level: int, text: str, root: str) -> None:
    if (level, root) not in _said:
        _said.add((level, root))
        _log.log(level, text, root)
