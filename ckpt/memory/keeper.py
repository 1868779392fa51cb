"""The keeper: a small process beside a run, which outlives it and cleans up after it.

It watches the folder of the run in memory, and ends with it. When no process of the run has lived for a while, it
removes the folder. Where the tmpfs is too small it also holds the memory of the snapshots' files.

Run by its path with `python -I -S`, so that it stays small: it imports the standard library, and nothing of ckpt.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import stat
import sys
import time
from contextlib import suppress

RUN, ALIVE = "run.json", "alive"  # as in ckpt.memory.place, which would triple the size of this process
LOCK, LOG = "keeper.lock", "keeper.log"
HELD, ASKED = "held", ".asked"
MEMFD = "/memfd:ckpt (deleted)"  # as in ckpt.storage.local.volatile
_TICK = 0.25  # seconds
_TO_OPEN = 0.5  # seconds: opening a name takes microseconds
_SOON = 0.01  # seconds: who has asked for one file asks for more
_TOUCH = 60.0  # seconds between two notes that the run lives
_LOOKS = 3


class Taken(Exception):  # noqa: N818 - not a failure
    """Another keeper has the folder. Its text is what that one has written into the lock file."""


class Keeper:
    """Watches one folder, and removes it when nobody has lived there for `linger` seconds."""

    def __init__(self, path: str, linger: float) -> None:
        self.path = path
        self._linger = linger
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._lock = self._take_lock()
        self._alive = self._open(ALIVE, os.O_RDONLY)
        self._files = HeldFiles(f"{path}/{HELD}")
        self._touched = time.monotonic()
        self._hurry = False
        self._deserted: float | None = None  # since when nobody lives
        signal.signal(signal.SIGTERM, self._terminate)
        for ignored in (signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)

    @property
    def identity(self) -> str:
        return f"{os.getpid()} {_start_time()}"

    def run(self) -> None:
        """Watch the folder until it is gone. Remove the folder once no process of the run has been alive for `linger`
        seconds."""
        while self._is_there():
            time.sleep(_SOON if self._files.tend() else _TICK)
            if self._anybody_lives():
                self._deserted = None
                self._touch()
                continue
            self._deserted = self._deserted or time.monotonic()
            expired = time.monotonic() - self._deserted >= self._linger
            if (self._hurry or expired or not self._has(RUN)) and self._finish():
                return

    def log(self, text: str) -> None:
        """Add a line to the log in the folder."""
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} keeper {os.getpid()}: {text}\n"
        try:
            descriptor = self._open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError:  # the folder is gone
            return
        with open(descriptor, "a") as file:
            file.write(line)

    def _terminate(self, *_: object) -> None:
        self._hurry = True

    def _take_lock(self) -> int:
        descriptor = self._open(LOCK, os.O_RDWR | os.O_CREAT)
        if not _lock_alone(descriptor):
            raise Taken(os.pread(descriptor, 100, 0).decode())
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, self.identity.encode(), 0)
        return descriptor

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self._folder))
        except OSError:
            return False

    def _has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _anybody_lives(self) -> bool:
        alone = _lock_alone(self._alive)
        fcntl.flock(self._alive, fcntl.LOCK_UN)
        return not alone

    def _touch(self) -> None:
        """Note that the run lives, by which others on this host know how long it has not: as `place.note_life`."""
        if time.monotonic() - self._touched > _TOUCH:
            self._touched = time.monotonic()
            os.utime(self._alive, (self._touched, self._touched))

    def _finish(self) -> bool:
        """End: remove the folder, with its lock held so that nobody comes to live in it. False if somebody has."""
        if self._hurry and not self._files.descriptors and self._has(RUN):
            return True  # ended by a signal, with snapshots that are only here: they are left for the next run
        if not _lock_alone(self._alive):
            return False
        import shutil

        shutil.rmtree(self.path, ignore_errors=True)
        return True

    def _open(self, name: str, flags: int) -> int:
        """A regular file of the folder with no other name: whatever else is there is neither waited for nor written."""
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=self._folder)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
            return descriptor
        os.close(descriptor)
        raise OSError(f"{name} is a link or not a regular file")


class HeldFiles:
    """The memory of files that are too large for the tmpfs, held by descriptors of memfds.

    In its folder, a process of the run asks with a link `<token>.asked` to a memfd of its own. The answer is a link
    `<token>` to a descriptor here. The names of the file are further hard links of that one, as the kernel counts them:
    memory that nobody asks for any more, and that has no other name, is free, but for a moment in which somebody who
    has just looked its name up may still open it.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.descriptors: dict[str, int] = {}  # by token
        self._unnamed: dict[str, float] = {}  # by token: since when
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:  # every file takes one
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def tend(self) -> bool:
        """Take what is asked for, and free what is not needed. Returns whether anybody has asked."""
        try:
            names = os.listdir(self._folder)
        except OSError:  # the folder is gone: the keeper ends soon
            return False
        asked = [name for name in names if name.endswith(ASKED)]
        for name in asked:
            self._take(name)
        unnamed = {token for token in self.descriptors if f"{token}{ASKED}" not in asked and self._names(token) <= 1}
        self._unnamed = {token: self._unnamed.get(token, time.monotonic()) for token in unnamed}
        for token, since in self._unnamed.items():
            if time.monotonic() - since > _TO_OPEN:
                self._free(token)
        return bool(asked)

    def _take(self, name: str) -> None:
        token, request = name.removesuffix(ASKED), f"{self._folder}/{name}"
        try:
            descriptor = os.open(request, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # who has asked has ended
            _unlink(request)
            return
        if token in self.descriptors:
            os.close(descriptor)
        elif os.readlink(f"/proc/self/fd/{descriptor}") != MEMFD:
            os.close(descriptor)
            _unlink(request)
        else:
            self.descriptors[token] = descriptor
            with suppress(OSError):  # the folder is being removed
                os.symlink(f"/proc/{os.getpid()}/fd/{descriptor}", f"{self._folder}/{token}")

    def _names(self, token: str) -> int:
        try:
            return os.lstat(f"{self._folder}/{token}").st_nlink
        except OSError:
            return 0

    def _free(self, token: str) -> None:
        _unlink(f"{self._folder}/{token}")
        os.close(self.descriptors.pop(token))


def main() -> None:
    """Detach from whoever has started this, say `ready` and who it is on standard output, and keep the folder."""
    path, linger = sys.argv[1], float(sys.argv[2])
    if os.fork():
        os._exit(0)
    os.umask(0o077)
    os.chdir("/")
    try:
        keeper = Keeper(path, linger)
    except Taken as taken:
        print("ready", taken, flush=True)
        return
    except OSError as error:
        print("failed", error, flush=True)
        return
    print("ready", keeper.identity, flush=True)
    _close_standard_streams()
    try:
        keeper.run()
    except Exception as error:
        keeper.log(f"ended by {type(error).__name__}: {error}")
        raise


def _unlink(path: str) -> None:
    with suppress(OSError):  # removed meanwhile
        os.unlink(path)


def _close_standard_streams() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)


def _lock_alone(descriptor: int) -> bool:
    """Lock a file exclusively. Tried again: somebody who only looks whether it is locked holds it for an instant."""
    for _ in range(_LOOKS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.01)
        else:
            return True
    return False


def _start_time() -> str:
    """When this process started, in clock ticks since boot: see `ckpt.util.threads`."""
    with open("/proc/self/stat") as file:
        return file.read().rpartition(")")[2].split()[19]


if __name__ == "__main__":
    main()
