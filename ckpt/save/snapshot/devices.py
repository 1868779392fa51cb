"""Devices: copies that are ordered against all work of the process there, fetches beside training, and room for both.

PyTorch keeps the streams that it gives out in pools, so that all of them can be enumerated. A stream that a library
makes by itself must be synchronized with the current stream by its user, as for every other operation of PyTorch.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch

from ckpt.errors import StateError

_log = logging.getLogger("ckpt")

_WITH_STREAMS = {"cuda"}  # NVIDIA's and AMD's. What overlaps on others is not known: they are copied from at once
_SMALL = 1 << 20  # bytes: tensors below are packed by one kernel
_POOL = 32  # streams of each priority, after which PyTorch gives out the first again
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_SNAPSHOTS_UNTIL_RETRY = 10


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


class Device:
    """A device of which nothing is known but that tensors can be copied from it: all work on it is waited for first.

    `room`: how much memory copies may take there; None if they cannot be made there while training continues.
    """

    room: DeviceRoom | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @staticmethod
    def of(device: torch.device, limit: int | None = None) -> Device:
        """`limit`: bytes that copies may take there at most."""
        return StreamedDevice(device, limit) if device.type in _WITH_STREAMS else Device(device)

    def measure_room(self) -> int:
        """Bytes that copies may take there now."""
        return self.room.measure() if self.room is not None else 0

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Order what is enqueued here, on the current stream, after all work before it and before all work after it,
        on whatever stream."""
        torch.accelerator.synchronize(self.device)
        yield
        torch.accelerator.synchronize(self.device)

    def beside_training(self) -> AbstractContextManager[Any]:
        """What this thread enqueues on the device comes after what was `ordered`, and after nothing else."""
        return nullcontext()

    def fetch(self, sources: Iterable[torch.Tensor], target: torch.Tensor) -> None:
        """Copy flat tensors to host memory, one after the other, and wait for it."""
        copy_packed(sources, target, non_blocking=False)

    def allocate_on_host(self, size: int) -> torch.Tensor:
        """Host memory to fetch into, pinned if the device knows that."""
        return torch.empty(size, dtype=torch.uint8)

    def register(self, memory: torch.Tensor) -> bool:
        """Let the device write to these pages of host memory until you call `unregister`. Returns False if the device
        can't write there."""
        return False

    def unregister(self, memory: torch.Tensor) -> None:
        """The pages may be unmapped."""


class StreamedDevice(Device):
    """A device whose streams order copies without the host, and whose memory has room for a copy of the state."""

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        super().__init__(device)
        self.room = DeviceRoom(device, limit)
        self._module: Any = torch.get_device_module(device)
        with self._module.device(device):
            self._fetching = self._module.Stream(device)  # of the lowest priority: training and NCCL come first
            self._fetched = self._module.Event(blocking=True)
            self._streams = self._all_streams()

    @contextmanager
    def ordered(self) -> Iterator[None]:
        with self._module.device(self.device):
            if self._module.is_current_stream_capturing():
                raise StateError(
                    "you called save_state() while CUDA was capturing a graph. Save before or after the capture."
                )
            current = self._module.current_stream(self.device)
            others = [stream for stream in self._streams if stream != current]
            for stream in others:
                if not stream.query():
                    current.wait_stream(stream)
        yield
        done = current.record_event()
        for stream in others:
            stream.wait_event(done)

    @contextmanager
    def beside_training(self) -> Iterator[None]:
        with self._in_this_thread(), self._module.stream(self._fetching):
            yield

    def fetch(self, sources: Iterable[torch.Tensor], target: torch.Tensor) -> None:
        # one at a time: a second transfer in the queue would hold up those of training
        with self.beside_training():
            copy_packed(sources, target)
            self._fetched.record(self._fetching)
            self._fetched.synchronize()

    def allocate_on_host(self, size: int) -> torch.Tensor:
        with self._in_this_thread():
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                _warn_of_slow_copies(str(error).partition("\n")[0])
        return super().allocate_on_host(size)

    def register(self, memory: torch.Tensor) -> bool:
        return self._call_driver("cuMemHostRegister_v2", memory.data_ptr(), len(memory), _PORTABLE)

    def unregister(self, memory: torch.Tensor) -> None:
        self._call_driver("cuMemHostUnregister", memory.data_ptr())

    def _call_driver(self, name: str, address: int, *arguments: int) -> bool:
        """A call of the driver, whose errors stay its own: one of the runtime would be raised by a later operation."""
        driver = _driver()
        if driver is None:
            return False
        with self._in_this_thread():
            self._fetching.query()  # the thread has a context from then on
            sizes = map(ctypes.c_size_t, arguments[:-1])
            flags = map(ctypes.c_uint, arguments[-1:])
            return bool(getattr(driver, name)(ctypes.c_void_p(address), *sizes, *flags) == 0)

    @contextmanager
    def _in_this_thread(self) -> Iterator[None]:
        """Make the device current: another thread than training's would create a context on the first device.

        And leave a graph alone that training captures meanwhile: whatever this thread does would invalidate it.
        """
        with self._module.device(self.device), _beside_captures():
            yield

    def _all_streams(self) -> list[Any]:
        """The default stream, and all in the pools of this device. Training may have been given any of them, also the
        one that bytes are fetched on."""
        least, greatest = self._module.Stream.priority_range()
        priorities = range(greatest, least + 1)  # several may have one pool
        rounds = 2 * _POOL  # another thread may be given some of them meanwhile
        pooled = [self._module.Stream(self.device, priority=value) for value in priorities for _ in range(rounds)]
        default = self._module.default_stream(self.device)
        return list({stream.stream_id: stream for stream in (default, self._fetching, *pooled)}.values())


