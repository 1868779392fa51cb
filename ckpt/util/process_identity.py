"""Identity of a process on this machine that is not mistaken for another's when its number is reused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

Identity = list[str | int | None]  # as in JSON: boot id, inode of the PID namespace, process id, start time


def is_identity(value: Any) -> bool:
    """Whether a value from a document is what `process_identity` gives; also empty, where the system has no /proc."""
    if not isinstance(value, list) or len(value) not in (0, 4):
        return False
    kinds = (str, int, int, str | None)
    return all(isinstance(item, kind) for item, kind in zip(value, kinds, strict=False))


def process_identity(process: int) -> Identity:
    """Identity of a process in this PID namespace, unique across reboots and reuse of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.stat("/proc/self/ns/pid").st_ino, process, start_time(process)]


def start_time(process: int) -> str | None:
    """When a process started, in clock ticks since boot. None if it has ended, also if it is still a zombie."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
