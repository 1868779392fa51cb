"""Raw writes and reads of as many bytes: the limits of disk, kernel and bus to compare with."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from benchmarks.shared.checkpointers import Checkpointer
from benchmarks.shared.measure import PIECE
from benchmarks.shared.state import State


class Raw(Checkpointer):
    """Plain writes with one fsync, and plain reads, through the page cache."""

    name = "raw write + fsync / read"
    durable = needs_moments = True

    def save(self, name: str) -> None:
        with open(self.folder(name) / "raw", "wb", buffering=0) as file:
            for view in self.views():
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())

    def load(self, name: str) -> None:
        with open(self.root / name / "raw", "rb", buffering=0) as file:
            for view in self.views():
                while view:
                    view = view[file.readinto(view) or too_short(name) :]

    def views(self) -> Iterator[memoryview]:
        for tensor in self.state.tensors().values():
            yield tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class RawDirect(Raw):
    """Past the page cache, from an aligned image of the state that is prepared before the time is taken."""

    name = "raw O_DIRECT write + fsync"

    def __init__(self, state: State, root: Path) -> None:
        super().__init__(state, root)
        self.image = mmap.mmap(-1, -(-state.size // PIECE) * PIECE)  # page-aligned

    def prepare(self) -> None:
        self.image.seek(0)
        for view in self.views():
            self.image.write(view)

    def save(self, name: str) -> None:
        descriptor = os.open(self.folder(name) / "raw", os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0))
        self.write(descriptor)
        os.fsync(descriptor)
        os.close(descriptor)

    def write(self, descriptor: int) -> None:
        for offset in range(0, len(self.image), PIECE):
            self.write_piece(descriptor, offset)

    def write_piece(self, descriptor: int, offset: int) -> None:
        with memoryview(self.image) as image:
            assert os.pwrite(descriptor, image[offset : offset + PIECE], offset) == PIECE


class RawDirectParallel(RawDirect):
    """With everything that was found to help: space allocated first, several writes at a time."""

    name = "raw O_DIRECT write + fsync, 4 threads"

    def write(self, descriptor: int) -> None:
        os.posix_fallocate(descriptor, 0, len(self.image))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(partial(self.write_piece, descriptor), range(0, len(self.image), PIECE)))


def too_short(name: str) -> int:
    raise AssertionError(f"{name}: the file is too short")


class RawWriter:
    """The limit of durable saves: threads write a file past the page cache into reserved space, then fsync.

    The same random bytes are written again and again, so that no second copy of the state is needed.
    """

    name = "raw direct write"
    threads, slots = 4, 16

    def __init__(self) -> None:
        self.image = mmap.mmap(-1, self.slots * PIECE)  # page-aligned
        for _ in range(self.slots):
            self.image.write(os.urandom(PIECE))

    def write(self, folder: Path, size: int) -> float:
        """Seconds until `size` bytes, or a few more to fill a page, are on the disk. The file is removed then."""
        path, size = folder / "raw", -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            started = time.perf_counter()
            descriptor = open_past_the_cache(path, os.O_WRONLY | os.O_CREAT)
            os.posix_fallocate(descriptor, 0, size)
            with ThreadPoolExecutor(self.threads) as pool:
                list(pool.map(partial(self.write_piece, descriptor, size), range(0, size, PIECE)))
            os.fsync(descriptor)
            os.close(descriptor)
            return time.perf_counter() - started
        finally:
            path.unlink(missing_ok=True)

    def write_piece(self, descriptor: int, size: int, offset: int) -> None:
        start, length = offset % len(self.image), min(PIECE, size - offset)
        with memoryview(self.image) as image:
            assert os.pwrite(descriptor, image[start : start + length], offset) == length


def open_past_the_cache(path: Path, flags: int) -> int:
    """Through the page cache where the filesystem refuses direct I/O."""
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(path, flags)


class RawReader:
    """The limit of loads: threads read files into small rings of pinned memory, and copy from there to the device."""

    name = "raw parallel read"
    threads, slots = 16, 3

    def __init__(self, device: str) -> None:
        self.device = device
        pinned = device != "cpu"
        self.rings = [
            [torch.empty(PIECE, dtype=torch.uint8, pin_memory=pinned) for _ in range(self.slots)]
            for _ in range(self.threads)
        ]

    def read(self, paths: Sequence[Path], past_the_cache: bool) -> float:
        """Seconds from the first read until everything is on the device."""
        pieces = list(pieces_of(paths))
        target = torch.empty(sum(length for *_, length in pieces), dtype=torch.uint8, device=self.device)
        flags = os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if past_the_cache and self.device != "cpu" else 0)
        with ExitStack() as stack, ThreadPoolExecutor(self.threads) as pool:
            started = time.perf_counter()
            opened = {path: os.open(path, flags) for path in paths}
            for descriptor in opened.values():
                stack.callback(os.close, descriptor)
            starts = list(itertools.accumulate((length for *_, length in pieces), initial=0))
            work = [
                (opened[path], offset, target[start : start + length])
                for (path, offset, length), start in zip(pieces, starts, strict=False)
            ]
            list(pool.map(self.read_some, self.rings, (work[first :: self.threads] for first in range(self.threads))))
            return time.perf_counter() - started

    def read_some(self, ring: list[torch.Tensor], work: Sequence[tuple[int, int, torch.Tensor]]) -> None:
        if self.device == "cpu":
            for number, piece in enumerate(work):
                copy_a_piece(ring[number % self.slots], *piece)
            return
        with torch.cuda.stream(torch.cuda.Stream()):
            events = [torch.cuda.Event() for _ in ring]
            for number, piece in enumerate(work):
                slot = number % self.slots
                events[slot].synchronize()
                copy_a_piece(ring[slot], *piece)
                events[slot].record()
            torch.cuda.current_stream().synchronize()


def pieces_of(paths: Sequence[Path]) -> Iterator[tuple[Path, int, int]]:
    for path in paths:
        size = path.stat().st_size
        for offset in range(0, size, PIECE):
            yield path, offset, min(PIECE, size - offset)


def copy_a_piece(buffer: torch.Tensor, descriptor: int, offset: int, target: torch.Tensor) -> None:
    found = os.preadv(descriptor, [buffer.numpy().data], offset)
    assert found >= len(target), f"read {found} bytes of {len(target)}"
    target.copy_(buffer[: len(target)], non_blocking=True)
