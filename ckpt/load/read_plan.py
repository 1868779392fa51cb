"""The plan of a load's reads: which blocks of which files, and where each byte of them goes."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ckpt.formats.tensor_bytes import as_bytes, host_bytes
from ckpt.formats.transfers import Transfer
from ckpt.root.verified_file import VerifiedFile

# Large windows: with smaller ones the threads wait for the interpreter, and larger ones gain nothing.
WINDOW = 16 << 20


class Landing:
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


class Piece(NamedTuple):
    """A part of a transfer that lies in one block."""

    landing: Landing
    start: int
    stop: int

    def within(self, start: int, stop: int) -> Piece:
        return Piece(self.landing, max(self.start, start), min(self.stop, stop))


@dataclass(frozen=True)
class Block:
    """A block of a file, and the pieces that are wanted of it, in the order of their bytes."""

    file: VerifiedFile
    index: int
    pieces: list[Piece]

    def chunks(self) -> Iterator[tuple[int, int, list[Piece]]]:
        """The block a little at a time: from where, to where, and what is wanted there."""
        stops = [piece.stop for piece in self.pieces]
        first, last = self.file.span(self.index)
        for start in range(first, last, WINDOW):
            stop = min(start + WINDOW, last)
            inside = []
            for piece in self.pieces[bisect_left(stops, start + 1) :]:
                if piece.start >= stop:
                    break
                inside.append(piece if start <= piece.start and piece.stop <= stop else piece.within(start, stop))
            yield start, stop, inside


def plan_reads(transfers: Iterable[Transfer]) -> list[Block]:
    """The blocks in which something is wanted, file by file."""
    by_file: dict[int, list[Landing]] = defaultdict(list)
    for one in transfers:
        by_file[id(one.reader)].append(Landing(one))
    found = []
    for landings in by_file.values():
        file: VerifiedFile = landings[0].transfer.reader
        size = file.record.block_size
        wanted: dict[int, list[Piece]] = defaultdict(list)
        for landing in sorted(landings, key=lambda one: one.transfer.start):
            start, end = landing.transfer.start, landing.transfer.stop
            while start < end:
                index = start // size
                stop = min(end, (index + 1) * size)
                wanted[index].append(Piece(landing, start, stop))
                start = stop
        found += [Block(file, index, part) for index, pieces in wanted.items() for part in _without_overlaps(pieces)]
    return found


def _without_overlaps(pieces: list[Piece]) -> list[list[Piece]]:
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
