"""The folder of a run in a host's memory: what it says of itself, who may find it, who lives in it, how it is removed.

A token, a file in the root, tells a folder that the root is still the one it belongs to: a root that was removed and
made anew has another one, or none. Imports no torch: `ckpt memory` uses it too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import platform
import re
import secrets
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from ckpt.errors import AbsentError, StorageError
from ckpt.storage import Staging, Storage, place_of
from ckpt.storage.local.files import has_one_name, open_regular
from ckpt.util.checked_json import Rule, broken_rules, is_count, is_mapping, is_text, parse_json
from ckpt.util.console import utc_now
from ckpt.util.threads import boot_id
from ckpt.version import __version__

_MOST_FACTS = 64 << 10  # bytes
_RULES = {
    "format": Rule(is_count, "a number"),
    "uid": Rule(is_count, "a number"),
    "created": Rule(is_text, "text"),
    "root_sha256": Rule(is_text, "text"),
    "versions": Rule(is_mapping(is_text), "names with text"),
}


def code_versions() -> dict[str, str]:
    """The versions by which a snapshot in memory is read only by the code that wrote it. Imports no torch."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {"ckpt": __version__, "python": platform.python_version(), "torch": torch}


def digest_of(root_identity: str) -> str:
    """What a folder records of its root's identity: enough to find it by, nothing to read a secret from."""
    return sha256(root_identity.encode()).hexdigest()


def read_facts(path: Path) -> dict[str, Any] | None:
    """The facts in a regular file of this user's; None if it is anything else."""
    try:
        descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_size > _MOST_FACTS:
            return None
        try:
            facts: Any = parse_json(file.read(_MOST_FACTS))
        except ValueError:
            return None
    return None if broken_rules(facts, _RULES) else dict(facts)


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Replace the file at once: a reader finds the old facts or the new ones."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        json.dump(facts, file, indent=1)
    os.replace(new, path)


