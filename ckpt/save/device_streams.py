"""The streams of a device: a copy that is ordered against all work of the process there, and fetches beside training.

PyTorch keeps the streams that it gives out in pools, so that all of them can be enumerated. A stream that a library
makes by itself must be synchronized with the current stream by its user, as for every other operation of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ckpt.errors import StateError

_WITH_STREAMS = {"cuda"}  # NVIDIA's and AMD's. What overlaps on others is not known: they are copied from at once
_SMALL = 1 << 20  # bytes: tensors below are packed by one kernel
_POOL = 32  # streams of each priority, after which PyTorch gives out the first again
_PRIORITIES = 4  # that PyTorch has pools for
_SNAPSHOTS_UNTIL_RETRY = 10


class Device:
    """A device of which nothing is known but that tensors can be copied from it: all work on it is waited for first."""

    can_stage = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @staticmethod
    def of(device: torch.device) -> Device:
        return StreamedDevice(device) if device.type in _WITH_STREAMS else Device(device)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Order what is enqueued here, on the current stream, after all work before it and before all work after it,
        on whatever stream."""
        torch.accelerator.synchronize(self.device)
        yield
        torch.accelerator.synchronize(self.device)

    def fetch(self, sources: Iterable[torch.Tensor], target: torch.Tensor) -> None:
        """Copy flat tensors to host memory, one after the other, and wait for it."""
        copy_packed(sources, target, non_blocking=False)


class StreamedDevice(Device):
    """A device whose streams order copies without the host, and whose memory has room for a copy of the state."""

    can_stage = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._module: Any = torch.get_device_module(device)
        self._fetching = self._module.Stream(device)  # of the lowest priority: training and NCCL come first
        self._fetched = self._module.Event(blocking=True)
        self._streams = self._all_streams()

    @contextmanager
    def ordered(self) -> Iterator[None]:
        if self._module.is_current_stream_capturing():
            raise StateError("save_state() was called while a graph is being captured. Save before it, or after it.")
        current = self._module.current_stream(self.device)
        others = [stream for stream in self._streams if stream != current]
        for stream in others:
            if not stream.query():
                current.wait_stream(stream)
        yield
        done = current.record_event()
        for stream in others:
            stream.wait_event(done)

    def fetch(self, sources: Iterable[torch.Tensor], target: torch.Tensor) -> None:
        with self._module.stream(self._fetching):  # on which a second transfer would hold up those of training
            copy_packed(sources, target)
            self._fetched.record(self._fetching)
        self._fetched.synchronize()

    def _all_streams(self) -> list[Any]:
        """The default stream, and all in the pools of this device. Training may have been given any of them, also the
        one that bytes are fetched on."""
        least, greatest = self._module.Stream.priority_range()
        priorities = range(max(greatest, least - _PRIORITIES + 1), least + 1)
        pooled = [self._module.Stream(self.device, priority=value) for value in priorities for _ in range(_POOL)]
        default = self._module.default_stream(self.device)
        return list({stream.stream_id: stream for stream in (default, self._fetching, *pooled)}.values())


class DeviceRoom:
    """How much memory of a device a snapshot may take for a moment: what training has never used, less a reserve.

    `limit`: bytes to take at most.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device = device
        self._limit = limit
        self._peak = 0  # bytes that training had allocated at most
        self._staged = 0  # bytes of snapshots at most, by which the allocator's peak may be higher than training's
        self._in_one_piece: int | None = None  # bytes that the allocator could provide when it failed
        self._until_retry = 0  # snapshots

    def measure(self) -> int:
        """Bytes that can be taken now. Blocks that the allocator keeps for later are free."""
        module: Any = torch.get_device_module(self._device)
        free, total = module.mem_get_info(self._device)
        figures = module.memory_stats(self._device)
        allocated = figures.get("allocated_bytes.all.current", 0)
        cached = figures.get("reserved_bytes.all.current", 0) - allocated
        self._peak = max(self._peak, allocated, figures.get("allocated_bytes.all.peak", 0) - self._staged)
        needed = self._peak - allocated
        reserve = total // 32 if needed > total // 128 else total // 4  # no step was seen yet: who knows what it needs
        bounds = [free + cached - needed - reserve, self._limit, self._provided()]
        room: int = min(bound for bound in bounds if bound is not None)
        return max(0, room)

    def _provided(self) -> int | None:
        """What the allocator could provide when it had less than it said; None if it has not been tried for a while."""
        self._until_retry -= 1
        return self._in_one_piece if self._until_retry > 0 else None

    def taken(self, size: int) -> None:
        """A snapshot has taken as many bytes."""
        self._staged = max(self._staged, size)

    def overestimated(self, room: int) -> None:
        """The allocator could not provide more than this: its free memory is in pieces, and to ask it takes long."""
        self._in_one_piece, self._until_retry = room, _SNAPSHOTS_UNTIL_RETRY


def copy_packed(sources: Iterable[torch.Tensor], target: torch.Tensor, *, non_blocking: bool = True) -> None:
    """Enqueue copies of flat tensors to a target, one after the other; small neighbours are packed by one kernel."""
    offset, small = 0, list[torch.Tensor]()
    for source in sources:
        if len(source) >= _SMALL:
            offset = _copy_small(small, target, offset, non_blocking)
            small = []
            target[offset : offset + len(source)].copy_(source, non_blocking=non_blocking)
            offset += len(source)
        else:
            small.append(source)
    _copy_small(small, target, offset, non_blocking)


def _copy_small(sources: list[torch.Tensor], target: torch.Tensor, offset: int, non_blocking: bool) -> int:
    """Returns the offset after them."""
    with suppress(torch.OutOfMemoryError):  # a device that is full: each is copied by itself
        sources = [torch.cat(sources)] if len(sources) > 1 else sources
    for source in sources:
        target[offset : offset + len(source)].copy_(source, non_blocking=non_blocking)
        offset += len(source)
    return offset
