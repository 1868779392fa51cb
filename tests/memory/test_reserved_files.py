"""Snapshots from a device, simulated, go straight into the files of the memory tier: nothing is copied twice."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.memory import tier
from ckpt.root import write_link_commit
from ckpt.save.snapshot import fetch, tensor_copies
from ckpt.save.snapshot import snapshots as snapshots_module
from ckpt.storage.base import StablePieces
from ckpt.storage.local import volatile
from ckpt.storage.local.volatile import VolatileStorage
from ckpt.util.aligned_memory import MappedRange
from tests.helpers.simulated_device import SimulatedDevice, simulate
from tests.helpers.training import exact

pytestmark = pytest.mark.usefixtures("memory")

LARGE = 1 << 20  # bytes: larger files are reserved


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    simulated = simulate(monkeypatch)
    monkeypatch.setattr(fetch, "TRANSFER", 100_000)
    monkeypatch.setattr(snapshots_module, "STRAIGHT", 200_000)
    monkeypatch.setattr(tensor_copies, "BLOCK", 1 << 20)
    monkeypatch.setattr(write_link_commit, "_WORTH_THREADS", LARGE)
    return simulated


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all large files that were written by a copy."""
    sizes: list[int] = []
    own = volatile.overwrite

    def overwrite(descriptor: int, pieces: Any) -> None:
        own(descriptor, pieces)
        size = os.fstat(descriptor).st_size
        sizes.extend([size] if size >= LARGE else [])

    monkeypatch.setattr(volatile, "overwrite", overwrite)
    return sizes


class Run:
    """A model of 1.4 MB with its moments; the counts of steps are on the host."""

    def __init__(self, root: Path, seed: int = 1, every: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(600, 600)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        model, optimizer = self.model, self.optimizer
        self.manager = ckpt.StateManager(root, model=model, optimizer=optimizer, save_every=1000, memory=every)
        self.manager.resume()

    def train(self, steps: int) -> list[str]:
        """The states at every step, each with a snapshot."""
        states = []
        for _ in range(steps):
            self.model(torch.randn(4, 600)).pow(2).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            states.append(self.state())
            self.manager.step()
            assert self.manager.session.memory is not None
            self.manager.session.memory.wait()
        return states

    def state(self) -> str:
        return exact([self.model.state_dict(), self.optimizer.state_dict()])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "root")
    with run.manager:
        yield run


def snapshots(memory: Path) -> dict[str, dict[str, int]]:
    """The inodes of the large files of every snapshot."""
    found: dict[str, dict[str, int]] = {}
    for manifest in sorted(memory.glob("ckpt-*/slots/*/manifest.json")):
        files = [path for path in manifest.parent.iterdir() if path.stat().st_size >= LARGE]
        found[manifest.parent.name] = {path.name: path.stat().st_ino for path in files}
    return found


def found(memory: Path) -> str:
    """The state that the newest snapshot in memory has, read as a checkpoint of any root."""
    slots, model = next(memory.glob("ckpt-*/slots")), nn.Linear(600, 600)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.StateManager(slots, model=model, optimizer=optimizer) as manager:
        manager.load_state(max(snapshots(memory)))
    return exact([model.state_dict(), optimizer.state_dict()])


def test_no_large_file_is_copied_and_what_is_found_is_what_was_there(run: Run, memory: Path, copied: list[int]) -> None:
    states = run.train(4)
    assert copied == []
    assert [len(files) for files in snapshots(memory).values()] == [2, 2]
    assert found(memory) == states[-1]


def test_two_slots_take_turns_in_the_memory_of_their_files(run: Run, memory: Path) -> None:
    seen = []
    for _ in range(5):
        run.train(1)
        seen.append(set(snapshots(memory)[max(snapshots(memory))].values()))
    assert seen[2] == seen[0]
    assert seen[3] == seen[1]
    assert seen[4] == seen[2]
    assert not seen[0] & seen[1]


def _register(run: Run) -> None:
    """Wait until the pages of all mapped files are registered."""
    for image in run.manager.session.saver.snapshots.memory._mapped:
        assert image._readying is not None
        image._readying.wait()


def test_the_device_writes_to_the_files_itself(run: Run, memory: Path, device: SimulatedDevice) -> None:
    device.can_register = True
    states = run.train(2)
    _register(run)
    assert device.straight == len(device.fetched) > 40
    assert found(memory) == states[-1]
    pages = dict(device.registered)
    states += run.train(5)
    assert device.straight == len(device.fetched)
    assert found(memory) == states[-1]
    assert device.registered == pages
    run.manager.close()
    assert device.registered == {}
    assert list(memory.iterdir()) == []


