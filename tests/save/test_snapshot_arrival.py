"""A snapshot whose bytes arrive later, as from a device: the files are written when they have arrived, not before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

import ckpt
from ckpt.formats.state import FilePlan
from ckpt.save.snapshot import Snapshot, Snapshots
from ckpt.storage import ANY, Buffer
from tests.helpers.places import PassedOn, Place


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every snapshot is empty memory until it has been waited for. The paths of files that have arrived."""
    take, arrived = Snapshots.take, list[str]()

    def take_late(
        self: Snapshots, files: list[FilePlan], optimizer_owned: Callable[[], frozenset[int]]
    ) -> Snapshot | None:
        snapshot = take(self, files, optimizer_owned)
        assert snapshot is not None
        held = [(path, view, bytes(view)) for path, file in snapshot.files.items() for view in file.pieces()]
        for _, view, _ in held:
            view[:] = bytes(len(view))

        def arrive() -> None:
            for path, view, data in held:
                view[:] = data
                arrived.append(path)

        snapshot.finish = arrive
        return snapshot

    monkeypatch.setattr(Snapshots, "take", take_late)
    return arrived


def test_a_save_in_the_background_writes_what_has_arrived(root: Place, late: list[str]) -> None:
    model = nn.Linear(3, 3)
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("a")
        manager.wait()
    assert late == ["model.safetensors"]
    again = nn.Linear(3, 3)
    with ckpt.StateManager(root, model=again) as manager:
        manager.load_state("a")
    assert torch.equal(again.weight, model.weight)


def test_a_snapshot_that_never_arrives_is_a_save_that_fails(root: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Snapshots.take

    def lost(self: Snapshots, files: list[FilePlan], optimizer_owned: Callable[[], frozenset[int]]) -> Snapshot | None:
        snapshot = take(self, files, optimizer_owned)
        assert snapshot is not None

        def fail() -> None:
            raise ckpt.StateError("the device is gone")

        snapshot.finish = fail
        return snapshot

    with ckpt.StateManager(root, model=nn.Linear(3, 3)) as manager:
        manager.save_state("before", wait=True)
        monkeypatch.setattr(Snapshots, "take", lost)
        manager.save_state("lost")
        with pytest.raises(ckpt.StateError, match="the device is gone"):
            manager.wait()
    assert ckpt.verify(root) == {"before": []}


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
