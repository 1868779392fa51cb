"""The preloaded shim: system calls below a root are counted, made to fail, or recorded."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NAMES = (
    "open", "close", "read", "write", "fsync", "rename", "link", "unlink", "mkdir", "rmdir", "truncate", "allocate",
    "flock", "stat", "opendir", "readdir", "mark",
)  # fmt: skip
STICKY, SHORT, KILL, AFTER = 1, 2, 4, 8

_TOKEN = re.compile(r"[0-9a-f]{12}\.ckpt-tmp$")  # of a file that has not got its name yet
_ASKED = ("EIO", "ENOSPC", "EINTR", "EDQUOT", "EROFS")
_LOOKING = ("EIO", "EACCES", "ESTALE")
_NAMING = (*_ASKED, "EACCES", "EIO after it took effect")
FAULTS: dict[str, Sequence[str]] = {
    "open": (*_ASKED, "EMFILE", "EACCES", "ESTALE"),
    "close": _ASKED,
    "read": ("EIO", "EINTR", "ESTALE", "short"),
    "write": (*_ASKED, "short", "ENOSPC from here on", "EIO from here on"),
    "fsync": (*_ASKED, "EIO from here on"),
    "rename": _NAMING,
    "link": (*_NAMING, "EMLINK"),
    "unlink": _NAMING,
    "mkdir": _NAMING,
    "rmdir": _NAMING,
    "truncate": _ASKED,
    "allocate": (*_ASKED, "EOPNOTSUPP"),
    "flock": ("EIO", "EINTR", "ENOLCK"),
    "stat": _LOOKING,
    "opendir": (*_LOOKING, "EMFILE"),
    "readdir": _LOOKING,
}


@dataclass(frozen=True)
class Call:
    """One system call of a dry run: its number, what it is, on what, and whether it can be short."""

    number: int
    name: str
    path: str
    can_be_short: bool

    def faults(self) -> list[str]:
        return [fault for fault in FAULTS[self.name] if fault != "short" or self.can_be_short]


def build(folder: Path) -> Path | None:
    """Compile the shim; none if there is no C compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    target = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", target, source, "-ldl", "-lpthread"], check=True)
    return target


class Shim:
    """The shim that is preloaded into this process. Paths that are not below `root` are never touched."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.shim_hit.restype = ctypes.c_char_p
        self._library.shim_disarm.restype = ctypes.c_long
        self._library.shim_arm.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int]

    @staticmethod
    def is_loaded() -> bool:
        return hasattr(ctypes.CDLL(None), "shim_watch")

    def watch(self, root: str | os.PathLike[str], trace: int = -1) -> None:
        """Know what is opened below a root from here on; with `trace`, record what changes there, in order."""
        self._library.shim_watch(os.fsencode(root), trace)

    def list_to(self, descriptor: int) -> None:
        self._library.shim_list(descriptor)

    def arm(self, number: int, fault: str) -> None:
        """Count from here on, and let the call of that number fail in that way. None fails with number 0."""
        word = fault.split()[0] if fault else ""
        flags = STICKY * fault.endswith("from here on") | AFTER * fault.endswith("after it took effect")
        flags |= SHORT * (word == "short") | KILL * (word == "SIGKILL")
        self._library.shim_arm(number, getattr(errno, word, 0), flags)

    def disarm(self) -> int:
        """Let all calls through again. Returns how many there were."""
        return int(self._library.shim_disarm())

    def hit(self) -> str:
        """The call that failed, in words; empty if none has."""
        number, _, path = self._library.shim_hit().decode(errors="replace").partition(" ")
        return f"{NAMES[int(number)]} {path}" if number else ""

    def mark(self, text: str) -> None:
        """Put a line between the recorded calls."""
        self._library.shim_mark(text.encode())


def parse(listing: str) -> list[Call]:
    """The calls of a dry run."""
    calls = []
    for number, line in enumerate(listing.splitlines(), 1):
        op, cut, path = line.split(" ", 2)
        calls.append(Call(number, NAMES[int(op)], _TOKEN.sub("*.ckpt-tmp", path), cut == "1"))
    return calls
