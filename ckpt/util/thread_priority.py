"""Priorities of the calling thread, for work that must take neither the disk nor the processor from training.

Every call is harmless where the system does not know it or refuses it.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckpt.util.aligned_memory import system_library

# Not the lowest priority: a thread that is starved while it holds the interpreter's lock holds up training.
_NICER = 5
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "loongarch64": 30, "ppc64le": 273, "s390x": 282}
_CALLING_THREAD = (1, 0)  # IOPRIO_WHO_PROCESS, and 0 for the caller
_BEST_EFFORT, _IDLE = 2, 3
_CLASS_SHIFT, _MIDDLE = 13, 4


def work_in_background() -> None:
    """Give this thread, and those that it starts, a lower priority; its I/O is served when the disk is idle."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
        _set_io_priority(_IDLE, 0)


@contextmanager
def normal_io_priority() -> Iterator[None]:
    """The I/O of a thread that works in the background, and of those that it starts here, has its usual priority."""
    if sys.platform == "linux":
        _set_io_priority(_BEST_EFFORT, _MIDDLE)
    try:
        yield
    finally:
        if sys.platform == "linux":
            _set_io_priority(_IDLE, 0)


def _set_io_priority(kind: int, level: int) -> None:
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        system_library().syscall(number, *_CALLING_THREAD, kind << _CLASS_SHIFT | level)
