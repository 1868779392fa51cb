"""Bytes of a snapshot that are still on their way: no other bytes are read in their place."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest
import torch
from torch import nn

import ckpt
from ckpt.save.snapshot.fetch import Arrival
from ckpt.storage import ANY, Buffer
from tests.helpers.places import PassedOn, Place


class _Gated(PassedOn):
    """Files wait until the gate is open."""

    def __init__(self, root: Place) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        if key.endswith(".safetensors"):
            self.gate.wait(60)
        super().write(key, pieces, over=over)


def test_a_second_snapshot_of_the_same_size_does_not_reach_into_files_of_the_first(root: Place) -> None:
    storage, model = _Gated(root), nn.Linear(50, 50)
    with ckpt.StateManager(storage, model=model) as manager:
        storage.gate.clear()
        nn.init.constant_(model.weight, 1.0)
        manager.save_state("first")
        nn.init.constant_(model.weight, 2.0)
        threading.Timer(0.5, storage.gate.set).start()
        manager.save_state("second")
        nn.init.constant_(model.weight, 3.0)
    assert ckpt.verify(root) == {"second": [], "first": []}
    for name, value in (("first", 1.0), ("second", 2.0)):
        with ckpt.StateManager(root, model=model) as manager:
            manager.load_state(name)
        assert torch.equal(model.weight, torch.full((50, 50), value))


def test_what_has_arrived_can_be_read_after_a_failure_and_nothing_else_can() -> None:
    arrival = Arrival([(0, 10), (10, 10)])
    arrival.arrived(0)
    arrival.fail(RuntimeError("the device is gone"))
    arrival.wait(10)
    for stop in (11, None):
        with pytest.raises(RuntimeError, match="the device is gone"):
            arrival.wait(stop)
