"""A copy of the state as it is now, laid out as the files that will be written.

Parameters and optimizer state change only in `optimizer.step()`. So on an accelerator they are copied on a stream of
their own while forward and backward run, and the next step waits for that, on the device. Everything else is copied
before `take` returns.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ckpt.errors import StateError
from ckpt.formats.state import FilePlan
from ckpt.formats.tensor_bytes import host_bytes
from ckpt.save.memory_limit import available
from ckpt.save.pinned_pool import PinnedPool
from ckpt.save.staging_copy import StagingViews, TensorCopy, copy_on_host, send, send_all
from ckpt.util.console import format_size as shown
from ckpt.util.threads import ThreadCall

_log = logging.getLogger("ckpt")
_PAGE = 4096
_LITTLE = 64 << 20  # bytes: not worth making ready beforehand
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass
class Snapshot:
    """Files in memory. On an accelerator the last of their bytes arrive a little later."""

    images: dict[str, FilePlan]
    overlapped: list[tuple[TensorCopy, int]] = field(default_factory=list)  # with the versions that tensors had
    sending: ThreadCall | None = None  # gives the copies to their devices, and returns the event after the last of each
    rest: Callable[[], None] | None = None  # what is still to be done, behind the training's back
    _changed: list[str] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self) -> None:
        """See, once, whether what is copied was changed meanwhile: when it has arrived, or before a step changes it."""
        with self._lock:
            if self._changed is None:
                if self.sending is not None:
                    self.sending.has_failed()  # which waits for it
                self._changed = [one.name for one, version in self.overlapped if one.source._version != version]

    def wait(self) -> None:
        """Until all has arrived. Raises if something was changed while it was copied."""
        if self.sending is not None:
            _synchronize(self.sending.result())
        self.settle()
        names = self._changed or []
        self.overlapped = []  # or the tensors would live as long as the snapshot
        if names:
            self.rest = None  # or what it holds on the device would live as long as the error
            raise StateError(
                f"nothing was saved, because these were changed in place while they were being copied: "
                f"{', '.join(names[:8])}{' and others' if len(names) > 8 else ''}. Between save_state() and the next "
                "optimizer.step() change nothing, or use save_state(wait=True)."
            )
        if self.rest is not None:
            self.rest()


class Snapshots:
    """Makes snapshots, one at a time, in memory that is used again.

    `limit`: bytes of host memory to use at most.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._arena = PinnedPool()
        self._pending: Snapshot | None = None
        self._streams: dict[torch.device, Any] = {}
        self._hooks: list[Any] = []
        self._places = StagingViews(_NOTHING)
        self._told = False

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Let the steps of these optimizers wait for copies that are under way."""
        method = weakref.WeakMethod(self._before_step)  # an optimizer may outlive the manager

        def before_step(*_: Any) -> None:
            found = method()
            if found is not None:
                found()

        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(before_step))

    def meet(self, devices: Iterable[torch.device]) -> None:
        """Make what copies from these devices need: the first stream in a process takes a twentieth of a second."""
        for device in devices:
            self._stream(device)

    def prepare(self, tensors: Iterable[torch.Tensor], *, for_devices_only: bool = False) -> None:
        """Begin to make memory ready for as much state: all of it, or, where training waits, what devices hold."""
        found = [one for one in tensors if not (for_devices_only and one.is_cpu)]
        size = sum(-(-one.nbytes // _PAGE) * _PAGE for one in found) + (1 << 20)
        if size > _LITTLE and self._fits(size):
            self._arena.prepare(size, _device(found))

    def take(self, images: list[FilePlan], optimized: Callable[[], frozenset[int]]) -> Snapshot | None:
        """Copy what these files will hold. `optimized` finds the memory that only steps of optimizers change.

        None if there is no room for it.
        """
        starts, size = [], 0
        for image in images:
            starts.append(size)
            size += -(-image.size // _PAGE) * _PAGE
        if not self._fits(size):
            return None
        self._before_step()  # of a snapshot before this one
        layout = _Layout.of(images, starts, size)
        if not self._hooks:  # only what waits for us may be copied later
            optimized = frozenset
        if layout.device is not None and not self._arena.is_ready(size) and _has_room(layout.device, size):
            return self._take_on_device(layout, optimized)
        memory = self._memory(size, layout.device)
        snapshot = Snapshot(layout.put(memory))
        if layout.away:
            self._copy_from_device(layout.away, lambda: self._places_in(memory), optimized, snapshot)
        return snapshot

    def _take_on_device(self, layout: _Layout, optimized: Callable[[], frozenset[int]]) -> Snapshot:
        """Host memory takes seconds to be made ready, a copy on the device milliseconds: it is fetched later."""
        module = torch.get_device_module(layout.device)
        held = functools.cache(lambda: StagingViews(torch.empty(layout.size, dtype=torch.uint8, device=layout.device)))
        later = replace(layout, here=[one._replace(source=one.source.clone()) for one in layout.here], away=[])
        snapshot = Snapshot({})
        self._copy_from_device(layout.away, held, optimized, snapshot)

        def fetch() -> None:
            assert snapshot.sending is not None
            memory = self._memory(layout.size, layout.device)
            stream = module.Stream(layout.device)
            for event in snapshot.sending.result().values():
                stream.wait_event(event)
            with module.stream(stream):
                send(TensorCopy("", "", held().memory, 0), StagingViews(memory))
            stream.synchronize()
            snapshot.images = later.put(memory)
            snapshot.rest = None

        snapshot.rest = fetch
        return snapshot

    def paused(self) -> AbstractContextManager[None]:
        """While this lasts, no memory is made ready beforehand."""
        return self._arena.paused()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._pending = None
        self._places = StagingViews(_NOTHING)
        self._arena.release()

    def _memory(self, size: int, device: torch.device | None) -> torch.Tensor:
        if size > self._arena.size:
            self._places = StagingViews(_NOTHING)  # or the old memory would live on beside the new
        return self._arena.take(size, device)

    def _fits(self, size: int) -> bool:
        limit = self._limit if self._limit is not None else int(0.8 * (available() + self._arena.size))
        if size > limit and not self._told:
            self._told = True
            _log.warning(
                "a snapshot of the state needs %s of host memory, and there are %s for it: training waits while a "
                "checkpoint is written. host_memory= sets how much may be used.", shown(size), shown(limit),
            )  # fmt: skip
        return size <= limit

    def _copy_from_device(
        self,
        copies: list[TensorCopy],
        places: Callable[[], StagingViews],
        optimized: Callable[[], frozenset[int]],
        snapshot: Snapshot,
    ) -> None:
        for device in {one.source.device for one in copies}:
            self._stream(device).wait_stream(torch.get_device_module(device).current_stream(device))
        held = optimized()
        later = [one for one in copies if one.source.untyped_storage().data_ptr() in held]
        kept = set(map(id, later))
        now = [one for one in copies if id(one) not in kept]
        done = self._send(now, places)
        snapshot.overlapped = [(one, one.source._version) for one in later]  # keeps them alive until they are copied
        snapshot.sending = ThreadCall(lambda: self._send(later, places), "ckpt-copy")
        self._pending = snapshot
        _synchronize(done)

    def _send(self, copies: list[TensorCopy], places: Callable[[], StagingViews]) -> dict[torch.device, Any]:
        """Give copies to their devices, each on a stream of its own. Returns the event after the last of each."""
        by_device: dict[torch.device, list[TensorCopy]] = defaultdict(list)
        for one in copies:
            by_device[one.source.device].append(one)
        events = {}
        for device, some in by_device.items():
            with torch.get_device_module(device).stream(self._stream(device)):
                send_all(some, places())  # where to: on the device it takes a moment to be made
                events[device] = self._stream(device).record_event()
        return events

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        return self._streams[device]

    def _places_in(self, memory: torch.Tensor) -> StagingViews:
        """The same ones as long as snapshots are made in the same memory."""
        known = self._places.memory
        if (known.data_ptr(), len(known)) != (memory.data_ptr(), len(memory)):
            self._places = StagingViews(memory)
        return self._places

    def _before_step(self, *_: Any) -> None:
        """What is still being copied must not be changed before it has been."""
        snapshot, self._pending = self._pending, None
        if snapshot is not None:
            snapshot.settle()
            if snapshot.sending is None or snapshot.sending.has_failed():
                return  # the save will fail, and not this step
            for device, event in snapshot.sending.result().items():
                torch.get_device_module(device).current_stream(device).wait_event(event)


@dataclass(frozen=True)
class _Layout:
    """Where everything goes: bytes that are known, and tensors, here or away on a device."""

    images: list[FilePlan]
    starts: list[int]
    size: int
    headers: list[tuple[int, bytes]]
    here: list[TensorCopy]
    away: list[TensorCopy]

    @classmethod
    def of(cls, images: list[FilePlan], starts: list[int], size: int) -> _Layout:
        copies, headers = _laid_out(images, starts)
        here = [one for one in copies if one.source.is_cpu]
        away = [one for one in copies if not one.source.is_cpu]
        return cls(images, starts, size, headers, here, away)

    @property
    def device(self) -> torch.device | None:
        return self.away[0].source.device if self.away else None

    def put(self, memory: torch.Tensor) -> dict[str, FilePlan]:
        """Copy what is here, and return the files, which lie in memory now."""
        for start, header in self.headers:
            host_bytes(memory[start : start + len(header)])[:] = header
        copy_on_host(self.here, memory)
        placed = zip(self.images, self.starts, strict=True)
        return {image.path: _in_memory(image, memory, start) for image, start in placed}


def _synchronize(events: Mapping[torch.device, Any]) -> None:
    for event in events.values():
        event.synchronize()


def _has_room(device: torch.device, size: int) -> bool:
    """Whether there is so much free memory on a device that training will not miss it for a few seconds."""
    free, total = torch.get_device_module(device).mem_get_info(device)
    return bool(free - size > total // 4)


def _device(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    return next((one.device for one in tensors if one.device.type != "cpu"), None)


def _laid_out(images: list[FilePlan], starts: list[int]) -> tuple[list[TensorCopy], list[tuple[int, bytes]]]:
    """Where every tensor and every other byte of the files goes."""
    copies, headers = [], []
    for image, start in zip(images, starts, strict=True):
        for content in image.contents or ():
            if isinstance(content, bytes):
                headers.append((start, content))
                start += len(content)
            else:
                name, tensor = content
                copies.append(TensorCopy(image.path, name, tensor, start))
                start += tensor.nbytes
    return copies, headers


def _in_memory(image: FilePlan, memory: torch.Tensor, start: int) -> FilePlan:
    view = host_bytes(memory[start : start + image.size])
    return FilePlan(
        image.path, image.size, lambda: iter((view,)), image.likely_unchanged, in_memory=True, head=image.head
    )
