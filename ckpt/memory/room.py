"""Whether a snapshot is taken: the tmpfs, control groups, what training needs within a step, and what each rank sees.

The main rank decides for all from the views of every rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from ckpt.memory.place import memory_directory
from ckpt.ranks.hosts import Hosts
from ckpt.util.aligned_memory import most_mapped, now_mapped
from ckpt.util.console import format_size
from ckpt.util.memory_limit import available, reserve

SLOTS = 2


class Room(TypedDict):
    """What a host has: free bytes of its tmpfs, memory that can be allocated, and bytes that snapshots take now.

    `held`: whether a keeper may hold the snapshots where the tmpfs is too small.
    """

    tmpfs: int
    memory: int
    used: int
    held: bool


def measure(folder: Path, used: int, *, held: bool = False) -> Room:
    """The room on this host, for a folder in its memory."""
    status = os.statvfs(folder)
    return {"tmpfs": status.f_bavail * status.f_frsize, "memory": available(), "used": used, "held": held}


def problem(room: Room, sizes: Sequence[int], where: str, peak: int) -> str:
    """Why two snapshots of this size, summed over the ranks of a host, do not fit there; empty if they do.

    `peak`: bytes that training is known to need within a step, beside what it holds now.
    """
    needed, left = SLOTS * sum(sizes), reserve(room["memory"] + room["used"], peak)
    more = max(0, needed - room["used"])
    if exceeds_tmpfs(room, sizes) and not room["held"]:
        return (
            f"{SLOTS} snapshots take {format_size(needed)}, and {where} has room for "
            f"{format_size(room['tmpfs'] + room['used'])}"
        )
    if more + left > room["memory"]:
        return (
            f"{SLOTS} snapshots take {format_size(needed)}, and "
            f"{format_size(room['memory'] + room['used'])} of this host's memory can be used, of which "
            f"{format_size(left)} is left for training"
        )
    return ""


def exceeds_tmpfs(room: Room, sizes: Sequence[int]) -> bool:
    """Whether two snapshots of this size are more than the tmpfs can take."""
    return SLOTS * sum(sizes) - room["used"] > room["tmpfs"]


SAVE, SKIP, GIVE_WAY = "save", "skip", "give way"


class View(TypedDict):
    """What a rank knows before a snapshot. `size`: bytes that it would write. `room`: of its host, by its owner.

    `peak`: bytes that its training needs within a step, beside what it holds now.
    """

    busy: bool
    error: str
    full: bool  # the error says that there is no more memory
    size: int
    peak: int
    room: Room | None


class Verdict(TypedDict):
    """What all ranks do: take the snapshot, leave it out, or give way to the training for a while, and why.

    `free`: whether the memory of earlier snapshots is given back too. `small`: the owners of folders
    that are to be made where the tmpfs is too small.
    """

    do: str
    why: str
    free: bool
    small: list[int]


def verdict_of(views: list[View], hosts: Hosts, copies: bool = False) -> Verdict:
    """On the main rank: from the views of all ranks. `copies`: each host keeps those of the host before it too."""
    if any(view["busy"] for view in views):  # before errors: to give way, each rank waits for what it has under way
        return {"do": SKIP, "why": "", "free": False, "small": []}
    errors = dict.fromkeys(view["error"] for view in views if view["error"])
    if errors:
        return {"do": GIVE_WAY, "why": "; ".join(errors), "free": any(view["full"] for view in views), "small": []}
    measured = {owner: view["room"] for owner, view in enumerate(views) if view["room"] is not None}
    sizes = {owner: [view["size"] for view in _on_host(owner, views, hosts)] for owner in measured}
    peaks = {owner: sum(view["peak"] for view in _on_host(owner, views, hosts)) for owner in measured}
    if copies and hosts.separate_roots:
        ring = sorted(sizes)
        sizes = {owner: sizes[owner] + sizes[ring[at - 1]] for at, owner in enumerate(ring)}
    where = str(memory_directory())
    lacking = (problem(found, sizes[owner], where, peaks[owner]) for owner, found in measured.items())
    small = [owner for owner, found in measured.items() if exceeds_tmpfs(found, sizes[owner])]
    return save_unless("; ".join(filter(None, lacking)), small)


def save_unless(why_not: str, small: list[int] | None = None) -> Verdict:
    return {"do": GIVE_WAY if why_not else SAVE, "why": why_not, "free": bool(why_not), "small": small or []}


def _on_host(owner: int, views: list[View], hosts: Hosts) -> list[View]:
    """Those of the ranks on the host of this one."""
    first = hosts.first if hosts.separate_roots else (owner,) * len(views)
    return [view for rank, view in enumerate(views) if first[rank] == owner]


_STATUS = Path("/proc/self/status")


@dataclass
class TrainingPeak:
    """The most memory that this process has had since training began, from what the kernel counts anyway.

    A peak of before, of loading a model perhaps, does not come again: until training exceeds it, nothing is known.
    """

    status: Path = _STATUS
    _before: int = field(init=False)

    def __post_init__(self) -> None:
        self._before = self._counted()[0]

    def more(self) -> int:
        """Bytes that a step may need for a while beside those that the process holds now; 0 if that is not known.

        Mapped files of snapshots are part of what the kernel counts, then and now: they are not training's.
        """
        peak, held = self._counted()
        return max(0, peak - most_mapped() - (held - now_mapped())) if peak > self._before else 0

    def _counted(self) -> tuple[int, int]:
        """The most, and what there is now. Zeros where the system does not count."""
        try:
            lines = (line.split() for line in self.status.read_text().splitlines())
            kilobytes = {line[0]: int(line[1]) for line in lines if line and line[0] in ("VmHWM:", "VmRSS:")}
        except (OSError, ValueError, IndexError):
            return 0, 0
        return kilobytes.get("VmHWM:", 0) * 1024, kilobytes.get("VmRSS:", 0) * 1024
