"""The step that training has reached, in the run's folder in memory: after a crash it says what was lost."""

from __future__ import annotations

import os
from contextlib import suppress

from ckpt.memory.place import MemoryPlace
from ckpt.storage.local.files import has_one_name, open_regular

STEP = "step"


def write_step(place: MemoryPlace, step: int) -> None:
    """Record the step that training has reached."""
    descriptor = open_regular(place.path / STEP, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        if has_one_name(descriptor):
            os.pwrite(descriptor, b"%020d" % step, 0)
    finally:
        os.close(descriptor)


def read_step(place: MemoryPlace) -> int | None:
    """The step that the run before had reached; None if it has recorded none."""
    with suppress(OSError, ValueError):
        descriptor = open_regular(place.path / STEP, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return int(os.read(descriptor, 20))
        finally:
            os.close(descriptor)
    return None