class DeviceRoom:
    """What training has never used of a device, less a reserve.

    `limit`: bytes to take at most.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device = device
        self._limit = limit
        self._peak = 0  # bytes that training had allocated at most
        self._staged = 0  # bytes of the largest snapshot
        self._peak_beside = 0  # the allocator's peak when a snapshot was last released: it may be part of that
        self._in_one_piece: int | None = None  # bytes that the allocator could provide when it failed
        self._until_retry = 0  # snapshots

    def measure(self) -> int:
        """Bytes that can be taken now. Blocks that the allocator keeps for later are free."""
        module: Any = torch.get_device_module(self._device)
        free, total = module.mem_get_info(self._device)
        used, reserved = _figures(self._device)
        allocated = used.get("current", 0)
        cached = reserved.get("current", 0) - allocated
        self._peak = max(self._peak, allocated, self._peak_of_training(used.get("peak", 0)))
        needed = self._peak - allocated
        reserve = total // 32 if needed > total // 128 else total // 4  # no step was seen yet: who knows what it needs
        bounds = [free + cached - needed - reserve, self._limit, self._provided()]
        room: int = min(bound for bound in bounds if bound is not None)
        return max(0, room)

    def _provided(self) -> int | None:
        """What the allocator could provide when it had less than it said; None if it has not been tried for a while."""
        self._until_retry -= 1
        return self._in_one_piece if self._until_retry > 0 else None

    def _peak_of_training(self, peak: int) -> int:
        """What training needed at least, by the allocator's peak. A peak that rose without a snapshot is training's."""
        return peak if peak > self._peak_beside else peak - self._staged

    def taken(self, size: int) -> None:
        """A snapshot has taken as many bytes."""
        self._staged = max(self._staged, size)

    def released(self) -> None:
        """The snapshot has given its bytes back."""
        used, _ = _figures(self._device)
        self._peak_beside = max(self._peak_beside, used.get("peak", 0))

    def overestimated(self, room: int) -> None:
        """The allocator could not provide more than this: its free memory is in pieces, and to ask it takes long."""
        self._in_one_piece, self._until_retry = room, _SNAPSHOTS_UNTIL_RETRY


def _figures(device: torch.device) -> tuple[dict[str, int], dict[str, int]]:
    """What the allocator of a device has allocated, and what it has reserved: now, and at most."""
    figures = torch.get_device_module(device).memory_stats_as_nested_dict(device)
    used, reserved = (figures.get(name, {}).get("all", {}) for name in ("allocated_bytes", "reserved_bytes"))
    return used, reserved


@cache
def _warn_of_slow_copies(why: str) -> None:
    """Once on a host: its limits are those of all its ranks."""
    level = logging.WARNING if os.environ.get("LOCAL_RANK", "0") == "0" else logging.DEBUG
    _log.log(level, "ckpt could not pin host memory, so copies from the device are slow: %s", why)


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Allow this thread calls that would invalidate a graph which another thread captures."""
    exchange = _exchange_capture_mode()
    mode = ctypes.c_int(_RELAXED)
    if exchange is not None:
        exchange(ctypes.byref(mode))  # afterwards it has the mode before
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))


@cache
def _exchange_capture_mode() -> Any:
    """The call of NVIDIA's driver, for which PyTorch has no name; None without it."""
    return getattr(_driver(), "cuThreadExchangeStreamCaptureMode", None)


@cache
def _driver() -> Any:
    """NVIDIA's driver; None without it."""
    with suppress(OSError):
        return ctypes.CDLL("libcuda.so.1") if torch.version.cuda else None
    return None


def copy_packed(sources: Iterable[torch.Tensor], target: torch.Tensor, *, non_blocking: bool = True) -> None:
    """Enqueue copies of flat tensors to a target, one after the other; small neighbours are packed by one kernel."""
    offset, small = 0, list[torch.Tensor]()
    for source in sources:
        size = source.numel()  # `len` takes twenty times as long
        if size >= _SMALL:
            offset = _copy_small(small, target, offset, non_blocking)
            small = []
            target[offset : offset + size].copy_(source, non_blocking=non_blocking)
            offset += size
        else:
            small.append(source)
    _copy_small(small, target, offset, non_blocking)


def _copy_small(sources: list[torch.Tensor], target: torch.Tensor, offset: int, non_blocking: bool) -> int:
    """Returns the offset after them."""
    if len(sources) > 1:
        with suppress(torch.OutOfMemoryError):  # a device that is full: each is copied by itself
            sources = [torch.cat(sources)]
    for source in sources:
        size = source.numel()
        target[offset : offset + size].copy_(source, non_blocking=non_blocking)
        offset += size
    return offset
