"""Snapshots: a copy of the state in host memory, laid out as the files that will be written.

Parameters and optimizer state change only in `optimizer.step()`. So on an accelerator they are copied on a stream of
their own while forward and backward run, and the next step waits for that copy, on the device. Everything else is
copied before `take` returns.
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
from torch.utils.hooks import RemovableHandle

from ckpt.errors import StateError
from ckpt.formats.state import FilePlan
from ckpt.save.memory_limit import available
from ckpt.save.pinned_pool import PinnedPool
from ckpt.save.snapshot_layout import SnapshotLayout, in_pages
from ckpt.save.staging_copy import StagingViews, TensorCopy, send, send_all
from ckpt.util.console import format_size as shown
from ckpt.util.threads import ThreadCall

_log = logging.getLogger("ckpt")
_LITTLE = 64 << 20  # bytes: less than this is not worth prefaulting
_EMPTY = torch.empty(0, dtype=torch.uint8)


@dataclass
class Snapshot:
    """Files in memory, by path. Bytes from an accelerator arrive while training continues: see `wait`."""

    files: dict[str, FilePlan]
    overlapped: list[tuple[TensorCopy, int]] = field(default_factory=list)  # each with its tensor's version counter
    sending: ThreadCall | None = None  # enqueues the overlapped copies; returns the event after the last of each device
    finish: Callable[[], None] | None = None  # runs on the save thread: fetches the device copy into host memory
    _changed: list[str] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def detect_changes(self) -> None:
        """Compare version counters, once: when all copies have arrived, or just before the next optimizer step."""
        with self._lock:
            if self._changed is None:
                if self.sending is not None:
                    self.sending.has_failed()  # waits for it
                self._changed = [copy.name for copy, version in self.overlapped if copy.source._version != version]

    def wait(self) -> None:
        """Block until all bytes have arrived. Raises if a tensor was changed while it was being copied."""
        if self.sending is not None:
            _synchronize(self.sending.result())
        self.detect_changes()
        names = self._changed or []
        self.overlapped = []  # or the tensors would live as long as the snapshot
        if names:
            self.finish = None  # or the copy on the device would live as long as the error
            raise StateError(
                f"nothing was saved, because these were changed in place while they were being copied: "
                f"{', '.join(names[:8])}{' and others' if len(names) > 8 else ''}. Change nothing between save_state() "
                "and the next optimizer.step(), or use save_state(wait=True)."
            )
        if self.finish is not None:
            self.finish()


class Snapshots:
    """Takes snapshots, one at a time, in pooled host memory that every snapshot reuses.

    `limit`: bytes of host memory to use at most; by default four fifths of what is available.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._pool = PinnedPool()
        self._pending: Snapshot | None = None
        self._streams: dict[torch.device, torch.Stream] = {}
        self._hooks: list[RemovableHandle] = []
        self._views = StagingViews(_EMPTY)
        self._has_warned = False

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Make the steps of these optimizers wait for copies that are under way."""
        method = weakref.WeakMethod(self._before_step)  # an optimizer may outlive the manager

        def before_step(*_: Any) -> None:
            wait_for_copies = method()
            if wait_for_copies is not None:
                wait_for_copies()

        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(before_step))

    def create_streams(self, devices: Iterable[torch.device]) -> None:
        """Create the copy streams of these devices now: the first stream in a process takes a twentieth of a second."""
        for device in devices:
            self._stream(device)

    def prefault(self, tensors: Iterable[torch.Tensor], *, for_devices_only: bool = False) -> None:
        """Begin to prefault memory for a snapshot of these tensors; with `for_devices_only`, of those on devices."""
        copied = [tensor for tensor in tensors if not (for_devices_only and tensor.is_cpu)]
        size = in_pages(tensor.nbytes for tensor in copied) + (1 << 20)
        if size > _LITTLE and self._fits(size):
            self._pool.prefault(size, _device(copied))

    def take(self, files: list[FilePlan], optimizer_owned: Callable[[], frozenset[int]]) -> Snapshot | None:
        """Copy the contents of these files; None if there is not enough host memory.

        `optimizer_owned`: returns the addresses of the storages that only optimizer steps change.
        """
        size = in_pages(file.size for file in files)
        if not self._fits(size):
            return None
        self._before_step()  # wait for the copies of an earlier snapshot
        layout = SnapshotLayout.of(files)
        if not self._hooks:  # without a hook no step would wait: copy everything now
            optimizer_owned = frozenset
        if layout.device is not None and not self._pool.is_ready(size) and _has_room(layout.device, size):
            return self._take_on_device(layout, optimizer_owned)
        memory = self._memory(size, layout.device)
        snapshot = Snapshot(layout.fill(memory))
        if layout.on_device:
            self._copy_from_device(layout.on_device, lambda: self._views_of(memory), optimizer_owned, snapshot)
        return snapshot

    def _take_on_device(self, layout: SnapshotLayout, optimizer_owned: Callable[[], frozenset[int]]) -> Snapshot:
        """Copy on the device, which takes milliseconds, and fetch that later: to pin host memory takes seconds."""
        size, device = layout.size, layout.device
        staged = functools.cache(lambda: StagingViews(torch.empty(size, dtype=torch.uint8, device=device)))
        cloned = [copy._replace(source=copy.source.clone()) for copy in layout.on_host]
        later = replace(layout, on_host=cloned, on_device=[])
        snapshot = Snapshot({})
        self._copy_from_device(layout.on_device, staged, optimizer_owned, snapshot)

        def fetch() -> None:
            assert snapshot.sending is not None
            memory = self._memory(size, device)
            module = torch.get_device_module(device)
            stream = module.Stream(device)
            for event in snapshot.sending.result().values():
                stream.wait_event(event)
            with module.stream(stream):
                send(TensorCopy("", "", staged().memory, 0), StagingViews(memory))
            stream.synchronize()
            snapshot.files = later.fill(memory)
            snapshot.finish = None

        snapshot.finish = fetch
        return snapshot

    def paused(self) -> AbstractContextManager[None]:
        """Suspend prefaulting while this context lasts."""
        return self._pool.paused()

    def close(self) -> None:
        """Release the memory, and the hooks on optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._pending = None
        self._views = StagingViews(_EMPTY)
        self._pool.release()

    def _memory(self, size: int, device: torch.device | None) -> torch.Tensor:
        if size > self._pool.size:
            self._views = StagingViews(_EMPTY)  # or the old memory would stay allocated beside the new
        return self._pool.allocate(size, device)

    def _fits(self, size: int) -> bool:
        limit = self._limit if self._limit is not None else int(0.8 * (available() + self._pool.size))
        if size > limit and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "a snapshot of the state needs %s of host memory, and %s may be used: training waits while a "
                "checkpoint is written. saving=ckpt.SaveOptions(host_memory=...) sets how much may be used.",
                shown(size), shown(limit),
            )  # fmt: skip
        return size <= limit

    def _copy_from_device(
        self,
        copies: list[TensorCopy],
        views: Callable[[], StagingViews],
        optimizer_owned: Callable[[], frozenset[int]],
        snapshot: Snapshot,
    ) -> None:
        """Copy now what anything may change, and on another thread what only the next optimizer step changes."""
        for device in {copy.source.device for copy in copies}:
            self._stream(device).wait_stream(torch.get_device_module(device).current_stream(device))
        owned = optimizer_owned()
        later = [copy for copy in copies if copy.source.untyped_storage().data_ptr() in owned]
        deferred = set(map(id, later))
        now = [copy for copy in copies if id(copy) not in deferred]
        done = self._send(now, views)
        snapshot.overlapped = [(copy, copy.source._version) for copy in later]  # keeps them alive until they are copied
        snapshot.sending = ThreadCall(lambda: self._send(later, views), "ckpt-copy")
        self._pending = snapshot
        _synchronize(done)

    def _send(self, copies: list[TensorCopy], views: Callable[[], StagingViews]) -> dict[torch.device, torch.Event]:
        """Enqueue copies on the copy stream of each device. Returns the event after the last copy of each."""
        by_device: dict[torch.device, list[TensorCopy]] = defaultdict(list)
        for copy in copies:
            by_device[copy.source.device].append(copy)
        events = {}
        for device, enqueued in by_device.items():
            with torch.get_device_module(device).stream(self._stream(device)):
                send_all(enqueued, views())  # called here: to allocate the buffer on a device takes a moment
                events[device] = self._stream(device).record_event()
        return events

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        return self._streams[device]

    def _views_of(self, memory: torch.Tensor) -> StagingViews:
        """The views are reused as long as snapshots are taken in the same memory."""
        known = self._views.memory
        if (known.data_ptr(), len(known)) != (memory.data_ptr(), len(memory)):
            self._views = StagingViews(memory)
        return self._views

    def _before_step(self, *_: Any) -> None:
        """Make the current streams wait for copies under way: what is being copied must not be changed before."""
        snapshot, self._pending = self._pending, None
        if snapshot is not None:
            snapshot.detect_changes()
            if snapshot.sending is None or snapshot.sending.has_failed():
                return  # the save will fail, and not this step
            for device, event in snapshot.sending.result().items():
                torch.get_device_module(device).current_stream(device).wait_event(event)


def _synchronize(events: Mapping[torch.device, torch.Event]) -> None:
    for event in events.values():
        event.synchronize()


def _has_room(device: torch.device, size: int) -> bool:
    """Whether a device has enough free memory for a copy: a quarter of its memory must be left to training."""
    free, total = torch.get_device_module(device).mem_get_info(device)
    return bool(free - size > total // 4)


def _device(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
