"""The step that training has reached, in the run's folder in memory: after a crash it says what was lost."""

from __future__ import annotations

import os
from contextlib import suppress

from ckpt.memory.place import MemoryPlace

STEP = "step"


def write_step(place: MemoryPlace, step: int) -> None:
    """Record the step that training has reached."""
    descriptor = os.open(place.path / STEP, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, b"%020d" % step, 0)
    finally:
        os.close(descriptor)


def read_step(place: MemoryPlace) -> int | None:
    """The step that the run before had reached; None if it has recorded none."""
    with suppress(OSError, ValueError):
        descriptor = os.open(place.path / STEP, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return int(os.read(descriptor, 20))
        finally:
            os.close(descriptor)
    return None
