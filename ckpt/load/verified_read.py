"""Many transfers at once, block by block, in several threads, verified on the way.

A file has a hash for every block. So the blocks in which something is wanted are read from end to end: what is wanted
goes straight to its place, what lies between passes through a small buffer, and all of it is hashed while it is still
in the processor's cache.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckpt.errors import DamagedError
from ckpt.formats.native.block_hash import BlockHasher
from ckpt.formats.tensor_bytes import as_bytes, host_bytes
from ckpt.formats.transfers import Transfer
from ckpt.root.verified_file import VerifiedFile
from ckpt.root.verify import altered_blocks, reader_threads

Advance = Callable[[float], None]

# Large windows: with smaller ones the threads wait for the interpreter, and larger ones gain nothing. Bytes go to a
# device through pinned memory, of which every thread needs two windows, and which takes time to pin: so there are few
# threads then. Measured on two cores and on an H200.
_WINDOW = 16 << 20
_THREADS_AWAY = 10


def read_verified(transfers: Iterable[Transfer], where: str, advance: Advance, *, threads: int | None = None) -> None:
    """Carry out all transfers. Raises a `DamagedError` that names every block that does not match its hash.

    With one thread they come in the order of their files and bytes.
    """
    _run(_blocks(transfers), where, _read_and_verify, advance, threads)


def verify(transfers: Iterable[Transfer], where: str, advance: Advance) -> None:
    """Look at every block that the transfers need, and move nothing."""
    blocks = {(id(one.file), one.index): (one.file, one.index) for one in _blocks(transfers)}
    _refuse(where, altered_blocks(list(blocks.values()), advance))


def read(transfers: Iterable[Transfer], where: str, advance: Advance, *, threads: int | None = None) -> None:
    """Carry out all transfers, of bytes that have just been verified."""
    _run(_blocks(transfers), where, _read_only, advance, threads)


class _Landing:
    """Where the bytes of a transfer arrive, in any order and from several threads."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.device = transfer.into.device if transfer.into is not None else torch.device("cpu")
        self.away = self.device.type != "cpu"
        self._memory = as_bytes(transfer.into) if self.away and transfer.into is not None else transfer.into
        self._view = None if self.away or transfer.into is None else host_bytes(transfer.into)
        self._left = transfer.size
        self._lock = threading.Lock()

    def view(self, start: int, stop: int) -> memoryview:
        """The memory on the CPU for these bytes of the file."""
        if self._view is None:
            with self._lock:
                if self._memory is None:
                    self._memory = torch.empty(self.transfer.size, dtype=torch.uint8)
                self._view = host_bytes(self._memory)
        return self._view[start - self.transfer.start : stop - self.transfer.start]

    def memory(self, start: int, stop: int) -> torch.Tensor:
        """The memory on a device for these bytes of the file."""
        assert self._memory is not None
        return self._memory[start - self.transfer.start : stop - self.transfer.start]

    def arrived(self, count: int) -> None:
        """When all have arrived, whoever waits for them takes them."""
        if self.transfer.take is None:
            return
        with self._lock:
            self._left -= count
            done = self._left == 0
        if done:
            assert self._memory is not None
            self.transfer.take(self._memory)
            self._memory = self._view = None


class _Piece(NamedTuple):
    """A part of a transfer that lies in one block."""

    landing: _Landing
    start: int
    stop: int

    def within(self, start: int, stop: int) -> _Piece:
        return _Piece(self.landing, max(self.start, start), min(self.stop, stop))


@dataclass(frozen=True)
class _Block:
    """A block of a file, and the pieces that are wanted of it, in the order of their bytes."""

    file: VerifiedFile
    index: int
    pieces: list[_Piece]

    def chunks(self) -> Iterator[tuple[int, int, list[_Piece]]]:
        """The block a little at a time: from where, to where, and what is wanted there."""
        stops = [piece.stop for piece in self.pieces]
        first, last = self.file.span(self.index)
        for start in range(first, last, _WINDOW):
            stop = min(start + _WINDOW, last)
            inside = []
            for piece in self.pieces[bisect_left(stops, start + 1) :]:
                if piece.start >= stop:
                    break
                inside.append(piece if start <= piece.start and piece.stop <= stop else piece.within(start, stop))
            yield start, stop, inside


def _blocks(transfers: Iterable[Transfer]) -> list[_Block]:
    """The blocks in which something is wanted, file by file."""
    by_file: dict[int, list[_Landing]] = defaultdict(list)
    for one in transfers:
        by_file[id(one.reader)].append(_Landing(one))
    found = []
    for landings in by_file.values():
        file: VerifiedFile = landings[0].transfer.reader
        size = file.record.block_size
        wanted: dict[int, list[_Piece]] = defaultdict(list)
        for landing in sorted(landings, key=lambda one: one.transfer.start):
            start, end = landing.transfer.start, landing.transfer.stop
            while start < end:
                index = start // size
                stop = min(end, (index + 1) * size)
                wanted[index].append(_Piece(landing, start, stop))
                start = stop
        found += [_Block(file, index, part) for index, pieces in wanted.items() for part in _without_overlaps(pieces)]
    return found


