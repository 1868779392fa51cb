"""Stands for a device where there is none: tensors of the host that a snapshot stages and fetches as from a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ckpt.save.snapshot import devices, fetch, tensor_copies
from ckpt.save.snapshot.devices import Device, DeviceRoom
from tests.helpers.processes import DEADLINE


class SimulatedDevice(Device):
    """Fetches when its gate is open. What was fetched, and whether two fetches ever ran at once, is recorded."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.room = SimulatedRoom(1 << 40)
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.fetched: list[int] = []
        self.in_flight, self.most_in_flight = 0, 0
        self.ordering: threading.Thread | None = None
        self.can_register, self.straight = False, 0  # how many fetches went to registered pages
        self.registered: dict[int, int] = {}  # sizes of pages that the device may write to, by their address

    def register(self, memory: torch.Tensor) -> bool:
        if self.can_register:
            self.registered[memory.data_ptr()] = len(memory)
        return self.can_register

    def unregister(self, memory: torch.Tensor) -> None:
        del self.registered[memory.data_ptr()]

    def is_registered(self, memory: torch.Tensor) -> bool:
        """Whether all of it was registered at once."""
        start, stop = memory.data_ptr(), memory.data_ptr() + len(memory)
        return any(begin <= start and stop <= begin + size for begin, size in self.registered.items())

    @contextmanager
    def ordered(self) -> Iterator[None]:
        self.ordering = threading.current_thread()
        yield
        self.ordering = None

    def fetch(self, sources: Iterable[torch.Tensor], target: torch.Tensor) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        assert self.gate.wait(DEADLINE)
        if self.error is not None:
            raise self.error
        assert self.ordering is not threading.current_thread()  # others may fetch an earlier snapshot meanwhile
        super().fetch(sources, target)
        self.straight += self.is_registered(target)
        self.fetched.append(len(target))
        self.in_flight -= 1


class SimulatedRoom(DeviceRoom):
    """As much room as the test says."""

    def __init__(self, room: int) -> None:
        super().__init__(torch.device("cpu"), None)
        self.room = room

    def released(self) -> None:
        """There is no allocator to ask."""

    def measure(self) -> int:
        provided = self._provided()
        return self.room if provided is None else min(self.room, provided)


def simulate(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """From now on tensors of the host with more than one element are on a device with room for all of them."""
    simulated = SimulatedDevice(torch.device("cpu"))

    def of(device: torch.device, limit: int | None = None) -> Device:
        assert device == simulated.device
        return simulated

    monkeypatch.setattr(Device, "of", staticmethod(of))
    monkeypatch.setattr(devices, "is_on_host", lambda tensor: tensor.numel() < 2)
    monkeypatch.setattr(fetch, "TRANSFER", 300)
    monkeypatch.setattr(fetch, "STEP", 4096)
    monkeypatch.setattr(tensor_copies, "BLOCK", 1000)
    copied = tensor_copies._copied

    def in_order(tensors: list[torch.Tensor], *target: torch.Tensor, **options: Any) -> torch.Tensor:
        # a copy on the device: without its order, training could change the tensors first
        assert target or simulated.ordering is threading.current_thread()
        return copied(tensors, *target, **options)

    monkeypatch.setattr(tensor_copies, "_copied", in_order)
    return simulated


def with_room(
    monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice, room: int, allocatable: int | None = None
) -> None:
    """Give the device as much room as this; the allocator has less of it if `allocatable` says so."""
    device.room = SimulatedRoom(room)
    if allocatable is not None:
        monkeypatch.setattr(tensor_copies, "_copied", _limited(tensor_copies._copied, allocatable))


def _limited(allocate: Callable[..., torch.Tensor], limit: int) -> Callable[..., torch.Tensor]:
    """An allocator that has no more than this."""
    taken = 0

    def limited(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal taken
        memory = allocate(*args, **options)
        taken += memory.nbytes
        if taken > limit:
            raise torch.OutOfMemoryError
        return memory

    return limited
