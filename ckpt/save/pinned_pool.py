"""Host memory that snapshots are made in: reserved once, touched beforehand, used again by every save."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ckpt.util.aligned_memory import allocate_pages
from ckpt.util.threads import SerialWorker, ThreadCall

_log = logging.getLogger("ckpt")

PIECE = 64 << 20  # bytes: to make as many ready for a device takes two milliseconds, and launches wait no longer
_FEW, _MANY = 2, min(16, os.cpu_count() or 1)  # threads, beside training or when training waits


class PinnedPool:
    """A row of bytes that is there when it is needed. `prepare` makes it ready in the background."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._left: Iterator[int] = iter(())  # where pieces begin that are not ready
        self._turn = threading.Lock()
        self._device: torch.device | None = None
        self._pinned: list[int] = []
        self._work = SerialWorker("ckpt-memory")
        self._calm = threading.Event()
        self._calm.set()
        self._told = False

    @property
    def size(self) -> int:
        return len(self._bytes)

    def is_ready(self, size: int) -> bool:
        """Whether as many bytes could be had at once."""
        return size <= self.size and not self._work.busy

    def prepare(self, size: int, device: torch.device | None) -> None:
        """Begin to make as many bytes ready, if there are not. For copies from a device they are pinned."""
        if size > self.size and not self._work.busy:
            self._reserve(size, device)
            self._work.start(lambda: self._make_ready(_FEW, gently=True))

    def take(self, size: int, device: torch.device | None) -> torch.Tensor:
        """As many bytes, aligned to pages. Whoever had them before must be done with them."""
        if size > self.size:
            self._finish()
            self._reserve(size, device)
        self._finish()
        return self._bytes[:size]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While this lasts, nothing is made ready beforehand: something else is in a hurry."""
        self._calm.clear()
        try:
            yield
        finally:
            self._calm.set()

    def release(self) -> None:
        """Give the memory back. Whoever had it must be done with it."""
        self._left = iter(())
        with suppress(Exception):  # it is not needed any more
            self._work.wait()
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _reserve(self, size: int, device: torch.device | None) -> None:
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)  # first: there may not be room for both
        memory = allocate_pages(max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._device = device
        self._left = iter(range(0, len(self._bytes), PIECE))

    def _finish(self) -> None:
        """Make ready what is left, with all that the machine has."""
        self._make_ready(_MANY, gently=False)
        self._work.wait()

    def _make_ready(self, threads: int, *, gently: bool) -> None:
        def work() -> None:
            while True:
                if gently:
                    self._calm.wait()
                    if not threading.main_thread().is_alive():
                        return  # the program is about to end
                with self._turn:
                    start = next(self._left, None)
                if start is None:
                    return
                piece = self._bytes[start : start + PIECE]
                piece[:: mmap.PAGESIZE].zero_()  # a byte of each page is enough to get it
                if self._device is not None:
                    self._pin(piece)

        beside = [ThreadCall(work, "ckpt-memory") for _ in range(threads - 1 if self.size > PIECE else 0)]
        work()
        for one in beside:
            one.result()

    def _pin(self, piece: torch.Tensor) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(piece.data_ptr(), len(piece), 0)) == 0:
            self._pinned.append(piece.data_ptr())
        elif not self._told:
            self._told = True
            _log.warning("host memory could not be pinned: copies from the device will be slow")

    def _unpin(self) -> None:
        if self._pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            for at in self._pinned:
                runtime.cudaHostUnregister(at)
            self._pinned = []
