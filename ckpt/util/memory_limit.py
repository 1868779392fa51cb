"""How much memory this process may still take: on the machine, and under the limits of its control groups.

One policy for all that is kept beside training (copies of the state, snapshots in memory, what is read back): whatever
is available, less a reserve for training.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_MOST_RESERVED = 8 << 30  # bytes


def reserve(memory: int, peak: int = 0) -> int:
    """Bytes of the available memory that are left to training: a fifth, 8 GiB at most, or what it is known to need.

    It may need more at any time, and nothing may be swapped out for us. `peak`: bytes that training is known to need
    within a step, beside what it holds now.
    """
    return max(peak, min(_MOST_RESERVED, memory // 5))


def spare() -> int:
    """Bytes that may be taken now."""
    memory = available()
    return memory - reserve(memory)


def available(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes of memory that could be allocated now."""
    return min([_of_the_machine(proc), *_of_groups(proc, groups)])


def _of_the_machine(proc: Path) -> int:
    if sys.platform != "linux":
        import psutil

        return int(psutil.virtual_memory().available)
    _, found, rest = _read(f"{proc}/meminfo").partition("MemAvailable:")
    return int(rest.split(maxsplit=1)[0]) * 1024 if found else 0


def _of_groups(proc: Path, groups: Path) -> Iterator[int]:
    """What is left in the control group of this process and in its parents, where they have a limit."""
    try:
        lines = _read(f"{proc}/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        files = _V1 if "memory" in controllers.split(",") else _V2 if not controllers else None
        if files is not None:
            names = filter(None, path.split("/"))  # in a container, perhaps of the host: then they do not exist there
            chain = accumulate(names, "{}/{}".format, initial=f"{groups}/{files.folder}".rstrip("/"))
            yield from (left for left in map(files.left, chain) if left is not None)


def _read(path: str) -> str:
    """A small file of the system. Training waits: paths are strings, which take a third of the time of `Path`s."""
    with open(path, "rb", buffering=0) as file:
        return file.read().decode()


@dataclass(frozen=True)
class _Files:
    """The files in which a version of control groups gives the limit and the use of memory."""

    folder: str
    limit: str
    used: str
    cached: tuple[str, str]

    def left(self, group: str) -> int | None:
        """Bytes that may still be allocated, reclaimable page cache included; None without a limit."""
        try:
            limit = int(_read(f"{group}/{self.limit}"))  # without a limit "max", or a number larger than any memory
            used = int(_read(f"{group}/{self.used}"))
            statistics = dict(line.split() for line in _read(f"{group}/memory.stat").splitlines())
        except (OSError, ValueError):
            return None
        return max(0, limit - used + sum(int(statistics.get(key, 0)) for key in self.cached))


_V2 = _Files("", "memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _Files("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
