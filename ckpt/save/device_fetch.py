"""Fetches a snapshot from devices into host memory, one transfer in flight, through a small ring of pinned memory.

To pin an image of the whole state takes seconds, in which kernel launches wait. A ring is pinned in milliseconds, and
the bytes are copied from it to the image by threads that hold no lock. In between the copy engine is free: a loss that
training reads would wait behind every transfer in its queue.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from ckpt.formats.tensors import host_bytes
from ckpt.save.arrival import Arrival
from ckpt.save.device_staging import DeviceBlock, Transfer
from ckpt.save.device_streams import Device
from ckpt.save.pinned_ring import PinnedRing
from ckpt.util.aligned_memory import copy_bytes
from ckpt.util.threads import CORES, WorkerThread

# Threads that copy, each with a slot of the ring. Three beside training bring a snapshot sooner, and training loses
# more by it; with two slots for each, more still.
BESIDE_TRAINING, WHILE_IT_WAITS = 2, min(8, CORES)


class Fetcher:
    """Fetches transfers of any device. Snapshots that are fetched at the same time take turns."""

    def __init__(self, devices: Mapping[torch.device, Device]) -> None:
        self._devices = devices
        self._ring = PinnedRing()
        self._turn = threading.Lock()

    def fetch(
        self,
        blocks: Sequence[tuple[int, DeviceBlock]],
        image: memoryview,
        arrival: Arrival,
        threads: int,
        prepare: Callable[[int, int], None] = lambda start, size: None,
    ) -> None:
        """Fetch blocks, each with its number, into the image. What was staged is released on the way.

        `prepare`: called with the place and the size of what is about to be written to the image.
        """
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
                    slot = self._bring(transfer, self._ring, turn)
                    workers[turn].start(partial(_scatter, slot, transfer, image, arrival, number, prepare))
                block.release()
            for worker in workers:
                worker.wait()

    def stream(self, blocks: Iterable[DeviceBlock]) -> Iterator[tuple[Transfer, memoryview]]:
        """Every transfer with its bytes, which are valid until the next is asked for. What was staged is kept."""
        ring = PinnedRing()
        for block in blocks:
            for transfer in block.transfers():
                yield transfer, self._bring(transfer, ring, 0)

    def release(self) -> None:
        """Free the pinned memory."""
        with self._turn:
            self._ring.release()

    def _bring(self, transfer: Transfer, ring: PinnedRing, number: int) -> memoryview:
        """Copy a transfer to a slot of a ring, and wait for it."""
        device = self._devices[transfer.block.device]
        slot = ring.slot(device, number)
        device.fetch(transfer.block.between(transfer.start, transfer.stop), slot[: transfer.size])
        return host_bytes(slot)


def _scatter(
    slot: memoryview,
    transfer: Transfer,
    image: memoryview,
    arrival: Arrival,
    number: int,
    prepare: Callable[[int, int], None],
) -> None:
    """Copy a transfer of a block from its slot to its places in the image."""
    for offset, start, size in transfer.runs:
        prepare(start, size)
        copy_bytes(slot[offset : offset + size], image[start : start + size])
    arrival.arrived(number, transfer.size)
