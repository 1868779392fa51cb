"""How much memory this process may still allocate: on the machine, and under the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # control groups v1 write a number above this for "no limit"


def available(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes of memory that could be allocated now."""
    return min([_of_the_machine(proc), *_of_groups(proc, groups)])


def _of_the_machine(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _of_groups(proc: Path, groups: Path) -> Iterator[int]:
    """What is left in the control group of this process and in its parents, where they have a limit."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        files = _V1 if "memory" in controllers.split(",") else _V2 if not controllers else None
        if files is not None:
            top = groups / files.folder
            own = top / path.strip("/")  # in a container this may be the host's path, which does not exist there
            chain = (folder for folder in (own, *own.parents) if folder.is_relative_to(top))
            yield from (left for left in map(files.left, chain) if left is not None)


@dataclass(frozen=True)
class _Files:
    """The files in which a version of control groups gives the limit and the use of memory."""

    folder: str
    limit: str
    used: str
    cached: tuple[str, str]

    def left(self, group: Path) -> int | None:
        """Bytes that may still be allocated, reclaimable page cache included; None without a limit."""
        try:
            limit = (group / self.limit).read_text().strip()
            if limit == "max" or int(limit) >= _UNLIMITED:
                return None
            used = int((group / self.used).read_text())
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            return None
        return max(0, int(limit) - used + sum(int(statistics.get(key, 0)) for key in self.cached))


_V2 = _Files("", "memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _Files("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
