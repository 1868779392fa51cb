"""Whether snapshots fit into a host's memory beside the training: the tmpfs, control groups, and a reserve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from ckpt.save.memory_limit import available
from ckpt.util.console import format_size

SLOTS = 2
_RESERVE = 0.05  # of the memory that is available when the tier begins
_MOST_RESERVED = 8 << 30  # bytes


class Room(TypedDict):
    """What a host has: free bytes of its tmpfs, memory that can be allocated, and bytes that snapshots take now.

    `memfd`: whether a keeper may hold the snapshots where the tmpfs is too small.
    """

    tmpfs: int
    memory: int
    used: int
    memfd: bool


def measure(folder: Path, used: int, *, memfd: bool = False) -> Room:
    """The room on this host, for a folder in its memory."""
    status = os.statvfs(folder)
    return {"tmpfs": status.f_bavail * status.f_frsize, "memory": available(), "used": used, "memfd": memfd}


def reserve_of(room: Room) -> int:
    """Bytes that are left to the training: it may need more at any time, and nothing may be swapped out for us."""
    return min(_MOST_RESERVED, int(_RESERVE * (room["memory"] + room["used"])))


def problem(room: Room, sizes: Sequence[int], where: str, peak: int) -> str:
    """Why two snapshots of this size, summed over the ranks of a host, do not fit there; empty if they do.

    `peak`: bytes that training is known to need within a step, beside what it holds now.
    """
    needed, reserve = SLOTS * sum(sizes), max(peak, reserve_of(room))
    more = max(0, needed - room["used"])
    if exceeds_tmpfs(room, sizes) and not room["memfd"]:
        return (
            f"{SLOTS} snapshots take {format_size(needed)}, and {where} has room for "
            f"{format_size(room['tmpfs'] + room['used'])}"
        )
    if more + reserve > room["memory"]:
        return (
            f"{SLOTS} snapshots take {format_size(needed)}, and of this host's memory "
            f"{format_size(room['memory'] + room['used'])} can be used, {format_size(reserve)} of which are "
            "left to the training"
        )
    return ""


def exceeds_tmpfs(room: Room, sizes: Sequence[int]) -> bool:
    """Whether two snapshots of this size are more than the tmpfs can take."""
    return SLOTS * sum(sizes) - room["used"] > room["tmpfs"]
