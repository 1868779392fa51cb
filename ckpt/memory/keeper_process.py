"""Starts the keeper of a run's folder in memory, and finds the one that lives."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from ckpt.errors import StorageError
from ckpt.memory import keeper
from ckpt.memory.place import MemoryPlace, linger_seconds
from ckpt.root.signing import SIGN_VARIABLE
from ckpt.storage.local.files import open_regular
from ckpt.util.threads import start_time

_log = logging.getLogger("ckpt")
KEEPER_VARIABLE = "CKPT_MEMORY_KEEPER"  # `off`: no process is started
_PATIENCE = 20.0  # seconds for a process of a few megabytes to start
_PAUSE = 0.01


class KeeperError(StorageError):
    """No keeper could be started."""


@dataclass(frozen=True)
class KeeperProcess:
    """A keeper: its process id, and when it started, which tells it from a later process of the same id."""

    process: int
    started: str

    @property
    def is_alive(self) -> bool:
        return start_time(self.process) == self.started

    def wait(self, seconds: float) -> bool:
        """Wait at most this many seconds for the keeper to end. Returns True if the keeper has ended."""
        deadline = time.monotonic() + seconds
        while self.is_alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        return True


def start_keeper(place: MemoryPlace) -> KeeperProcess | None:
    """The keeper of a place: the one that lives, or a new one; None, with a warning, if none can be started.

    Where `CKPT_MEMORY_KEEPER` is `off`, none is, and nothing is said.

    It has a session of its own and outlives this process, its group and its terminal.
    """
    if is_turned_off():
        return None
    try:
        return require_keeper(place)
    except KeeperError as error:
        _log.warning(
            "ckpt could not start a keeper process for the snapshots in memory: %s A restart can still use the "
            "snapshots. If you don't restart, they stay in memory until the next run on this host removes them.", error,
        )  # fmt: skip
        return None


def require_keeper(place: MemoryPlace) -> KeeperProcess:
    """As `start_keeper`, but raises a `KeeperError` if none can be started."""
    if is_turned_off():
        raise KeeperError(f"{KEEPER_VARIABLE}=off.")
    try:
        found = living_keeper(place) or _start(place)
        place.record(keeper={"process": found.process, "started": found.started})
    except KeeperError:
        raise
    except OSError as error:
        raise KeeperError(f"{error.strerror or error}.") from error
    return found


def living_keeper(place: MemoryPlace) -> KeeperProcess | None:
    """The keeper that has the folder's lock; None if none has."""
    try:
        descriptor = open_regular(place.path / keeper.LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _parsed(os.read(descriptor, 100).decode(errors="replace"))
    finally:
        os.close(descriptor)
    return None


def last_log_line(place: MemoryPlace) -> str:
    """The last line of the keeper's log; empty if it has none."""
    try:
        descriptor = open_regular(place.path / keeper.LOG, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return ""
    with open(descriptor, errors="replace") as file:
        lines = file.read(1 << 20).splitlines()
    return lines[-1] if lines else ""


def is_turned_off() -> bool:
    """Whether the user wants no keeper."""
    return os.environ.get(KEEPER_VARIABLE, "").lower() == "off"


def _start(place: MemoryPlace) -> KeeperProcess:
    if not sys.executable:
        raise KeeperError("sys.executable is empty.")
    command = [sys.executable, "-I", "-S", os.path.abspath(keeper.__file__), str(place.path), str(linger_seconds())]
    process = subprocess.Popen(  # noqa: S603 - this interpreter, and our own file
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != SIGN_VARIABLE},  # it outlives the run
    )
    try:
        printed, _ = process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise KeeperError(f"{command[0]} did not start within {_PATIENCE:g} s.") from None
    word, _, rest = printed.strip().partition(" ")
    found = _parsed(rest) if word == "ready" else None
    if found is None:
        raise KeeperError(f"{command[0]} ended with status {process.returncode}: {rest or 'it said nothing'}.")
    return found


def _parsed(text: str) -> KeeperProcess | None:
    words = text.split()
    return KeeperProcess(int(words[0]), words[1]) if len(words) == 2 and words[0].isdigit() else None