def _without_overlaps(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Where the same bytes are wanted twice, as of tied tensors, their block is read once for each."""
    rounds = [pieces[:1]]
    for piece in pieces[1:]:
        for one in rounds:
            if one[-1].stop <= piece.start:
                one.append(piece)
                break
        else:
            rounds.append([piece])
    return rounds


class _GivenUp(Exception):  # noqa: N818  # it ends a thread's work, and is no error
    """Another thread has failed, or the user has interrupted the load."""


class _Buffers:
    """What a thread needs: a buffer for bytes that nobody wants, and two through which bytes go to a device."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop
        self.unwanted = host_bytes(torch.empty(_WINDOW, dtype=torch.uint8))  # it may be that nothing is wanted
        self._slots: list[torch.Tensor] = []
        self._copied: list[list[Any]] = [[], []]  # for each slot, the events after the copies from it
        self._turn = 0
        self._streams: dict[torch.device, Any] = {}

    def next_slot(self) -> torch.Tensor:
        """A buffer in pinned memory, from which everything has arrived."""
        if not self._slots:
            self._slots = [torch.empty(_WINDOW, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._turn = 1 - self._turn
        for event in self._copied[self._turn]:
            event.synchronize()
        self._copied[self._turn] = []
        return self._slots[self._turn]

    def send(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy from the buffer to their devices, in the background."""
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for source, target in pairs:
            by_device[target.device].append((source, target))
        for device, copies in by_device.items():
            stream = self._stream(device)
            with torch.get_device_module(device).stream(stream):
                for source, target in copies:
                    target.copy_(source, non_blocking=True)
                self._copied[self._turn].append(stream.record_event())

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            module = torch.get_device_module(device)
            self._streams[device] = module.Stream(device)
            self._streams[device].wait_stream(module.default_stream(device))  # memory may just have been in use there
        return self._streams[device]

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for stream in self._streams.values():
            stream.synchronize()


def _read_and_verify(block: _Block, buffers: _Buffers) -> str | None:
    hasher = BlockHasher(block.file.record.block_size)
    for start, stop, pieces in block.chunks():
        for data in _read_chunk(block, start, stop, pieces, buffers):
            hasher.update(data)
        for piece in pieces:
            piece.landing.arrived(piece.stop - piece.start)
    return block.file.hash_problem(block.index, hasher)


def _read_only(block: _Block, buffers: _Buffers) -> None:
    for _, _, pieces in block.chunks():
        if pieces:
            _read_chunk(block, pieces[0].start, pieces[-1].stop, pieces, buffers)
        for piece in pieces:
            piece.landing.arrived(piece.stop - piece.start)


def _read_chunk(block: _Block, start: int, stop: int, pieces: list[_Piece], buffers: _Buffers) -> list[memoryview]:
    """Read a chunk, each byte to its place, and return where they are now, in order."""
    if buffers.stop.is_set():
        raise _GivenUp
    away = [piece for piece in pieces if piece.landing.away]
    if away:
        slot = buffers.next_slot()[: stop - start]
        data = host_bytes(slot)
        block.file.read_into(start, data)
        for one in pieces:
            if not one.landing.away:
                one.landing.view(one.start, one.stop)[:] = data[one.start - start : one.stop - start]
        buffers.send(
            [(slot[one.start - start : one.stop - start], one.landing.memory(one.start, one.stop)) for one in away]
        )
        return [data]
    found, at, unwanted = [], start, buffers.unwanted
    for piece in pieces:
        found += [unwanted[: piece.start - at], piece.landing.view(piece.start, piece.stop)]
        unwanted, at = unwanted[piece.start - at :], piece.stop
    found.append(unwanted[: stop - at])
    block.file.read_into(start, *found)
    return found


def _run(
    blocks: list[_Block],
    where: str,
    work: Callable[[_Block, _Buffers], str | None],
    advance: Advance,
    most: int | None,
) -> None:
    """Work on all blocks in several threads. If reading fails or is interrupted, the rest is given up."""
    waiting = iter(blocks)
    turn = threading.Lock()
    stop = threading.Event()
    wrong: list[str] = []

    def loop() -> None:
        buffers = _Buffers(stop)
        try:
            while not stop.is_set():
                with turn:
                    block = next(waiting, None)
                if block is None:
                    break
                wrong.extend(filter(None, [work(block, buffers)]))
                advance(sum(piece.stop - piece.start for piece in block.pieces))
        except _GivenUp:
            pass
        except BaseException:
            stop.set()
            raise
        finally:
            buffers.finish()

    away = any(piece.landing.away for block in blocks for piece in block.pieces)
    threads = reader_threads(block.file.stored.storage for block in blocks) if most is None else most
    threads = min(threads, len(blocks), _THREADS_AWAY if away else threads)
    if threads < 2:
        loop()
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-read") as pool:
            try:
                for done in [pool.submit(loop) for _ in range(threads)]:
                    done.result()
            except BaseException:  # Ctrl-C above all: leaving the pool waits for its threads
                stop.set()
                raise
    _refuse(where, wrong)


def _refuse(where: str, wrong: Iterable[str]) -> None:
    listed = sorted(set(wrong))
    if listed:
        raise DamagedError(f"{where} is damaged: {'; '.join(listed)}.")
