"""Whether snapshots fit into a host's memory beside the training: the tmpfs, control groups, and a reserve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from ckpt.util.console import format_size
from ckpt.util.memory_limit import available, reserve

SLOTS = 2


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


def problem(room: Room, sizes: Sequence[int], where: str, peak: int) -> str:
    """Why two snapshots of this size, summed over the ranks of a host, do not fit there; empty if they do.

    `peak`: bytes that training is known to need within a step, beside what it holds now.
    """
    needed, left = SLOTS * sum(sizes), reserve(room["memory"] + room["used"], peak)
    more = max(0, needed - room["used"])
    if exceeds_tmpfs(room, sizes) and not room["memfd"]:
        return (
            f"{SLOTS} snapshots take {format_size(needed)}, and {where} has room for "
            f"{format_size(room['tmpfs'] + room['used'])}"
        )
    if more + left > room["memory"]:
        return (
            f"{SLOTS} snapshots take {format_size(needed)}, and of this host's memory "
            f"{format_size(room['memory'] + room['used'])} can be used, {format_size(left)} of which are "
            "left to the training"
        )
    return ""


def exceeds_tmpfs(room: Room, sizes: Sequence[int]) -> bool:
    """Whether two snapshots of this size are more than the tmpfs can take."""
    return SLOTS * sum(sizes) - room["used"] > room["tmpfs"]
