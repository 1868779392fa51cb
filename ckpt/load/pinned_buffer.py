"""Pinned host memory that a load reads into: pages of our own, registered with the device.

PyTorch's allocator takes three times as long to provide it, one thread after the other, and a restarted process has
none yet: an eighth of a second of a load that takes one.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import torch

from ckpt.util.aligned_memory import allocate_pages

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


class PinnedBuffer:
    """Memory that copies to this device do not wait for. `release` must be called after the last copy is complete."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._runtime: Any = None
        self._device = device
        if device.type == "cuda":
            with suppress(RuntimeError):  # the system may forbid it; PyTorch then says why, or can do it
                self.memory = self._registered(size)
                return
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def _registered(self, size: int) -> torch.Tensor:
        memory = torch.frombuffer(allocate_pages(size), dtype=torch.uint8)
        memory[:: mmap.PAGESIZE].zero_()  # without the interpreter's lock, and much faster than the driver
        with torch.cuda.device(self._device):  # or a context would be made on the first device
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), size, _PORTABLE)))
        self._runtime = runtime
        return memory

    def release(self) -> None:
        """Give the memory back."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            with torch.cuda.device(self._device):
                runtime.cudaHostUnregister(self.memory.data_ptr())
        self.memory = torch.empty(0, dtype=torch.uint8)
