"""Whole runs with a memory tier and a keeper: killed, restarted or not, on a host with a large or a small tmpfs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.memory import slot_storage as slot_storages
from ckpt.memory.keeper_process import living_keeper
from ckpt.memory.place import MemoryPlace
from ckpt.memory.slot_storage import is_held, slot_storage
from tests.helpers.processes import DEADLINE, fork
from tests.memory.deserted import kill, no_keeper_left, wait_until

pytestmark = pytest.mark.slow
KILLED_AT = 17
WIDTH = 160  # a file of 100 kB: the keeper holds none that are smaller


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(folder))
    monkeypatch.setenv("CKPT_MEMORY_KEEPER", "on")
    with no_keeper_left(folder):
        yield folder


def train(root: str, last: int, reached: str = "", **options: Any) -> str:
    """Train up to a step, and return a digest of the state there; with `reached`, make that file and await a kill."""
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"save_every": 10, "memory": 3, **options}
    with ckpt.StateManager(root, model=model, optimizer=optimizer, **options) as manager:
        manager.resume()
        while manager.progress.step < last:
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH)).pow(2).mean().backward()
            optimizer.step()
            manager.step()
            manager.wait()
            assert manager.session.memory is not None
            manager.session.memory.wait()
        if reached:
            Path(reached).touch()
            time.sleep(DEADLINE)
    return repr([value.tolist() for value in model.state_dict().values()])


def run(environment: dict[str, str], small: bool, root: str, reached: str, options: dict[str, Any]) -> None:
    os.setpgid(0, 0)
    os.environ |= environment
    if small:
        use_small_tmpfs()
    train(root, KILLED_AT, reached, **options)


def use_small_tmpfs() -> None:
    """Stand in for a container with a small /dev/shm."""
    from ckpt.memory import room

    pytest.MonkeyPatch().setattr(room, "os", SimpleNamespace(statvfs=_no_room))


def killed(tmp_path: Path, *, small: bool = False, **options: Any) -> MemoryPlace:
    """The place of a run that was killed after step 17: step 15 is in memory, step 10 in the root."""
    reached = tmp_path / "reached"
    environment = {name: value for name, value in os.environ.items() if name.startswith("CKPT_")}
    job = fork(run, environment, small, str(tmp_path / "root"), str(reached), options)
    wait_until(lambda: reached.exists() or not job.is_alive(), "the run has reached the step")
    assert job.is_alive()
    [place] = MemoryPlace.list_places()
    assert living_keeper(place) is not None
    kill(job)
    return place


@pytest.fixture
def straight(tmp_path: Path) -> str:
    return train(str(tmp_path / "straight"), 25)


def test_without_the_option_the_root_has_its_last(tmp_path: Path) -> None:
    killed(tmp_path)
    time.sleep(1.0)
    assert sorted(ckpt.verify(tmp_path / "root")) == ["step-00000010"]


def test_where_the_keeper_was_killed_too_the_root_has_its_last_and_the_memory_is_used(
    tmp_path: Path, memory: Path, straight: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = killed(tmp_path, memory=ckpt.Memory(every=3))
    keeper = living_keeper(place)
    assert keeper is not None
    os.kill(keeper.process, signal.SIGKILL)
    assert keeper.wait(10.0)
    assert sorted(ckpt.verify(tmp_path / "root")) == ["step-00000010"]
    assert train(str(tmp_path / "root"), 25) == straight
    assert "resumed from memory: step 15 (root has step 10)" in capsys.readouterr().err
    assert list(memory.iterdir()) == []


def test_a_restart_has_the_same_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = living_keeper(killed(tmp_path, memory=ckpt.Memory(every=3)))
    (tmp_path / "reached").unlink()
    assert living_keeper(killed(tmp_path, memory=ckpt.Memory(every=3))) == first


class TestSmallTmpfs:
    """The keeper holds the snapshots' memory."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckpt.memory.room.os", SimpleNamespace(statvfs=_no_room))

    def test_a_killed_run_resumes_from_memory(
        self, tmp_path: Path, memory: Path, straight: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        place = killed(tmp_path, small=True)
        assert is_held(place)
        large = [path for path in place.slots.rglob("*") if path.is_file() and path.stat().st_size > 64 << 10]
        assert large
        assert all(path.is_symlink() for path in large)
        assert train(str(tmp_path / "root"), 25) == straight
        assert "resumed from memory: step 15 (root has step 10)" in capsys.readouterr().err
        assert list(memory.iterdir()) == []

    def test_where_the_keeper_was_killed_too_it_is_as_if_memory_had_never_been(
        self, tmp_path: Path, memory: Path, straight: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        place = killed(tmp_path, small=True)
        keeper = living_keeper(place)
        assert keeper is not None
        os.kill(keeper.process, signal.SIGKILL)
        assert keeper.wait(10.0)
        assert train(str(tmp_path / "root"), 25) == straight
        assert "resumed from memory" not in capsys.readouterr().err
        assert list(memory.iterdir()) == []

    def test_without_a_keeper_the_tier_is_off_with_one_line(
        self, tmp_path: Path, straight: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CKPT_MEMORY_KEEPER", "off")
        caplog.clear()
        assert train(str(tmp_path / "root"), 25) == straight
        said = [record.message for record in caplog.records if "snapshots in memory are off" in record.message]
        assert len(said) == 1
        assert "is too small, and ckpt could not start a keeper process" in said[0]


@contextmanager
def stopped(place: MemoryPlace) -> Iterator[Callable[[], None]]:
    """Stop the keeper of a place. What is yielded lets it go on, as the end of the context does."""
    keeper = living_keeper(place)
    assert keeper is not None
    os.kill(keeper.process, signal.SIGSTOP)
    try:
        yield lambda: os.kill(keeper.process, signal.SIGCONT)
    finally:
        if keeper.is_alive:
            os.kill(keeper.process, signal.SIGCONT)
        wait_until(lambda: place.is_there or not keeper.is_alive, "it has ended with its folder")


class TestAKeeperThatIsStopped:
    """It holds the snapshots, and answers nothing, as under SIGSTOP or in a frozen control group."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckpt.memory.room.os", SimpleNamespace(statvfs=_no_room))

    @pytest.fixture
    def asking(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The names of the threads that have asked a keeper."""
        names: list[str] = []
        hold = slot_storages._hold

        def noted(folder: Path, path: Path) -> int:
            names.append(threading.current_thread().name)
            return hold(folder, path)

        monkeypatch.setattr(slot_storages, "_hold", noted)
        monkeypatch.setattr(slot_storages, "_PATIENCE", 1.0)
        return names

    def test_training_goes_on_without_asking_it_and_says_once_that_the_tier_is_off(
        self, tmp_path: Path, straight: str, asking: list[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        torch.manual_seed(3)
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        manager = ckpt.StateManager(tmp_path / "root", model=model, optimizer=optimizer, save_every=10, memory=3)
        tier = manager.session.memory
        assert tier is not None

        def train_to(last: int) -> None:
            while manager.progress.step < last:
                optimizer.zero_grad()
                model(torch.randn(4, WIDTH)).pow(2).mean().backward()
                optimizer.step()
                manager.step()
                if manager.progress.step == 9:
                    tier.wait()  # or those of the next steps might be left out

        with manager:
            manager.resume()
            train_to(6)
            tier.wait()
            (place,) = MemoryPlace.list_places()
            assert is_held(place)
            with stopped(place) as go_on:
                asking.clear()
                train_to(25)
                assert repr([value.tolist() for value in model.state_dict().values()]) == straight
                tried_again = tier._resume_at
                train_to(tried_again)
                tier.wait()
                train_to(tried_again + 3)
                assert len(asking) >= 2
                assert "MainThread" not in asking
                go_on()
                last = tier._resume_at
                train_to(last)
                tier.wait()
                assert f"step-{last:08d}/manifest.json" in [entry.key for entry in slot_storage(place).list()]
            manager.wait()
        warned = [record for record in caplog.records if record.levelname == "WARNING"]
        said = [record for record in warned if "snapshots in memory are off" in record.message]
        assert len(said) == 1
        assert "the keeper process did not answer for 1 s" in said[0].message
        assert len(ckpt.verify(tmp_path / "root")) == last // 10

    def test_a_resume_reads_what_it_holds_all_the_same(
        self, tmp_path: Path, straight: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        place = killed(tmp_path, small=True)
        with stopped(place):
            assert train(str(tmp_path / "root"), 25) == straight
        assert "resumed from memory: step 15 (root has step 10)" in capsys.readouterr().err


def _no_room(_: object) -> Any:
    return SimpleNamespace(f_bavail=0, f_frsize=1)