class TestMemoryIsMadeReadyFromTheFirstStepOn:
    @pytest.fixture
    def run(self, tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
        monkeypatch.setattr(tier, "_WORTH_PREPARING", LARGE)
        device.can_register = True
        run = Run(tmp_path / "root", every=3)
        with run.manager:
            yield run

    def test_the_first_snapshot_is_written_to_pages_that_were_there(
        self, run: Run, memory: Path, device: SimulatedDevice, copied: list[int]
    ) -> None:
        run.train(1)
        _register(run)
        ready = {path.stat().st_ino for path in memory.rglob("*.ckpt-tmp")}
        pages = dict(device.registered)
        assert len(ready) == 2
        assert snapshots(memory) == {}
        states = run.train(2)
        assert set(snapshots(memory)["step-00000003"].values()) == ready
        assert pages.items() <= device.registered.items()
        assert device.straight == len(device.fetched) > 20
        assert (copied, found(memory)) == ([], states[-1])

    def test_so_is_that_of_the_second_once_the_first_is_committed(self, run: Run, memory: Path) -> None:
        run.train(3)
        _register(run)
        ready = {path.stat().st_ino for path in memory.rglob("*.ckpt-tmp")}
        run.train(3)
        assert set(snapshots(memory)["step-00000006"].values()) == ready

    def test_it_counts_as_the_snapshots_own_when_room_is_measured(self, run: Run) -> None:
        run.train(1)
        _register(run)
        assert run.manager.session.memory is not None
        assert run.manager.session.memory.meeting.measure_room()["used"] > 4_000_000

    def test_a_run_without_any_snapshot_leaves_nothing(self, run: Run, memory: Path, device: SimulatedDevice) -> None:
        run.train(1)
        run.manager.close()
        assert device.registered == {}
        assert list(memory.iterdir()) == []


def test_a_device_that_registers_nothing_has_its_snapshots_copied_through_the_ring(
    run: Run, memory: Path, device: SimulatedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "ckpt"):
        states = run.train(2)
        _register(run)
        device.fetched.clear()
        states = run.train(2)
    assert "can't write to host memory directly" in caplog.text
    assert device.straight == 0
    assert max(device.fetched) <= fetch.TRANSFER
    assert found(memory) == states[-1]


def test_files_of_another_layout_are_unmapped(run: Run, memory: Path, device: SimulatedDevice) -> None:
    device.can_register = True
    run.train(3)
    _register(run)
    pages = set(device.registered)
    run.manager.register(more=torch.nn.Linear(700, 700))
    states = run.train(3)
    _register(run)
    assert len(run.manager.session.saver.snapshots.memory._mapped) == 2
    assert device.registered
    assert found(memory) == states[-1]
    assert len(device.registered) != len(pages)


def test_the_older_snapshot_is_there_until_the_next_one_is_begun(run: Run, memory: Path) -> None:
    run.train(3)
    assert list(snapshots(memory)) == ["step-00000002", "step-00000003"]


def test_where_there_is_no_memory_for_a_page_the_tier_gives_way_and_training_continues(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run.train(2)
    own, asked = MappedRange.make_resident, []

    def make_resident(range: MappedRange, start: int, size: int) -> bool:
        asked.append(size)
        return len(asked) < 10 and own(range, start, size)

    monkeypatch.setattr(MappedRange, "make_resident", make_resident)
    with caplog.at_level(logging.WARNING):
        run.train(2)
    assert "no memory left" in caplog.text
    assert snapshots(memory) == {}
    assert list(memory.rglob("*.ckpt-tmp")) == []


@pytest.mark.parametrize("why", ["the system has no such call", "the file cannot be mapped"])
def test_it_is_copied_where(
    why: str, run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    def refuse(*_: Any) -> bool:
        if "mapped" in why:
            raise OSError(12, "no")
        return False

    monkeypatch.setattr(MappedRange, "map_file" if "mapped" in why else "make_resident", refuse)
    states = run.train(3)
    assert len(copied) == 6
    assert found(memory) == states[-1]


def test_a_reserved_file_that_was_swept_is_written_from_the_memory_that_it_still_is(
    run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    own = VolatileStorage._write_file

    def write(storage: VolatileStorage, folder: int, name: str, pieces: Any) -> None:
        if isinstance(pieces, StablePieces) and pieces.file is not None:
            os.unlink(pieces.file.path)
        own(storage, folder, name, pieces)

    monkeypatch.setattr(VolatileStorage, "_write_file", write)
    states = run.train(3)
    assert len(copied) == 6
    assert found(memory) == states[-1]


def test_a_fetch_that_fails_leaves_the_snapshot_before_and_no_file(
    run: Run, memory: Path, device: SimulatedDevice
) -> None:
    states = run.train(3)
    device.error = RuntimeError("the device is gone")
    run.train(1)
    assert list(snapshots(memory)) == ["step-00000003"]
    assert list(memory.glob("ckpt-*/slots/*/*.ckpt-tmp")) == []
    assert found(memory) == states[2]


def test_nothing_is_left_at_the_end(run: Run, memory: Path) -> None:
    run.train(3)
    run.manager.close()
    assert list(memory.iterdir()) == []


@pytest.mark.slow
def test_a_process_that_was_forked_during_a_snapshot_holds_none_of_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * LARGE)
    mapped = MappedRange(LARGE)
    with path.open("r+b") as file:
        mapped.map_file(file.fileno(), 0, LARGE)
    assert mapped.make_resident(0, LARGE)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        held = str(path) in Path("/proc/self/maps").read_text()
        mapped.memory[0] = 7  # the addresses are still the child's
        os.write(write, b"held" if held else b"none")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"none"
    os.close(read)
    os.close(write)
    assert mapped.memory[0] == ord("a")
    mapped.release()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert path.read_bytes() == b"a" * LARGE


def test_a_range_maps_nothing_beyond_itself() -> None:
    mapped = MappedRange(5000)
    for start, size in ((100, 10), (-4096, 10), (4096, 5000), (8192, 1)):
        with pytest.raises(ValueError, match="can't map"):
            mapped.map_file(0, start, size)
