"""Reads many transfers at once, block by block, in several threads, and verifies block hashes on the way.

Every block of a file has a hash, so a block of which anything is wanted is read from end to end: wanted bytes go
straight to their destination, the bytes between them into a scratch buffer, and all are hashed while they are still in
the processor's cache. The read plan says which blocks of which files are read, and where each wanted byte goes.

What goes to a device is read into pinned host memory: pages of our own, registered with the device. PyTorch's allocator
takes three times as long to provide it, one thread after the other, and a restarted process has none yet: an eighth of
a second of a load that takes one.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckpt.errors import DamagedError
from ckpt.formats.tensors import Transfer, as_bytes, host_bytes
from ckpt.root.verify import VerifiedFile, altered_blocks, reader_threads
from ckpt.util.aligned_memory import allocate_pages
from ckpt.util.threads import Worker

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
        raise DamagedError(f"{file.stored.key} has only {file.record.size} bytes, too few for its tensors.")
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


Advance = Callable[[float], None]

# Reads to a device go through pinned memory, two windows per thread, and pinning is slow: so fewer threads. Measured,
# like WINDOW, on two cores and on an H200.
_THREADS_TO_DEVICE = 10


def read_verified(transfers: Iterable[Transfer], where: str, advance: Advance, *, threads: int | None = None) -> None:
    """Carry out all transfers. Raises a `DamagedError` that names every block that does not match its hash.

    One thread reads in the order of files and bytes.
    """
    _run(plan_reads(transfers), where, _read_and_verify, advance, threads)


def verify(transfers: Iterable[Transfer], where: str, advance: Advance) -> None:
    """Verify every block that the transfers need, but copy nothing to their destinations."""
    blocks = {(id(block.file), block.index): (block.file, block.index) for block in plan_reads(transfers)}
    _refuse_damaged(where, altered_blocks(list(blocks.values()), advance))


def read(transfers: Iterable[Transfer], where: str, advance: Advance, *, threads: int | None = None) -> None:
    """Carry out all transfers without hashing: for bytes that `verify` has just checked."""
    _run(plan_reads(transfers), where, _read_only, advance, threads)


class _Cancelled(Exception):  # noqa: N818  # ends a thread's work, and is no error
    """Another thread has failed, or the user has interrupted the load."""


class _ThreadBuffers:
    """A thread's memory: a scratch buffer for unwanted bytes, and two pinned buffers for copies to devices."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop
        self.scratch = host_bytes(torch.empty(WINDOW, dtype=torch.uint8))  # a whole window may be unwanted
        self._pinned: list[PinnedBuffer] = []
        self._copied: list[list[torch.Event]] = [[], []]  # for each pinned buffer, the events after the copies from it
        self._turn = 0
        self._streams: dict[torch.device, torch.Stream] = {}

    def next_pinned(self, device: torch.device) -> torch.Tensor:
        """The other pinned buffer, once all copies from it are complete. It may serve other devices too."""
        if not self._pinned:
            self._pinned = [PinnedBuffer(WINDOW, device) for _ in range(2)]
        self._turn = 1 - self._turn
        for event in self._copied[self._turn]:
            event.synchronize()
        self._copied[self._turn] = []
        return self._pinned[self._turn].memory

    def send(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start copies (source, target) from the current pinned buffer to their devices, without waiting for them."""
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for source, target in copies:
            by_device[target.device].append((source, target))
        for device, pairs in by_device.items():
            stream = self._stream(device)
            with torch.get_device_module(device).stream(stream):
                for source, target in pairs:
                    target.copy_(source, non_blocking=True)
                self._copied[self._turn].append(stream.record_event())

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            module = torch.get_device_module(device)
            self._streams[device] = module.Stream(device)
            self._streams[device].wait_stream(module.default_stream(device))  # memory may just have been in use there
        return self._streams[device]

    def finish(self) -> None:
        """Wait until all copies to devices are complete, and give back the pinned memory."""
        for stream in self._streams.values():
            stream.synchronize()
        for buffer in self._pinned:
            buffer.release()


def _read_and_verify(block: BlockRead, buffers: _ThreadBuffers) -> str | None:
    hasher = block.file.hasher()
    for start, stop, segments in block.windows():
        for data in _read_window(block, start, stop, segments, buffers):
            hasher.update(data)
        _count_filled(segments)
    return block.file.hash_problem(block.index, hasher)


def _read_only(block: BlockRead, buffers: _ThreadBuffers) -> None:
    for start, stop, segments in block.windows():
        if block.file.shared:  # all ranks of the host may take part, whatever each wants
            _read_window(block, start, stop, segments, buffers)
        elif segments:
            _read_window(block, segments[0].start, segments[-1].stop, segments, buffers)
        _count_filled(segments)


def _count_filled(segments: list[Segment]) -> None:
    for segment in segments:
        segment.destination.filled(segment.size)


def _read_window(
    block: BlockRead, start: int, stop: int, segments: list[Segment], buffers: _ThreadBuffers
) -> list[memoryview]:
    """Read a window, each byte to its destination. Returns the memory that holds the window's bytes, in order."""
    if buffers.stop.is_set():
        raise _Cancelled
    if any(segment.destination.on_device for segment in segments):
        return [_read_through_pinned(block, start, stop, segments, buffers)]
    views, at, scratch = [], start, buffers.scratch
    for segment in segments:
        views += [scratch[: segment.start - at], segment.destination.host_view(segment.start, segment.stop)]
        scratch, at = scratch[segment.start - at :], segment.stop
    views.append(scratch[: stop - at])
    block.file.read_into(start, *views)
    return views


def _read_through_pinned(
    block: BlockRead, start: int, stop: int, segments: list[Segment], buffers: _ThreadBuffers
) -> memoryview:
    """Read a window into pinned memory, and copy its segments from there to devices and to host memory."""
    device = next(segment.destination.device for segment in segments if segment.destination.on_device)
    pinned = buffers.next_pinned(device)[: stop - start]
    data = host_bytes(pinned)
    block.file.read_into(start, data)
    copies = []
    for destination, first, last in segments:
        if destination.on_device:
            copies.append((pinned[first - start : last - start], destination.device_memory(first, last)))
        else:
            destination.host_view(first, last)[:] = data[first - start : last - start]
    buffers.send(copies)
    return data


Work = Callable[[BlockRead, _ThreadBuffers], str | None]  # reads a block; returns what is wrong with it, if anything


def _run(blocks: list[BlockRead], where: str, work: Work, advance: Advance, most: int | None) -> None:
    """Work on all blocks in several threads. When reading fails or is interrupted, the remaining blocks are dropped."""
    queue = _BlockQueue(blocks, work, advance)
    _in_threads(_thread_count(blocks, most), queue.work_through, queue.stop)
    _refuse_damaged(where, queue.damage)


class _BlockQueue:
    """Blocks that several threads take in turn. `stop` ends the work of all of them."""

    def __init__(self, blocks: list[BlockRead], work: Work, advance: Advance) -> None:
        self.stop = threading.Event()
        self.damage: list[str] = []
        self._pending = iter(blocks)
        self._turn = threading.Lock()
        self._work = work
        self._advance = advance

    def work_through(self) -> None:
        buffers = _ThreadBuffers(self.stop)
        try:
            while not self.stop.is_set() and (block := self._next()) is not None:
                self.damage.extend(filter(None, [self._work(block, buffers)]))
                self._advance(block.size)
        except _Cancelled:
            pass
        except BaseException:
            self.stop.set()
            raise
        finally:
            buffers.finish()

    def _next(self) -> BlockRead | None:
        with self._turn:
            return next(self._pending, None)


def _thread_count(blocks: list[BlockRead], most: int | None) -> int:
    to_device = any(segment.destination.on_device for block in blocks for segment in block.segments)
    threads = reader_threads(block.file.stored.storage for block in blocks) if most is None else most
    return min(threads, len(blocks), _THREADS_TO_DEVICE if to_device else threads)


def _in_threads(count: int, work: Callable[[], None], stop: threading.Event) -> None:
    """Run `work` in `count` threads, or in this one; `stop` is set before an error is raised."""
    if count < 2:
        work()
        return
    readers = [Worker("ckpt-read").start(work) for _ in range(count)]
    try:
        for reader in readers:
            reader.wait()
    except BaseException:  # Ctrl-C above all
        stop.set()
        raise
    finally:
        for reader in readers:
            reader.close()  # waits: they write into tensors


def _refuse_damaged(where: str, damage: Iterable[str]) -> None:
    listed = sorted(set(damage))
    if listed:
        raise DamagedError(f"{where} is damaged: {'; '.join(listed)}.")
