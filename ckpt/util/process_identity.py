"""Which process is meant: not another that has its number later, and not a forked child, which inherits its objects."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ckpt.errors import ConfigError

Identity = list[str | int | None]  # as in JSON: boot id, inode of the PID namespace, process id, start time


def is_identity(value: Any) -> bool:
    """Whether a value from a document is what `process_identity` gives; also empty, where the system has no /proc."""
    if not isinstance(value, list) or len(value) not in (0, 4):
        return False
    kinds = (str, int, int, str | None)
    return all(isinstance(item, kind) for item, kind in zip(value, kinds, strict=False))


def process_identity(process: int) -> Identity:
    """Identity of a process in this PID namespace, unique across reboots and reuse of process ids."""
    return [boot_id(), os.stat("/proc/self/ns/pid").st_ino, process, start_time(process)]


def boot_id() -> str:
    """The identity of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(process: int) -> str | None:
    """When a process started, in clock ticks since boot. None if it has ended, also if it is still a zombie."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


_forks = 0  # between the process that imported this module and this one: to ask for its id at every step takes longer


def _note_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_note_fork)


@dataclass(frozen=True)
class OwnerProcess:
    """The process that created an object."""

    process: int = field(default_factory=os.getpid)
    forks: int = field(default_factory=lambda: _forks)

    @property
    def is_here(self) -> bool:
        """True in that process, False in a forked child of it."""
        return self.forks == _forks

    def require(self, call: str) -> None:
        """Raise in a forked child: the call would wait for threads that it does not have, or write without lock."""
        if not self.is_here:
            raise ConfigError(
                f"{call}: this StateManager belongs to process {self.process}, and this is process {os.getpid()}, a "
                "fork of it. Nothing was done. Build a StateManager in the child, with a root of its own."
            )


class NotCopyableError(ConfigError, TypeError):
    """Raised by `copy` and `pickle`; whoever tries to copy what can be copied expects a TypeError."""


def refuse_copy(self: object) -> NoReturn:
    """The `__reduce__` of what holds locks, threads and live objects."""
    raise NotCopyableError(
        f"a {type(self).__name__} can be neither copied nor pickled: it holds its root. Keep it out of what is copied "
        "or sent to other processes, and build one where it is needed."
    )
