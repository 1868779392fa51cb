"""Fetches a snapshot from devices into host memory, one transfer in flight, through a small ring of pinned memory.

To pin an image of the whole state takes seconds, in which kernel launches wait. A ring is pinned in milliseconds, and
the bytes are copied from it to the image by threads that hold no lock. In between the copy engine is free: a loss that
training reads would wait behind every transfer in its queue.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ckpt.errors import StateError
from ckpt.formats.tensor_bytes import host_bytes
from ckpt.save.arrival import Arrival
from ckpt.save.device_staging import TRANSFER, DeviceBlock, Transfer
from ckpt.save.device_streams import Device
from ckpt.util.aligned_memory import allocate_aligned, copy_bytes
from ckpt.util.worker_thread import WorkerThread

_log = logging.getLogger("ckpt")

BESIDE_TRAINING, WHILE_IT_WAITS = 2, min(8, os.cpu_count() or 1)  # threads that copy, each with a slot of the ring
_PORTABLE = 1  # of cudaHostRegister: pinned for every device


class PinnedRing:
    """Slots of host memory for one transfer each. A slot is allocated and pinned when it is first used."""

    def __init__(self) -> None:
        self._slots: list[torch.Tensor] = []
        self._pinned: list[int] = []  # addresses
        self._has_warned = False

    def slot(self, number: int) -> torch.Tensor:
        while len(self._slots) <= number:
            memory = torch.frombuffer(allocate_aligned(TRANSFER), dtype=torch.uint8)
            memory.zero_()  # makes it resident
            self._pin(memory)
            self._slots.append(memory)
        return self._slots[number]

    def release(self) -> None:
        """Unpin and free the memory. Nothing may be using it."""
        for address in self._pinned:
            _runtime().cudaHostUnregister(address)
        self._pinned, self._slots = [], []

    def _pin(self, memory: torch.Tensor) -> None:
        if not torch.cuda.is_available():
            return
        if int(_runtime().cudaHostRegister(memory.data_ptr(), len(memory), _PORTABLE)) == 0:
            self._pinned.append(memory.data_ptr())
        elif not self._has_warned:
            self._has_warned = True
            _log.warning("host memory could not be pinned: copies from the device will be slow")


class Fetcher:
    """Fetches transfers of any device. Snapshots that are fetched at the same time take turns."""

    def __init__(self, devices: Mapping[torch.device, Device]) -> None:
        self._devices = devices
        self._ring = PinnedRing()
        self._turn = threading.Lock()

    def fetch(
        self, blocks: Sequence[tuple[int, DeviceBlock]], image: memoryview, arrival: Arrival, threads: int
    ) -> None:
        """Fetch blocks, each with its number, into the image. What was staged is released on the way."""
        with self._turn, ExitStack() as stack:
            workers = [WorkerThread("ckpt-fetch") for _ in range(threads)]
            for worker in workers:
                stack.callback(worker.close)
            turns = itertools.cycle(range(threads))
            for number, block in blocks:
                for transfer in block.transfers():
                    if arrival.is_discarded:
                        return
                    turn = next(turns)
                    workers[turn].wait()  # until its slot is free
                    slot = self._bring(block.device, transfer, self._ring.slot(turn))
                    workers[turn].start(partial(_scatter, slot, transfer, image, arrival, number))
                block.release()
            for worker in workers:
                worker.wait()

    def stream(self, blocks: Iterable[DeviceBlock]) -> Iterator[tuple[Transfer, memoryview]]:
        """Every transfer with its bytes, which are valid until the next is asked for. What was staged is kept."""
        ring = PinnedRing()
        try:
            for block in blocks:
                for transfer in block.transfers():
                    yield transfer, self._bring(block.device, transfer, ring.slot(0))
        finally:
            ring.release()

    def release(self) -> None:
        """Free the pinned memory. Nothing may be being fetched."""
        self._ring.release()

    def _bring(self, device: torch.device, transfer: Transfer, slot: torch.Tensor) -> memoryview:
        """Copy a transfer to a slot, and wait for it."""
        if not transfer.sources:
            raise StateError("a snapshot was read after its memory had been given back")
        self._devices[device].fetch(transfer.sources, slot[: transfer.size])
        return host_bytes(slot)


def _scatter(slot: memoryview, transfer: Transfer, image: memoryview, arrival: Arrival, number: int) -> None:
    """Copy a transfer of a block from its slot to its places in the image."""
    for offset, start, size in transfer.runs:
        copy_bytes(slot[offset : offset + size], image[start : start + size])
    arrival.arrived(number, transfer.size)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
