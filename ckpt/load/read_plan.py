"""The read plan of a load: which blocks of which files are read, and where each wanted byte goes."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ckpt.errors import DamagedError
from ckpt.formats.tensor_bytes import as_bytes, host_bytes
from ckpt.formats.transfers import Transfer
from ckpt.root.verified_file import VerifiedFile

# Bytes per read. With smaller windows the threads contend for the interpreter lock; larger ones gain nothing.
WINDOW = 16 << 20


class Destination:
    """The memory that a transfer fills, in any order and from several threads."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.device = transfer.into.device if transfer.into is not None else torch.device("cpu")
        self.on_device = self.device.type != "cpu"
        self._memory = as_bytes(transfer.into) if self.on_device and transfer.into is not None else transfer.into
        self._view = None if self.on_device or transfer.into is None else host_bytes(transfer.into)
        self._remaining = transfer.size
        self._lock = threading.Lock()

    def host_view(self, start: int, stop: int) -> memoryview:
        """The host memory for the file's bytes from `start` to `stop`, allocated at the first call if there is none."""
        if self._view is None:
            with self._lock:
                if self._memory is None:
                    self._memory = torch.empty(self.transfer.size, dtype=torch.uint8)
                self._view = host_bytes(self._memory)
        return self._view[start - self.transfer.start : stop - self.transfer.start]

    def device_memory(self, start: int, stop: int) -> torch.Tensor:
        """The device memory for the file's bytes from `start` to `stop`."""
        assert self._memory is not None
        return self._memory[start - self.transfer.start : stop - self.transfer.start]

    def filled(self, count: int) -> None:
        """Count bytes that have been read; with the last of them, hand the memory to the transfer's `take`."""
        if self.transfer.take is None:
            return
        with self._lock:
            self._remaining -= count
            complete = self._remaining == 0
        if complete:
            assert self._memory is not None
            self.transfer.take(self._memory)
            self._memory = self._view = None


class Segment(NamedTuple):
    """The bytes of a transfer that lie in one block, as offsets in the file."""

    destination: Destination
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def clipped(self, start: int, stop: int) -> Segment:
        return Segment(self.destination, max(self.start, start), min(self.stop, stop))


@dataclass(frozen=True)
class BlockRead:
    """A block of a file, and the segments wanted of it, in the order of their bytes and without overlaps."""

    file: VerifiedFile
    index: int
    segments: list[Segment]

    @property
    def size(self) -> int:
        """The wanted bytes."""
        return sum(segment.size for segment in self.segments)

    def windows(self) -> Iterator[tuple[int, int, list[Segment]]]:
        """The block window by window: start, stop, and the segments inside, clipped to it."""
        stops = [segment.stop for segment in self.segments]
        first, last = self.file.span(self.index)
        for start in range(first, last, WINDOW):
            stop = min(start + WINDOW, last)
            yield start, stop, _clipped(self.segments[bisect_left(stops, start + 1) :], start, stop)


def plan_reads(transfers: Iterable[Transfer]) -> list[BlockRead]:
    """The blocks in which something is wanted, file by file."""
    by_file: dict[int, list[Destination]] = defaultdict(list)
    for transfer in transfers:
        by_file[id(transfer.reader)].append(Destination(transfer))
    return [block for destinations in by_file.values() for block in _blocks_of_file(destinations)]


def _blocks_of_file(destinations: list[Destination]) -> Iterator[BlockRead]:
    file: VerifiedFile = destinations[0].transfer.reader
    if any(destination.transfer.stop > file.record.size for destination in destinations):
        raise DamagedError(
            f"{file.stored.key} has {file.record.size} bytes: it ends before tensors that it should hold."
        )
    by_block: dict[int, list[Segment]] = defaultdict(list)
    for destination in sorted(destinations, key=lambda destination: destination.transfer.start):
        for index, segment in _segments(destination, file.record.block_size):
            by_block[index].append(segment)
    for index, segments in by_block.items():
        yield from (BlockRead(file, index, disjoint) for disjoint in _without_overlaps(segments))


def _segments(destination: Destination, block_size: int) -> Iterator[tuple[int, Segment]]:
    """A transfer cut at block boundaries: for each block its index, and the segment in it."""
    start, end = destination.transfer.start, destination.transfer.stop
    while start < end:
        index = start // block_size
        stop = min(end, (index + 1) * block_size)
        yield index, Segment(destination, start, stop)
        start = stop


def _clipped(segments: list[Segment], start: int, stop: int) -> list[Segment]:
    """The segments that begin before `stop`, clipped to a window. None of them ends before `start`."""
    inside = []
    for segment in segments:
        if segment.start >= stop:
            break
        fits = start <= segment.start and segment.stop <= stop
        inside.append(segment if fits else segment.clipped(start, stop))
    return inside


def _without_overlaps(segments: list[Segment]) -> list[list[Segment]]:
    """Segments in rounds without overlaps: bytes wanted twice, as of tied tensors, are read once for each."""
    rounds = [segments[:1]]
    for segment in segments[1:]:
        for earlier in rounds:
            if earlier[-1].stop <= segment.start:
                earlier.append(segment)
                break
        else:
            rounds.append([segment])
    return rounds
