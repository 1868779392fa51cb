"""The copy of a state on its device, which takes milliseconds, in the transfers by which it is fetched later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ckpt.save.device_streams import DeviceRoom, copy_packed
from ckpt.save.staging_copy import TensorCopy, flat_bytes

TRANSFER = 32 << 20  # bytes: less than a millisecond on PCIe, so that a loss which is read waits no longer
_BLOCK = 8  # transfers whose memory on the device is allocated at once


class Run(NamedTuple):
    """Consecutive bytes of a transfer that are consecutive in the image of the snapshot, too."""

    offset: int
    start: int
    size: int


@dataclass
class Transfer:
    """Bytes of one file that are fetched from a device at once, in the order of the image.

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

    def stage(self, block: torch.Tensor) -> None:
        """Enqueue the copy on the device, to `block`. The live tensors may change, or go, after it in the stream."""
        copy_packed(self.sources, block)
        self.staged, self.sources = block, []

    def release(self) -> None:
        """The bytes have been fetched: neither the copy nor the live tensors are needed any more."""
        self.staged, self.sources = None, []


def plan_transfers(copies: Iterable[TensorCopy]) -> list[Transfer]:
    """Tensors on devices, cut into transfers, in the order of the image."""
    transfers: list[Transfer] = []
    for copy in copies:
        left, start = flat_bytes(copy.source), copy.start
        while len(left):
            last = transfers[-1] if transfers else None
            if last is None or (last.device, last.file) != (left.device, copy.file) or last.size == TRANSFER:
                transfers.append(Transfer(left.device, copy.file))
            room = TRANSFER - transfers[-1].size
            transfers[-1].add(left if len(left) <= room else left[:room], start)
            left, start = left[room:], start + room
    return transfers


def stage(transfers: list[Transfer], room: DeviceRoom) -> None:
    """Copy as many transfers of a device as there is room for. Not the first ones: training waits for what remains
    live, so that hashing and writing can begin with it."""
    left, size, fitting = room.measure(), 0, list[Transfer]()
    for transfer in reversed(transfers):
        size += transfer.size
        if size > left:
            break
        fitting.append(transfer)
    staged = 0
    for together in _batched(fitting, _BLOCK):
        block = _allocate(together)
        if block is None:
            room.overestimated(staged)
            break
        for transfer in together:
            transfer.stage(block[: transfer.size])
            block = block[transfer.size :]
            staged += transfer.size
    room.taken(staged)


def _allocate(transfers: Sequence[Transfer]) -> torch.Tensor | None:
    """Memory for these on their device; None if the allocator has none."""
    try:
        size = sum(transfer.size for transfer in transfers)
        return torch.empty(size, dtype=torch.uint8, device=transfers[0].device)
    except torch.OutOfMemoryError:
        return None


def _batched(transfers: Sequence[Transfer], count: int) -> Iterator[Sequence[Transfer]]:
    for first in range(0, len(transfers), count):
        yield transfers[first : first + count]
