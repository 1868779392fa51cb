"""Snapshots in memory from a GPU: hashed there, written by the device itself, and compared when they are read."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
from ckpt.formats.native.manifest import BlockHasher
from ckpt.root import write_link_commit
from ckpt.save.snapshot.devices import StreamedDevice
from tests.helpers.processes import DEADLINE
from tests.helpers.training import exact

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Run:
    """A model of 64 MB with its moments on the GPU, and a snapshot after each step."""

    def __init__(self, root: Path) -> None:
        self.model = nn.Linear(4096, 4096).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.manager = ckpt.StateManager(root, model=self.model, optimizer=self.optimizer, save_every=1000, memory=1)
        self.manager.resume()
        self.states: dict[int, str] = {}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(4, 4096, device="cuda")).pow(2).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.manager.step()
            self.states[self.manager.progress.step] = self.state()
            assert self.manager.session.memory is not None
            self.manager.session.memory.wait()

    def state(self) -> str:
        return exact([self.model.state_dict(), self.optimizer.state_dict()])

    def register(self) -> None:
        """Wait until the device may write to all pages that it has filled."""
        deadline = time.monotonic() + DEADLINE
        for image in self.manager.session.saver.snapshots.memory._mapped:
            while image._readying is None or image._readying.busy:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert image.is_straight

    def loaded(self) -> int:
        """The step of the snapshot that is loaded, which must be exact."""
        with torch.no_grad():
            self.model.weight.zero_()
        step = self.manager.load_state().step
        assert self.state() == self.states[step]
        return step


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path))
    return tmp_path


def test_what_the_device_writes_itself_is_exact_and_the_host_hashes_nothing_of_it(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "root")
    with run.manager:
        run.train(2)
        run.register()
        own, by_host = BlockHasher.update, [0]

        def update(hasher: BlockHasher, view: memoryview) -> None:
            by_host.append(len(view))
            own(hasher, view)

        monkeypatch.setattr(BlockHasher, "update", update)
        monkeypatch.setattr(write_link_commit, "_InThreads", None)
        for _ in range(10):
            run.train(1)
            assert max(by_host) < 1 << 20
            with monkeypatch.context() as patched:
                patched.setattr(BlockHasher, "update", own)
                assert run.loaded() == run.manager.progress.step


@pytest.mark.parametrize("registered", [False, True], ids=["pinned memory", "on the way"])
def test_a_bit_that_flips_on_its_way_from_the_device_is_found_and_the_snapshot_before_is_loaded(
    registered: bool, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "root")
    with run.manager:
        run.train(2)
        if registered:
            run.register()
        own, flipped = StreamedDevice.fetch, list[int]()

        def fetch(device: StreamedDevice, sources: Iterable[torch.Tensor], target: torch.Tensor) -> None:
            own(device, sources, target)
            if not flipped and len(target) > 1 << 20:
                flipped.append(len(target))
                target[12_345] ^= 16

        monkeypatch.setattr(StreamedDevice, "fetch", fetch)
        run.train(1)
        assert flipped
        assert run.loaded() == 2


def test_a_bit_that_flips_in_the_memory_of_a_snapshot_is_found(memory: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "root")
    with run.manager:
        run.train(3)
        newest = max(memory.glob("ckpt-*/slots/step-*"))
        largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
        with largest.open("r+b") as file:
            file.seek(10_000_000)
            byte = file.read(1)[0]
            file.seek(10_000_000)
            file.write(bytes([byte ^ 1]))
        assert run.loaded() == 2


@pytest.mark.parametrize("wait", [False, True])
def test_a_save_to_a_disk_is_hashed_on_the_device_too(
    wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own, by_host = nn.Linear(4096, 4096).cuda(), BlockHasher.update, [0]
    weight = model.weight.detach().clone()

    def update(hasher: BlockHasher, view: memoryview) -> None:
        by_host.append(len(view))
        own(hasher, view)

    with ckpt.StateManager(tmp_path, model=model) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(BlockHasher, "update", update)
            patched.setattr(write_link_commit, "_InThreads", None)
            manager.save_state("a", wait=wait)
            with torch.no_grad():
                model.weight.zero_()
            manager.wait()
        assert max(by_host) < 1 << 20
        manager.load_state("a")
    assert torch.equal(model.weight, weight)
    assert ckpt.verify(tmp_path / "a") == {"a": []}


def test_weights_that_did_not_change_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 10)).cuda()
    bias = model[1].bias
    assert isinstance(bias, torch.Tensor)
    own, fetched = StreamedDevice.fetch, list[int]()

    def fetch(device: StreamedDevice, sources: Iterable[torch.Tensor], target: torch.Tensor) -> None:
        fetched.append(len(target))
        own(device, sources, target)

    with ckpt.StateManager(tmp_path, model=model) as manager:
        manager.save_state("first")
        manager.wait()
        monkeypatch.setattr(StreamedDevice, "fetch", fetch)
        manager.save_state("again")
        manager.wait()
        assert fetched == []
        with torch.no_grad():
            bias.add_(1)
        manager.save_state("changed")
        manager.wait()
        assert fetched
    files = [next((tmp_path / name).glob("model*.safetensors")).stat() for name in ("again", "changed")]
    assert files[0].st_nlink == 2
    assert files[1].st_nlink == 1
    assert ckpt.verify(tmp_path / "again") == {"again": []}
