"""Sees what an operation touches: paths outside the folders it was given, code, processes and connections."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.fuzz import canary

_NEVER = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "pty.spawn",
)
# events, and which of their arguments are paths; links at their end are not followed by these, but by `open`
_PATHS = {
    "os.remove": (0,), "os.rmdir": (0,), "os.mkdir": (0,), "os.rename": (0, 1), "os.link": (0, 1), "os.symlink": (1,),
    "shutil.rmtree": (0,), "shutil.move": (0, 1), "os.chmod": (0,), "os.chown": (0,), "os.utime": (0,),
}  # fmt: skip
_FOLLOWING = {"os.truncate": (0,), "os.listdir": (0,), "os.scandir": (0,), "shutil.copyfile": (0, 1)}
_SYSTEM = ("/proc/", "/sys/", "/dev/null", "/dev/urandom", "/etc/localtime", "/usr/share/zoneinfo")
_LINKED = "linked.json"  # has a hard link in the root: it may be read, which nobody could tell from a file of its own
_CHECKOUT = Path(__file__).parents[2]


def _code_folders() -> tuple[str, ...]:
    added = [path for path in sys.path if path.endswith("site-packages")]  # a .pth file may name another environment's
    places = [*sysconfig.get_paths().values(), *site.getsitepackages(), sys.prefix, sys.base_prefix, str(_CHECKOUT)]
    places += added
    return tuple({os.path.realpath(place).rstrip("/") + "/" for place in places})


class Watch:
    """An audit hook. While it is on, whatever is touched outside the allowed folders is noted."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._on = False
        self._allowed: tuple[str, ...] = ()
        self._code = _code_folders()
        sys.addaudithook(self._hear)

    def begin(self, allowed: Iterable[str]) -> None:
        """Only these folders may be touched from now on; code may be read."""
        self._allowed = tuple(f"{os.path.realpath(folder)}/" for folder in allowed)
        self.seen.clear()
        canary.FIRED.clear()
        self._on = True

    def end(self) -> list[str]:
        self._on = False
        return [*self.seen, *(f"the canary was called with {args}" for args in canary.FIRED)]

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on:
            return
        self._on = False  # what is done here is not heard
        try:
            self._judge(event, args)
        finally:
            self._on = True

    def _judge(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _NEVER:
            self.seen.append(f"{event}{args!r}"[:300])
        elif event == "open":
            self._check_open(*args)
        elif event in _PATHS or event in _FOLLOWING:
            places = _PATHS.get(event) or _FOLLOWING[event]
            for place in places:
                self._check(event, args[place], follow=event in _FOLLOWING)

    def _check_open(self, path: Any, mode: Any, flags: Any) -> None:
        if isinstance(path, str | bytes):
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
            no_follow = isinstance(flags, int) and bool(flags & os.O_NOFOLLOW)
            if isinstance(flags, int) and flags & os.O_DIRECTORY and self._is_above(path):
                return  # what it was given is opened by its name there
            self._check("open to write" if writes else "open", path, follow=not no_follow)

    def _is_above(self, path: str | bytes) -> bool:
        folder = f"{os.path.realpath(os.fsdecode(path))}/"
        return any(allowed.startswith(folder) for allowed in self._allowed)

    def _check(self, event: str, path: Any, *, follow: bool) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        text = os.fsdecode(path)
        if "\0" in text:
            return
        real = (
            os.path.realpath(text)
            if follow
            else f"{os.path.realpath(os.path.dirname(text) or '.')}/{os.path.basename(text)}"
        )
        if f"{real}/".startswith(self._allowed) or real.startswith(_SYSTEM):
            return
        if event in ("open", "os.listdir", "os.scandir") and f"{real}/".startswith(self._code):
            return
        if event in ("open", "os.listdir", "os.scandir") and not os.path.exists(real):
            return  # nothing was read there
        self.seen.append(f"{event} {real}")


class Sentinel:
    """A folder beside the one that is read. Whether anything of it was read, written or removed can be seen."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._make()

    def _make(self) -> None:
        inner = Path(self.folder, "inner")
        inner.mkdir(parents=True, exist_ok=True)
        contents = {
            "secret.json": b'{"secret": "hunter2"}',
            "model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
            "inner/x": b"x",
            _LINKED: b"{}",
        }
        for name, content in contents.items():
            path = Path(self.folder, name)
            path.unlink(missing_ok=True)
            path.write_bytes(content)
        self._reset()

    def _reset(self) -> None:
        for path in self._paths():
            os.utime(path, ns=(10**18, 2 * 10**18))  # read before it was written: the next read is recorded
        self._before = self._state()

    def changes(self) -> list[str]:
        """What happened to it since the last call."""
        now = self._state()
        if now == self._before:
            return []
        words = ("read", "written", "resized", "mode changed")
        found = []
        for name in sorted(now.keys() | self._before.keys()):
            old, new = self._before.get(name), now.get(name)
            if old is None or new is None:
                found.append(f"{name} beside the root was {'made' if old is None else 'removed'}")
            else:
                found += [
                    f"{name} beside the root was {word}" for word, a, b in zip(words, old, new, strict=True) if a != b
                ]
        self._make()
        return found

    def _paths(self) -> list[str]:
        """Files alone: to look into a folder would change its time of reading."""
        found = [entry.path for entry in os.scandir(self.folder) if not entry.is_dir(follow_symlinks=False)]
        return [*found, *(entry.path for entry in os.scandir(f"{self.folder}/inner"))]

    def _state(self) -> dict[str, tuple[int, int, int, int]]:
        try:
            stats = {path.removeprefix(f"{self.folder}/"): os.lstat(path) for path in self._paths()}
        except OSError:
            return {}
        return {
            name: (0 if name == _LINKED else one.st_atime_ns, one.st_mtime_ns, one.st_size, one.st_mode)
            for name, one in stats.items()
        }
