"""The copy of a state on its device, which takes milliseconds, in blocks that are fetched later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ckpt.save.device_streams import DeviceRoom, copy_packed
from ckpt.save.staging_copy import TensorCopy, flat_bytes

BLOCK = 256 << 20  # bytes that are staged in one allocation
TRANSFER = 32 << 20  # bytes: less than a millisecond on PCIe, so that a loss which is read waits no longer


class Run(NamedTuple):
    """Consecutive bytes of a block that are consecutive in the image of the snapshot, too."""

    offset: int
    start: int
    size: int


class Transfer(NamedTuple):
    """Bytes that are fetched at once: flat tensors on a device, and where they go in the image."""

    sources: list[torch.Tensor]
    runs: list[Run]
    size: int


@dataclass
class DeviceBlock:
    """Bytes of one file on one device, in the order of the image.

    `sources`: the live bytes, flat. `staged`: their copy on the device, where there was room for it.
    """

    device: torch.device
    file: str
    sources: list[torch.Tensor] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    size: int = 0
    staged: torch.Tensor | None = None

    @property
    def start(self) -> int:
        """The place of its first byte in the image."""
        return self.runs[0].start

    def add(self, source: torch.Tensor, start: int) -> None:
        last = self.runs[-1] if self.runs else None
        if last is not None and last.start + last.size == start:
            self.runs[-1] = last._replace(size=last.size + len(source))
        else:
            self.runs.append(Run(self.size, start, len(source)))
        self.sources.append(source)
        self.size += len(source)

    def stage(self, memory: torch.Tensor) -> None:
        """Enqueue the copy on the device. The live tensors may change, or go, after it in the stream."""
        copy_packed(self.sources, memory)
        self.staged, self.sources = memory, []

    def transfers(self) -> Iterator[Transfer]:
        """The bytes, cut into transfers: of the copy if there is one, else of the live tensors."""
        sources = [self.staged] if self.staged is not None else self.sources
        for start in range(0, self.size, TRANSFER):
            stop = min(start + TRANSFER, self.size)
            yield Transfer(_cut_sources(sources, start, stop), _cut_runs(self.runs, start, stop), stop - start)

    def release(self) -> None:
        """The bytes have been fetched: neither the copy nor the live tensors are needed any more."""
        self.staged, self.sources = None, []


def _cut_sources(sources: Iterable[torch.Tensor], start: int, stop: int) -> list[torch.Tensor]:
    """The part of flat tensors, laid one after the other, between two offsets."""
    cut, offset = [], 0
    for source in sources:
        begin, end = max(start - offset, 0), min(stop - offset, len(source))
        if begin < end:
            cut.append(source[begin:end])
        offset += len(source)
    return cut


def _cut_runs(runs: Iterable[Run], start: int, stop: int) -> list[Run]:
    """The part of runs between two offsets of their block. Their offsets are counted from the first of these."""
    cut = []
    for offset, place, size in runs:
        begin, end = max(start, offset), min(stop, offset + size)
        if begin < end:
            cut.append(Run(begin - start, place + begin - offset, end - begin))
    return cut


def plan_blocks(copies: Iterable[TensorCopy]) -> list[DeviceBlock]:
    """Tensors on devices, in blocks in the order of the image. A tensor that is larger than a block lies in several."""
    blocks: list[DeviceBlock] = []
    for copy in copies:
        left, start = flat_bytes(copy.source), copy.start
        while len(left):
            last = blocks[-1] if blocks else None
            if last is None or (last.device, last.file) != (left.device, copy.file) or last.size == BLOCK:
                blocks.append(DeviceBlock(left.device, copy.file))
            room = BLOCK - blocks[-1].size
            blocks[-1].add(left if len(left) <= room else left[:room], start)
            left, start = left[room:], start + room
    return blocks


def stage(blocks: list[DeviceBlock], room: DeviceRoom) -> None:
    """Copy as many blocks of a device as there is room for. Not the first ones: training waits for what remains live,
    so that hashing and writing can begin with it."""
    left, staged = room.measure(), 0
    for block in reversed(blocks):
        memory = _allocate(block) if staged + block.size <= left else None
        if memory is None:
            if staged + block.size <= left:
                room.overestimated(staged)
            break
        block.stage(memory)
        staged += block.size
    room.taken(staged)


def _allocate(block: DeviceBlock) -> torch.Tensor | None:
    """Memory for a block on its device; None if the allocator has none."""
    try:
        return torch.empty(block.size, dtype=torch.uint8, device=block.device)
    except torch.OutOfMemoryError:
        return None
