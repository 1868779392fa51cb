"""Pinned host buffer pool: allocated once, prefaulted in the background, reused by every snapshot."""

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

CHUNK = 64 << 20  # bytes pinned at a time: that takes two milliseconds, and kernel launches wait no longer
_FEW, _MANY = 2, min(16, os.cpu_count() or 1)  # threads: beside training, or while training waits


class PinnedPool:
    """One buffer of host memory. `prefault` makes it resident, and pins it for copies from a device, in the background.

    It serves one snapshot at a time: who allocates must know that the snapshot before has been written.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._untouched: Iterator[int] = iter(())  # offsets of the chunks that are not resident yet
        self._lock = threading.Lock()
        self._device: torch.device | None = None
        self._pinned: list[int] = []  # addresses
        self._work = SerialWorker("ckpt-memory")
        self._not_paused = threading.Event()
        self._not_paused.set()
        self._has_warned = False

    @property
    def size(self) -> int:
        return len(self._bytes)

    def is_ready(self, size: int) -> bool:
        """Whether as many bytes are resident now."""
        return size <= self.size and not self._work.busy

    def prefault(self, size: int, device: torch.device | None) -> None:
        """Begin to make as many bytes resident, unless there are as many. With a device they are pinned, too."""
        if size > self.size and not self._work.busy:
            self._reserve(size, device)
            self._work.start(lambda: self._touch_all(_FEW, gently=True))

    def allocate(self, size: int, device: torch.device | None) -> torch.Tensor:
        """As many bytes, page-aligned. They overlap those that were allocated before."""
        if size > self.size:
            self._finish()
            self._reserve(size, device)
        self._finish()
        return self._bytes[:size]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend prefaulting while this context lasts, in which a load, say, needs the machine."""
        self._not_paused.clear()
        try:
            yield
        finally:
            self._not_paused.set()

    def release(self) -> None:
        """Unpin and free the buffer. Nothing may be using it."""
        self._untouched = iter(())
        with suppress(Exception):  # whatever failed there, the memory is not needed any more
            self._work.wait()
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _reserve(self, size: int, device: torch.device | None) -> None:
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)  # freed first: there may not be room for both
        memory = allocate_pages(max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._device = device
        self._untouched = iter(range(0, len(self._bytes), CHUNK))

    def _finish(self) -> None:
        """Make the rest resident, on as many threads as the machine has cores."""
        self._touch_all(_MANY, gently=False)
        self._work.wait()

    def _touch_all(self, threads: int, *, gently: bool) -> None:
        def work() -> None:
            while True:
                if gently:
                    self._not_paused.wait()
                    if not threading.main_thread().is_alive():
                        return  # the interpreter is shutting down
                with self._lock:
                    start = next(self._untouched, None)
                if start is None:
                    return
                chunk = self._bytes[start : start + CHUNK]
                chunk[:: mmap.PAGESIZE].zero_()  # writing to one byte of a page makes it resident
                if self._device is not None:
                    self._pin(chunk)

        helpers = [ThreadCall(work, "ckpt-memory") for _ in range(threads - 1 if self.size > CHUNK else 0)]
        work()
        for helper in helpers:
            helper.result()

    def _pin(self, chunk: torch.Tensor) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(chunk.data_ptr(), len(chunk), 0)) == 0:
            self._pinned.append(chunk.data_ptr())
        elif not self._has_warned:
            self._has_warned = True
            _log.warning("host memory could not be pinned: copies from the device will be slow")

    def _unpin(self) -> None:
        if self._pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            for address in self._pinned:
                runtime.cudaHostUnregister(address)
            self._pinned = []
