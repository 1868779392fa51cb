"""Reads many transfers at once, block by block, in several threads, and verifies block hashes on the way.

Every block of a file has a hash, so a block of which anything is wanted is read from end to end: wanted bytes go
straight to their destination, the bytes between them into a scratch buffer, and all are hashed while they are still in
the processor's cache.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from ckpt.errors import DamagedError
from ckpt.formats.tensor_bytes import host_bytes
from ckpt.formats.transfers import Transfer
from ckpt.load.pinned_buffer import PinnedBuffer
from ckpt.load.read_plan import WINDOW, BlockRead, Segment, plan_reads
from ckpt.root.verify import altered_blocks, reader_threads

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
    """Verify every block that the transfers need, without filling any destination."""
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
    for _, _, segments in block.windows():
        if segments:
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
    with ThreadPoolExecutor(count, thread_name_prefix="ckpt-read") as pool:
        try:
            for future in [pool.submit(work) for _ in range(count)]:
                future.result()
        except BaseException:  # Ctrl-C above all: leaving the pool waits for its threads
            stop.set()
            raise


def _refuse_damaged(where: str, damage: Iterable[str]) -> None:
    listed = sorted(set(damage))
    if listed:
        raise DamagedError(f"{where} is damaged: {'; '.join(listed)}.")
