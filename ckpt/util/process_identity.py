"""Which process on this machine is which, even when its number is used again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def process_identity(process: int) -> list[Any]:
    """What a process is known by, on this machine and within its namespace, even when its number is used again."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.stat("/proc/self/ns/pid").st_ino, process, start_time(process)]


def start_time(process: int) -> str | None:
    """When a process began, in ticks of the system. None if it has ended."""
    try:
        facts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if facts[0] in "ZX" else facts[19]
