"""The copy of a state on its device, which takes milliseconds, in blocks that are fetched later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ckpt.errors import StateError
from ckpt.formats.tensors import movable
from ckpt.save.device_room import DeviceRoom
from ckpt.save.device_streams import copy_packed
from ckpt.save.staging_copy import TensorCopy, flat_bytes

BLOCK = 256 << 20  # bytes that are staged in one allocation
TRANSFER = 32 << 20  # bytes: less than a millisecond on PCIe, so that a loss which is read waits no longer


class Run(NamedTuple):
    """Consecutive bytes of a block that are consecutive in the image of the snapshot, too."""

    offset: int
    start: int
    size: int


@dataclass(frozen=True)
class LiveBytes:
    """A range of the bytes of a live tensor, in the order of the file."""

    tensor: torch.Tensor
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> LiveBytes:
        return LiveBytes(self.tensor, self.start + start, self.start + stop)

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


@dataclass
class DeviceBlock:
    """Bytes of one file on one device, in the order of the image.

    `sources`: the live bytes. `staged`: their copy on the device, where there was room for it. `is_private`: the
    sources are copies themselves, which training cannot reach.
    """

    device: torch.device
    file: str
    sources: list[LiveBytes] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    size: int = 0
    staged: torch.Tensor | None = None
    is_private: bool = False

    @property
    def is_detached(self) -> bool:
        """Whether training may continue: nothing that it changes is still needed."""
        return self.is_private or self.staged is not None

    @property
    def start(self) -> int:
        """The place of its first byte in the image."""
        return self.runs[0].start

    def add(self, source: LiveBytes, start: int) -> None:
        last = self.runs[-1] if self.runs else None
        if last is not None and last.start + last.size == start:
            self.runs[-1] = last._replace(size=last.size + len(source))
        else:
            self.runs.append(Run(self.size, start, len(source)))
        self.sources.append(source)
        self.size += len(source)

    def stage(self, memory: torch.Tensor) -> None:
        """Enqueue the copy on the device. The live tensors may change, or go, after it in the stream."""
        copy_packed((source.flat() for source in self.sources), memory)
        self.staged, self.sources = memory, []

    def transfers(self) -> Iterator[Transfer]:
        """The bytes, cut into transfers: of the copy if there is one, else of the live tensors."""
        for start in range(0, self.size, TRANSFER):
            stop = min(start + TRANSFER, self.size)
            yield Transfer(self, start, stop)

    def between(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """The bytes between two offsets, flat. To be iterated over in the stream that they are copied on."""
        if self.staged is not None:
            yield self.staged[start:stop]
        elif not self.sources:
            raise StateError("a snapshot was read after its memory had been given back")
        for source in _cut_sources(self.sources, start, stop):
            yield source.flat_somewhere()

    def release(self) -> None:
        """The bytes have been fetched: neither the copy nor the live tensors are needed any more."""
        self.staged, self.sources = None, []


class Transfer(NamedTuple):
    """Bytes of a block that are fetched at once."""

    block: DeviceBlock
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def runs(self) -> list[Run]:
        """Where they go in the image. Offsets are counted from the first byte of the transfer."""
        return _cut_runs(self.block.runs, self.start, self.stop)


def _cut_sources(sources: Iterable[LiveBytes], start: int, stop: int) -> list[LiveBytes]:
    """The part of sources, laid one after the other, between two offsets."""
    cut, offset = [], 0
    for source in sources:
        begin, end = max(start - offset, 0), min(stop - offset, len(source))
        if begin < end:
            cut.append(source.cut(begin, end))
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
    last: DeviceBlock | None = None
    for file, tensor, place in copies:
        device, size, done = tensor.device, tensor.nbytes, 0
        while done < size:
            if last is None or last.size == BLOCK or last.file != file or last.device != device:
                last = DeviceBlock(device, file)
                blocks.append(last)
            stop = min(size, done + BLOCK - last.size)
            last.add(LiveBytes(tensor, done, stop), place + done)
            done = stop
    return blocks


def stage(blocks: list[DeviceBlock], room: DeviceRoom) -> None:
    """Copy as many blocks of a device as there is room for. Not the first ones: training waits for what remains live,
    so that hashing and writing can begin with it."""
    left, staged = room.measure(), 0
    for block in reversed(blocks):
        if staged + block.size > left:
            break
        try:
            block.stage(_allocate(block))
        except torch.OutOfMemoryError:
            room.overestimated(staged)
            break
        staged += block.size
    room.taken(staged)


def _allocate(block: DeviceBlock) -> torch.Tensor:
    """Memory for a block on its device."""
    return torch.empty(block.size, dtype=torch.uint8, device=block.device)
