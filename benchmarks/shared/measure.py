"""How benchmarks measure: time, memory, the page cache, processes of their own.

Nothing of ckpt is imported here: children that measure an earlier version import this module too.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

PIECE = 8 << 20

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def seconds(do: Callable[[], object]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


@contextmanager
def folder_in(root: Path) -> Iterator[Path]:
    """A new folder on the disk to measure, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=".benchmark-", dir=root)).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def warm(folder: Path) -> None:
    """Read every file into the page cache."""
    buffer = memoryview(bytearray(PIECE))
    for path in files_in(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cold(folder: Path) -> None:
    """Drop every file from the page cache. Only clean pages can be dropped, hence the sync."""
    os.sync()
    for path in files_in(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


CACHES: Mapping[str, Callable[[Path], None]] = {"warm": warm, "cold": cold}


def in_a_new_process(
    do: Callable[Arguments, Returned], *arguments: Arguments.args, **named: Arguments.kwargs
) -> Returned:
    """Call a function where no memory is left over from others to be used again. Slow imports are done beforehand.

    The new process has this one's environment: its parent was started earlier, maybe with another.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.checkpoint", "accelerate", "safetensors.torch", "ckpt.manager"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_with_environment, dict(os.environ), do, *arguments, **named).result()


def _with_environment(
    environment: dict[str, str],
    do: Callable[Arguments, Returned],
    /,
    *arguments: Arguments.args,
    **named: Arguments.kwargs,
) -> Returned:
    os.environ.clear()
    os.environ.update(environment)
    return do(*arguments, **named)


def settle(size: int) -> None:
    """The same start for all: no dirty pages, and free memory that was in use a moment ago.

    A virtual machine is slow to hand out memory that has been idle: whoever comes first after a pause would pay for it.
    Several times the size is touched, since nobody knows which part of it is handed out first.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    size = max(mmap.PAGESIZE, min(4 * size, free * 3 // 4))
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, size, mmap.PAGESIZE):
            memory[start] = 1
    os.sync()


def peak(do: Callable[[], object]) -> int | None:
    """Peak growth of this process's resident memory; none where the kernel does not report it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    except OSError:
        return None
    before = _memory("VmRSS")
    do()
    return _memory("VmHWM") - before


def _memory(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, key
    return int(found[1]) * 1024
