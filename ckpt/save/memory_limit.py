"""How much memory this process may still take: of the machine, and of the container that it runs in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # and more: how the first version of control groups spells it


def available(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes of memory that could be had now."""
    return min([_of_the_machine(proc), *_of_groups(proc, groups)])


def _of_the_machine(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _of_groups(proc: Path, groups: Path) -> Iterator[int]:
    """What is left in the control group of this process, and in those around it, where they have a limit."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        files = _OF_ONE if "memory" in controllers.split(",") else _OF_ALL if not controllers else None
        if files is not None:
            top = groups / files.folder
            folder = top / path.strip("/")  # in a container it may be the host's name for it, and not be there
            inner = (one for one in (folder, *folder.parents) if one.is_relative_to(top))
            yield from (left for left in map(files.left, inner) if left is not None)


@dataclass(frozen=True)
class _Files:
    """Where a version of control groups says what of memory."""

    folder: str
    limit: str
    used: str
    cached: tuple[str, str]

    def left(self, group: Path) -> int | None:
        """What may still be taken: what the page cache has is given back when it is needed. None without a limit."""
        try:
            limit = (group / self.limit).read_text().strip()
            if limit == "max" or int(limit) >= _UNLIMITED:
                return None
            used = int((group / self.used).read_text())
            told = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            return None
        return max(0, int(limit) - used + sum(int(told.get(key, 0)) for key in self.cached))


_OF_ALL = _Files("", "memory.max", "memory.current", ("inactive_file", "active_file"))
_OF_ONE = _Files(
    "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
