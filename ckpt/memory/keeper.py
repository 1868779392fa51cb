"""The keeper: a small process beside a run, which outlives it and cleans up after it.

It watches the folder of the run in memory, and ends with it. When no process of the run has lived for a while, it has
the newest snapshot saved to the root (`ckpt.memory.rescue`, in a process of its own); after a longer while it removes
the folder. Where the tmpfs is too small it also holds the memory of the snapshots' files.

Run by its path with `python -I -S`, so that it stays small: it imports the standard library, and nothing of ckpt.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import stat
import sys
import time
from contextlib import suppress
from typing import Any

RUN, ALIVE = "run.json", "alive"  # as in ckpt.memory.place, which would triple the size of this process
LOCK, LOG = "keeper.lock", "keeper.log"
HELD, ASKED = "held", ".asked"
MEMFD = "/memfd:ckpt (deleted)"  # as in ckpt.storage.local.volatile
DONE, REFUSED = 0, 3  # exit statuses of the rescue; after any other it is tried again
_TICK = 0.25  # seconds
_TO_OPEN = 0.5  # seconds: opening a name takes microseconds
_SOON = 0.01  # seconds: who has asked for one file asks for more
_TOUCH = 60.0  # seconds between two notes that the run lives
_RETRY = 30.0  # seconds between two attempts to rescue
_GRACE = 10.0  # seconds after its deadline until the rescue is killed
_LOOKS = 3
_MOST_FACTS = 64 << 10  # characters


class Taken(Exception):  # noqa: N818 - not a failure
    """Another keeper has the folder. Its text is what that one has written into the lock file."""


class Keeper:
    """Watches one folder. `settings`: `linger` seconds, and `library` (where ckpt is)."""

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        self.path = path
        self.settings = settings
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._lock = self._take_lock()
        self._alive = self._open(ALIVE, os.O_RDONLY)
        self._files = HeldFiles(f"{path}/{HELD}")
        self._touched = time.monotonic()
        self._hurry = False
        self._deserted: float | None = None  # since when nobody lives
        self._rescue = RescueProcess(self)
        signal.signal(signal.SIGTERM, self._terminate)
        for ignored in (signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)

    @property
    def identity(self) -> str:
        return f"{os.getpid()} {_start_time()}"

    def run(self) -> None:
        """Return when the folder is gone, or was removed because nobody has lived for the time of `linger`."""
        while self._is_there():
            time.sleep(_SOON if self._files.tend() else _TICK)
            if self._anybody_lives():
                self._deserted = None
                self._touch()
                self._rescue.reset()
                continue
            self._deserted = self._deserted or time.monotonic()
            if self._rescue.tend(time.monotonic() - self._deserted, hurry=self._hurry):
                continue
            expired = time.monotonic() - self._deserted >= self.settings["linger"]
            # what is in the root is not needed here: whoever removes it there, to go back, must not find it again
            over = self._hurry or expired or self._rescue.has_saved or not self._has(RUN)
            if over and self._finish():
                return

    def facts(self) -> dict[str, Any]:
        """What the run says of itself now: a restart may have changed it."""
        try:
            with open(self._open(RUN, os.O_RDONLY)) as file:
                facts = json.loads(file.read(_MOST_FACTS))
        except (OSError, ValueError, RecursionError):
            facts = None
        return facts if isinstance(facts, dict) else {}

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
        if self._hurry and not self._files.descriptors and self._has(RUN) and not self._rescue.has_saved:
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
        raise OSError(f"{name} is no file of this folder alone")


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


class RescueProcess:
    """The process that saves the newest snapshot to the root: when it is due, and what has become of it."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._child: int | None = None
        self._kill_at = 0.0
        self.reset()

    def reset(self) -> None:
        """Somebody lives. A process at work notices that by itself, and gives way."""
        if self._child is not None:
            self._reap()
        self._ended = False
        self.has_saved = False
        self._not_before = 0.0

    def tend(self, deserted: float, *, hurry: bool) -> bool:
        """Start it when it is due, after so many seconds without anybody. Returns whether it is at work."""
        if self._child is not None:
            self._reap(hurry=hurry)
        elif not self._ended and self._is_due(deserted, hurry=hurry):
            self._start()
        return self._child is not None

    def _is_due(self, deserted: float, *, hurry: bool) -> bool:
        wanted = self._keeper.facts().get("rescue")
        after = min(float(wanted["after"]), self._keeper.settings["linger"]) if wanted else 0.0
        return bool(wanted) and (hurry or (deserted >= after and time.monotonic() >= self._not_before))

    def _start(self) -> None:
        """SIGTERM is blocked in it from its first instruction: it ends by itself, or at its deadline."""
        path = os.pathsep.join(filter(None, [self._keeper.settings["library"], os.environ.get("PYTHONPATH")]))
        log = f"{self._keeper.path}/{LOG}"
        append = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._child = os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", "ckpt.memory.rescue", self._keeper.path],
                {**os.environ, "PYTHONPATH": path},
                file_actions=[(os.POSIX_SPAWN_OPEN, 2, log, append, 0o600)],
                setsigmask=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
            )
        except OSError as error:
            self._keeper.log(f"no process to rescue the newest snapshot: {error}")
            self._ended = True
            return
        deadline = float((self._keeper.facts().get("rescue") or {}).get("deadline", 0.0))
        self._kill_at = time.monotonic() + deadline + _GRACE

    def _reap(self, *, hurry: bool = False) -> None:
        assert self._child is not None
        ended, status = os.waitpid(self._child, os.WNOHANG)
        if not ended:
            if time.monotonic() > self._kill_at:
                os.kill(self._child, signal.SIGKILL)
            return
        self._child = None
        code = os.waitstatus_to_exitcode(status)
        self.has_saved = code == DONE
        self._ended = code in (DONE, REFUSED) or hurry
        self._not_before = time.monotonic() + _RETRY
        if code < 0:
            self._keeper.log(f"the rescue was ended by signal {-code}")


def main() -> None:
    """Detach from whoever has started this, say `ready` and who it is on standard output, and keep the folder."""
    path, settings = sys.argv[1], json.loads(sys.argv[2])
    if os.fork():
        os._exit(0)
    os.umask(0o077)
    os.chdir("/")
    try:
        keeper = Keeper(path, settings)
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