class OpenDescriptors:
    """Descriptors of this process that are closed in every child that it forks.

    Open and add one, or discard and close it, with `guard` held: no child is forked meanwhile.
    """

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self._descriptors: set[int] = set()
        os.register_at_fork(
            before=self.guard.acquire, after_in_parent=self.guard.release, after_in_child=self._close_in_child
        )

    def add(self, descriptor: int) -> None:
        self._descriptors.add(descriptor)

    def discard(self, descriptor: int) -> None:
        self._descriptors.discard(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor. Does nothing in a forked child, which has already closed its copy of the descriptor."""
        if descriptor in self._descriptors:
            self._descriptors.discard(descriptor)
            os.close(descriptor)

    def _close_in_child(self) -> None:
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()
        self.guard.release()


FORMAT = 1
RUN, ALIVE, SLOTS = "run.json", "alive", "slots"
DIRECTORY_VARIABLE, LINGER_VARIABLE = "CKPT_MEMORY_DIR", "CKPT_MEMORY_LINGER"
LINGER = 3600.0  # seconds that a folder outlives the last process of its run
_DIRECTORY = "/dev/shm"  # noqa: S108  (the names in it are random, and made with mkdir)
_NAME = re.compile(r"ckpt-[0-9a-f]{32}")
_PATIENCE = 10.0  # seconds that a run waits for somebody who looks whether anybody lives
_PAUSE = 0.02
_REMOVALS = 3  # tries; what is still there then, the keeper removes
_held = OpenDescriptors()  # of the locks by which this process lives somewhere


class PlaceError(StorageError):
    """The folder in memory is gone, being removed, or cannot be made."""


def memory_directory() -> Path:
    """Where the folders of all runs are: `CKPT_MEMORY_DIR`, or the host's tmpfs."""
    return Path(os.environ.get(DIRECTORY_VARIABLE) or _DIRECTORY)


def linger_seconds() -> float:
    """How long a folder without any process is kept for a restart: `CKPT_MEMORY_LINGER` seconds, or an hour."""
    try:
        return float(os.environ.get(LINGER_VARIABLE) or LINGER)
    except ValueError:
        return LINGER


@dataclass
class MemoryPlace:
    """The folder `ckpt-<32 random hex digits>` of one run on one host, readable for its user alone.

    `facts` is its `run.json`. While a process of the run lives, it holds a shared flock on the file `alive`: whoever
    can lock that exclusively knows that none does.
    """

    path: Path
    facts: dict[str, Any]
    _alive: int | None = field(default=None, repr=False, compare=False)  # the descriptor of the lock

    @classmethod
    def find(cls, root_identity: str) -> MemoryPlace | None:
        """The folder of this root that this boot, user and code have made and used last; None if there is none.

        Folders of this user in which nobody has lived for the time of `linger_seconds` are removed on the way.
        """
        remove_expired()
        ours = [place for place in cls.list_places() if place._is_of(root_identity)]
        return min(ours, key=lambda place: place.idle_seconds, default=None)

    @classmethod
    def create(cls, root_identity: str, *, root_shown: str, **facts: Any) -> MemoryPlace:
        """Make a new folder under a name that nobody can guess, and live in it. `root_shown` must hold no secret."""
        path = memory_directory() / f"ckpt-{secrets.token_hex(16)}"
        facts = {
            "format": FORMAT,
            "versions": code_versions(),
            "boot": boot_id(),
            "uid": os.getuid(),
            "host": socket.gethostname(),
            "root": root_shown,
            "root_sha256": digest_of(root_identity),
            "created": utc_now(),
            "keeper": None,
            **facts,
        }
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            raise PlaceError(f"could not create a folder in {path.parent}: {error.strerror or error}.") from error
        place = cls(path, facts)
        try:
            place._fill()
        except BaseException:
            place.release()
            shutil.rmtree(path, ignore_errors=True)
            raise
        return place

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> MemoryPlace | None:
        """The folder at a path, if it is one of this user's; None if it is anything else."""
        path = Path(path)
        if not _NAME.fullmatch(path.name) or not _is_own_directory(path):
            return None
        facts = read_facts(path / RUN)
        fits = facts is not None and facts.get("format") == FORMAT and facts.get("uid") == os.getuid()
        return cls(path, facts) if facts is not None and fits else None

    @classmethod
    def list_places(cls) -> list[MemoryPlace]:
        """The folders of all runs of this user on this host."""
        found = (cls.open(path) for path in _named_paths())
        return [place for place in found if place is not None]

    @property
    def slots(self) -> Path:
        """The root in which the snapshots are, each a checkpoint."""
        return self.path / SLOTS

    @property
    def is_there(self) -> bool:
        """Whether the folder is still that of this run."""
        now = MemoryPlace.open(self.path)
        return now is not None and now.facts.get("created") == self.facts.get("created")

    @property
    def idle_seconds(self) -> float:
        """How long ago the last snapshot was begun, or a process was seen to live here."""
        return max(0.0, _age(self.path))

    def hold(self) -> None:
        """Live here, until `release` or the end of this process: forked children, which may outlive it, do not.

        Waits for somebody who just looks whether anybody lives. Raises `PlaceError` if the folder is being removed.
        """
        if self._alive is not None:
            return
        with _held.guard:
            descriptor = _open_alive(self.path)
            _held.add(descriptor)
        try:
            _lock_shared(descriptor, self.path)
            if not _is_same_file(descriptor, self.path / ALIVE):
                raise PlaceError(f"another process has just removed {self.path}.")
            note_life(descriptor)
        except BaseException:
            with _held.guard:
                _held.close(descriptor)
            raise
        self._alive = descriptor

    def note_life(self) -> None:
        """Note that this process lives here: others on this host know by it how long nobody has."""
        if self._alive is not None:
            note_life(self._alive)

    def release(self) -> None:
        """Stop living here. The folder is left for a restart."""
        descriptor, self._alive = self._alive, None
        if descriptor is not None:
            with _held.guard:
                _held.close(descriptor)

    def is_deserted(self) -> bool:
        """Whether no process of the run lives: false as long as anybody holds the folder, this process too."""
        with _all_alone(self.path) as alone:
            return alone

    def record(self, **facts: Any) -> None:
        """Write more facts into `run.json`, such as who the keeper is."""
        self.facts |= facts
        write_facts(self.path / RUN, self.facts)

    def remove(self) -> None:
        """Remove the folder and all that is in it, whoever lives here. Nobody finds it from the first moment on."""
        if _is_own_directory(self.path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path / RUN)
            for _ in range(_REMOVALS):  # a rank or the keeper may just have added a file
                shutil.rmtree(self.path, ignore_errors=True)
                if not self.path.exists():
                    break
        self.release()

    def remove_if_deserted(self) -> bool:
        """Remove the folder unless a process of the run lives. A process that starts meanwhile finds it gone."""
        return _remove_if_deserted(self.path)

    def _is_of(self, root_identity: str) -> bool:
        known = (self.facts.get("root_sha256"), self.facts.get("boot"), self.facts.get("versions"))
        return known == (digest_of(root_identity), boot_id(), code_versions())

    def _fill(self) -> None:
        os.close(os.open(self.path / ALIVE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        (self.path / SLOTS).mkdir(mode=0o700)
        self.hold()
        write_facts(self.path / RUN, self.facts)  # last: only then is it found


def remove_expired() -> list[Path]:
    """Remove this user's folders in which nobody has lived for the time of `linger_seconds`; returns their paths."""
    after = linger_seconds()
    old = [path for path in _named_paths() if _is_own_directory(path) and _age(path) > after]
    return [path for path in old if _remove_if_deserted(path)]


def _named_paths() -> list[Path]:
    try:
        names = os.listdir(memory_directory())
    except OSError:
        return []
    return [memory_directory() / name for name in sorted(names) if _NAME.fullmatch(name)]


def _is_own_directory(path: Path) -> bool:
    """Whether this is a real directory, no link, of this user, and nobody else may enter it."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    private = stat.S_IMODE(status.st_mode) == 0o700
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and private


def note_life(alive: int) -> None:
    """Set the times of the file `alive` to now, as the clock has it that nobody sets: seconds since boot.

    By the time of day, a clock that is set forward by two hours would make fresh snapshots expire.
    """
    os.utime(alive, (time.monotonic(), time.monotonic()))


def _age(folder: Path) -> float:
    """Seconds since somebody was known to live in a folder. What an earlier boot has left, nobody can use any more.

    One that no run can enter, because it is being made or removed, has the age that its own time says.
    """
    place = MemoryPlace.open(folder)
    if place is not None and place.facts.get("boot") != boot_id():
        return math.inf
    with contextlib.suppress(OSError):
        if place is not None and os.path.lexists(folder / ALIVE):
            return time.monotonic() - os.lstat(folder / ALIVE).st_mtime
        return time.time() - os.lstat(folder).st_mtime
    return 0.0  # removed meanwhile


def _open_alive(folder: Path) -> int:
    try:
        return open_regular(folder / ALIVE, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise PlaceError(f"could not open {folder}: {error.strerror or error}.") from error


def _lock_shared(descriptor: int, folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() > deadline:
                raise PlaceError(f"another process is removing {folder}.") from error
            time.sleep(_PAUSE)
        else:
            return


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


@contextlib.contextmanager
def _all_alone(folder: Path) -> Iterator[bool]:
    """Lock the file `alive` exclusively, and yield whether that was possible: nobody comes to live here meanwhile."""
    try:
        descriptor = _open_alive(folder)
    except PlaceError:
        yield not os.path.lexists(folder / ALIVE)
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _remove_if_deserted(folder: Path) -> bool:
    if not _is_own_directory(folder):
        return False
    with _all_alone(folder) as alone:
        if alone:
            shutil.rmtree(folder, ignore_errors=True)
    return alone


STEP = "step"


def write_step(place: MemoryPlace, step: int) -> None:
    """Record the step that training has reached."""
    descriptor = open_regular(place.path / STEP, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        if has_one_name(descriptor):
            os.pwrite(descriptor, b"%020d" % step, 0)
    finally:
        os.close(descriptor)


def read_step(place: MemoryPlace) -> int | None:
    """The step that the run before had reached; None if it has recorded none."""
    with suppress(OSError, ValueError):
        descriptor = open_regular(place.path / STEP, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return int(os.read(descriptor, 20))
        finally:
            os.close(descriptor)
    return None


_log = logging.getLogger("ckpt")
TOKEN = ".memory"  # noqa: S105 - the name of the file


def read_token(root: Storage) -> str:
    """The token of a root; empty if it has none."""
    if isinstance(root, Staging):
        return "staged"
    try:
        return root.read(TOKEN, 0, 64).decode("ascii", "replace")
    except AbsentError:
        return ""


def write_token(root: Storage, token: str = "") -> str:
    """Give a root this token or a new one, and return it."""
    token = token or secrets.token_hex(16)
    root.write(TOKEN, [token.encode()])
    return token


def remove_token(root: Storage) -> bool:
    """No folder in memory belongs to this root any more, on whatever host it is. Returns whether there was a token.

    A token that cannot be removed is said: a later run would take what is in such a folder for the newest.
    """
    if isinstance(root, Staging):
        return False
    try:
        if not read_token(root):
            return False
        root.delete([TOKEN])
    except StorageError as error:
        _log.warning(
            "ckpt could not remove %s/%s: %s Remove it yourself, or a later run with memory= may resume from "
            "snapshots in memory that are older than this run's checkpoints.", root.url, TOKEN, error,
        )  # fmt: skip
    return True


def identity_of(root: Storage, token: str) -> str:
    """What the folder of a run knows its root by."""
    return f"{place_of(root)}\n{token}"
