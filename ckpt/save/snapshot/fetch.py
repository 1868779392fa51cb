"""Fetches a snapshot from devices into host memory, one transfer in flight, through a small ring of pinned memory.

To pin an image of the whole state takes seconds, in which kernel launches wait. A ring is pinned in milliseconds, and
the bytes are copied from it to the image by threads that hold no lock. In between the copy engine is free: a loss that
training reads would wait behind every transfer in its queue.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from ckpt.errors import StateError
from ckpt.formats.tensors import host_bytes, movable
from ckpt.save.snapshot.devices import Device
from ckpt.save.snapshot.host_memory import Image, ReservedImage
from ckpt.save.snapshot.tensor_copies import TensorCopy, flat_bytes
from ckpt.util.aligned_memory import copy_bytes
from ckpt.util.threads import CORES, Worker

TRANSFER = 32 << 20  # bytes: less than a millisecond on PCIe, so that a loss which is read waits no longer
STRAIGHT = 128 << 20  # bytes: two milliseconds, and Python takes the interpreter's lock from training less often
STEP = 64 << 20  # bytes that hashing and writing wait for at a time

# Threads that copy, each with a slot of the ring. Three beside training bring a snapshot sooner, and training loses
# more by it; with two slots for each, more still.
BESIDE_TRAINING, WHILE_IT_WAITS = 2, min(8, CORES)


class Source(NamedTuple):
    """A range of the bytes of a tensor, in the order of the file."""

    tensor: torch.Tensor
    start: int
    stop: int

    def flat(self) -> torch.Tensor:
        """These bytes, flat: a view, or a copy on the device if they do not lie in that order."""
        return flat_bytes(self.tensor)[self.start : self.stop]

    def flat_somewhere(self) -> torch.Tensor:
        """The same; a copy on the host if the device has no room for one."""
        try:
            return self.flat()
        except torch.OutOfMemoryError:
            on_host = torch.stack([movable(row).cpu() for row in self.tensor.detach().unbind(0)])
            return flat_bytes(on_host)[self.start : self.stop]


class Run(NamedTuple):
    """Consecutive bytes of a transfer that are consecutive in the image of the snapshot, too."""

    offset: int
    start: int
    size: int


@dataclass
class Transfer:
    """Bytes of one file on one device that are fetched at once, in the order of the image.

    `is_live`: training can change them, and waits until they are fetched.
    """

    device: torch.device
    file: str
    is_live: bool
    sources: list[Source] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    size: int = 0

    @property
    def start(self) -> int:
        """The place of its first byte in the image."""
        return self.runs[0].start

    def add(self, source: Source, start: int) -> None:
        last, size = self.runs[-1] if self.runs else None, source.stop - source.start
        if last is not None and last.start + last.size == start:
            self.runs[-1] = last._replace(size=last.size + size)
        else:
            self.runs.append(Run(self.size, start, size))
        self.sources.append(source)
        self.size += size

    def by_run(self) -> Iterator[tuple[Run, list[Source]]]:
        """The sources of every run."""
        left = iter(self.sources)
        for run in self.runs:
            sources, size = list[Source](), 0
            while size < run.size:
                sources.append(next(left))
                size += sources[-1].stop - sources[-1].start
            yield run, sources

    def flat(self) -> Iterator[torch.Tensor]:
        """The bytes. To be iterated over in the stream that they are copied on."""
        if not self.sources:
            raise StateError("ckpt can't read a snapshot whose memory it has released")
        for source in self.sources:
            yield source.flat_somewhere()

    def release(self) -> None:
        """The bytes have been fetched: neither copies nor live tensors are needed any more."""
        self.sources = []


def plan_transfers(copies: Iterable[TensorCopy], most: int = 0) -> list[Transfer]:
    """Tensors on devices, in the order of the image. A larger tensor lies in several transfers, small ones in one.

    None goes beyond a multiple of `most` bytes of the image, `TRANSFER` by default.
    """
    most = most or TRANSFER
    transfers: list[Transfer] = []
    for file, tensor, place, is_live in copies:
        size, done, kind = tensor.nbytes, 0, (tensor.device, file, is_live)
        while done < size:
            last, window = transfers[-1] if transfers else None, (place + done) // most
            if last is None or last.start // most != window or (last.device, last.file, last.is_live) != kind:
                last = Transfer(*kind)
                transfers.append(last)
            stop = min(size, (window + 1) * most - place)
            last.add(Source(tensor, done, stop), place + done)
            done = stop
    return transfers


class Arrival:
    """How much of a snapshot is in host memory: whoever hashes or writes it waits no longer than for its bytes.

    `transfers`: the places and sizes, ascending, of what arrives in any order.
    """

    def __init__(self, transfers: Sequence[tuple[int, int]] = ()) -> None:
        self._starts = [start for start, _ in transfers]
        self._missing = {number: size for number, (_, size) in enumerate(transfers)}  # bytes, ascending
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self.is_discarded = False  # nobody needs the rest any more
        self.at = time.monotonic()  # when the last byte arrived

    def arrived(self, number: int) -> None:
        """The transfer of this number is in the image."""
        with self._changed:
            del self._missing[number]
            self.at = time.monotonic()
            self._changed.notify_all()

    @property
    def missing(self) -> int:
        """Bytes that have not arrived yet."""
        with self._changed:
            return sum(self._missing.values())

    def fail(self, error: BaseException) -> None:
        """The rest will not arrive: whoever waits for it gets this error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def discard(self) -> None:
        """Nobody needs the rest: it is not fetched, and whoever waits for it gets an error."""
        self.is_discarded = True
        if self.missing:
            self.fail(StateError("ckpt can't read a snapshot whose memory it has released"))

    def wait(self, stop: int | None = None) -> None:
        """Block until the bytes of the image up to `stop` have arrived. Without `stop`, wait for the complete image."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._reached(stop))
            if self._error is not None and not self._reached(stop):
                raise self._error

    def pieces(self, view: memoryview, start: int, head: int) -> Iterator[memoryview]:
        """The bytes of a file that lies at `start` of the image, each piece when it is there; the head is in the first.

        If nothing is missing it is one piece.
        """
        # without the lock: if the last bytes arrive just now, there are only more pieces than necessary
        step = len(view) if not self._missing else -(-max(head, STEP) // STEP) * STEP
        for begin in range(0, len(view), max(1, step)):
            end = min(begin + step, len(view))
            self.wait(start + end)
            yield view[begin:end]

    def _reached(self, stop: int | None) -> bool:
        first = next(iter(self._missing), None)
        return first is None or (stop is not None and stop <= self._starts[first])


class Fetcher:
    """Fetches transfers of any device. Snapshots that are fetched at the same time take turns."""

    def __init__(self, devices: Mapping[torch.device, Device]) -> None:
        self._devices = devices
        self._ring: dict[tuple[torch.device, int], torch.Tensor] = {}  # slots by number, for every device
        self._turn = threading.Lock()

    def fetch(
        self,
        transfers: Iterable[tuple[int, Transfer]],
        image: Image,
        memory: torch.Tensor,
        arrival: Arrival,
        threads: int,
    ) -> None:
        """Fetch transfers, each with its number, into the memory of an image. They are released on the way."""
        view = host_bytes(memory)

        def scatter(slot: memoryview, transfer: Transfer, number: int) -> None:
            for offset, start, size in transfer.runs:
                image.make_resident(start, size)
                copy_bytes(slot[offset : offset + size], view[start : start + size])
            arrival.arrived(number)

        with self._turn, ExitStack() as stack:
            workers = [Worker("ckpt-fetch", kept=True) for _ in range(threads)]
            for worker in workers:
                stack.callback(worker.close)
            turns = itertools.cycle(range(threads))
            for number, transfer in transfers:
                if arrival.is_discarded:
                    return
                turn = next(turns)
                workers[turn].wait()  # until its slot is free
                slot = self._bring(transfer, self._ring, turn)
                transfer.release()  # the slot has the bytes: the device may have its memory back
                workers[turn].start(partial(scatter, slot, transfer, number))
            for worker in workers:
                worker.wait()

    def fetch_straight(
        self, transfers: Iterable[tuple[int, Transfer]], image: ReservedImage, memory: torch.Tensor, arrival: Arrival
    ) -> None:
        """The same where the pages of an image are registered: the device writes to them itself."""
        with self._turn:
            for number, transfer in transfers:
                if arrival.is_discarded:
                    return
                for run, sources in transfer.by_run():
                    image.wait_until_ready(run.start, run.size)
                    flat = (source.flat_somewhere() for source in sources)
                    self._devices[transfer.device].fetch(flat, memory[run.start : run.start + run.size])
                transfer.release()
                arrival.arrived(number)

    def stream(self, transfers: Iterable[Transfer]) -> Iterator[tuple[Transfer, memoryview]]:
        """Every transfer with its bytes, which are valid until the next is asked for. Nothing is released."""
        ring: dict[tuple[torch.device, int], torch.Tensor] = {}  # the other one belongs to whoever has the turn
        for transfer in transfers:
            yield transfer, self._bring(transfer, ring, 0)

    def release(self) -> None:
        """Free the pinned memory."""
        with self._turn:
            self._ring = {}

    def _bring(self, transfer: Transfer, ring: dict[tuple[torch.device, int], torch.Tensor], number: int) -> memoryview:
        """Copy a transfer to a slot of a ring, pinned where the device knows that, and wait for it."""
        device = self._devices[transfer.device]
        if (transfer.device, number) not in ring:
            ring[transfer.device, number] = device.allocate_on_host(TRANSFER)
        slot = ring[transfer.device, number]
        device.fetch(transfer.flat(), slot[: transfer.size])
        return host_bytes(slot)
