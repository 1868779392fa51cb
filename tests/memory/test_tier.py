"""The memory tier beside training: when a snapshot is taken, left out, or gives way; training never notices."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.memory import room
from ckpt.memory.room import Room, View, verdict_of
from ckpt.memory.tier import MemoryTier
from ckpt.ranks import schedule_and_signals
from ckpt.ranks.hosts import ONE_SHARED_ROOT, Hosts
from ckpt.save import cadence
from ckpt.storage.local.volatile import VolatileStorage
from tests.helpers.namespaces import with_tmpfs
from tests.helpers.processes import run_ranks
from tests.helpers.stateful import Stateful
from tests.helpers.training import slow_losses
from tests.memory.deserted import wait_until

MB = 1 << 20
pytestmark = pytest.mark.usefixtures("memory")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ckpt.StateManager]:
    model = nn.Linear(30, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.StateManager(tmp_path / "root", model=model, optimizer=optimizer, save_every=1000, memory=2) as manager:
        manager.resume()
        yield manager


def tier_of(manager: ckpt.StateManager) -> MemoryTier:
    assert manager.session.memory is not None
    return manager.session.memory


def train(manager: ckpt.StateManager, steps: int, *, settled: bool = True) -> None:
    for _ in range(steps):
        manager.step()
        if settled:
            tier_of(manager).wait()


def names(memory: Path) -> list[str]:
    return sorted(path.parent.name for path in memory.glob("ckpt-*/slots/*/manifest.json"))


class TestLeftOut:
    def test_a_snapshot_is_left_out_while_the_one_before_is_written(
        self,
        manager: ckpt.StateManager,
        memory: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        goes_on, own = threading.Event(), VolatileStorage.write

        def write(storage: VolatileStorage, *given: Any, **named: Any) -> None:
            assert goes_on.wait(60)
            own(storage, *given, **named)

        monkeypatch.setattr(VolatileStorage, "write", write)
        train(manager, 7, settled=False)
        goes_on.set()
        tier_of(manager).wait()
        assert names(memory) == ["step-00000002"]
        assert (tier_of(manager).statistics.taken, tier_of(manager).statistics.skipped) == (1, 2)
        assert caplog.text.count("Skipped a memory snapshot") == 1
        train(manager, 1)
        assert names(memory) == ["step-00000002", "step-00000008"]

    def test_nothing_is_taken_before_the_option_says(self, manager: ckpt.StateManager, memory: Path) -> None:
        train(manager, 1)
        assert list(memory.iterdir()) == []


class TestGivingWay:
    @pytest.fixture(autouse=True)
    def pause(self, manager: ckpt.StateManager) -> None:
        tier_of(manager)._pause = 2  # intervals

    def test_a_tmpfs_that_is_too_small_turns_the_tier_off_with_one_line(
        self,
        manager: ckpt.StateManager,
        memory: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(
            room, "measure", lambda folder, used, held: Room(tmpfs=1000, memory=100 * MB, used=used, held=False)
        )
        train(manager, 9)
        assert list(memory.iterdir()) == []
        assert manager.progress.step == 9
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert warnings[0].startswith("snapshots in memory are off until step 6: 2 snapshots take ")
        assert f"{memory} has room for 1.0 kB. Training and the root are not affected." in warnings[0]

    def test_memory_that_training_needs_is_given_back_and_taken_again_later(
        self,
        manager: ckpt.StateManager,
        memory: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        train(manager, 4)
        assert len(names(memory)) == 2
        own = room.measure
        monkeypatch.setattr(
            room, "measure", lambda folder, used, held: Room(tmpfs=100 * MB, memory=100, used=used, held=False)
        )
        train(manager, 2)
        assert list(memory.iterdir()) == []
        assert "is left for training" in caplog.text
        monkeypatch.setattr(room, "measure", own)
        train(manager, 6)
        assert names(memory) == ["step-00000010", "step-00000012"]

    def test_a_write_that_finds_no_room_gives_all_of_it_back(
        self,
        manager: ckpt.StateManager,
        memory: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        train(manager, 2)

        def full(*_: Any, **__: Any) -> None:
            raise ckpt.FullError("no space left.")

        with monkeypatch.context() as patch:
            patch.setattr(VolatileStorage, "write", full)
            train(manager, 4)
        assert list(memory.iterdir()) == []
        assert "snapshots in memory are off until step 10: no space left. Training" in caplog.text
        train(manager, 4)
        assert names(memory) == ["step-00000010"]

    def test_another_error_leaves_the_snapshot_before(
        self,
        manager: ckpt.StateManager,
        memory: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        train(manager, 2)

        def fail(*_: Any, **__: Any) -> None:
            raise ckpt.StorageError("no.")

        with monkeypatch.context() as patch:
            patch.setattr(VolatileStorage, "write", fail)
            train(manager, 4)
        assert names(memory) == ["step-00000002"]
        assert caplog.text.count("snapshots in memory are off until step 10: no. Training") == 1
        train(manager, 6)
        assert names(memory) == ["step-00000010", "step-00000012"]

    def test_an_error_in_the_background_is_said_when_the_next_snapshot_is_due(
        self, manager: ckpt.StateManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise ckpt.StorageError("no.")

        monkeypatch.setattr(VolatileStorage, "write", fail)
        train(manager, 2, settled=False)
        wait_until(lambda: not tier_of(manager).busy, "it has failed")
        train(manager, 2, settled=False)
        assert "snapshots in memory are off until step 8: no. Training" in caplog.text

    def test_a_folder_that_somebody_has_removed_is_made_anew(self, manager: ckpt.StateManager, memory: Path) -> None:
        train(manager, 2)
        place = tier_of(manager).meeting.place
        assert place is not None
        place.remove()
        train(manager, 8)
        assert names(memory)[-1] == "step-00000010"

    def test_a_directory_that_is_not_there_turns_it_off(
        self, manager: ckpt.StateManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path / "absent"))
        train(manager, 9)
        assert manager.progress.step == 9


def test_a_directory_that_never_was_is_said_once_at_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path / "absent"))
    with ckpt.StateManager(tmp_path / "root", model=nn.Linear(2, 2), memory=1) as manager:
        manager.resume()
        for _ in range(3):
            manager.step()
    said = [record.getMessage() for record in caplog.records if "snapshots in memory are off" in record.getMessage()]
    assert said == [f"snapshots in memory are off: {tmp_path}/absent cannot be used: No such file or directory."]


def test_training_does_not_wait_where_there_is_no_memory_for_a_copy(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckpt.StateManager(
        tmp_path / "root", model=nn.Linear(30, 30), memory=2, saving=ckpt.SaveOptions(host_memory=1)
    ) as manager:
        manager.resume()
        train(manager, 8)
        assert list(memory.iterdir()) == []
    assert (
        caplog.text.count("snapshots in memory are off until step 24: there is not enough host memory for a copy") == 1
    )


@pytest.mark.slow
def test_in_a_container_with_a_small_tmpfs_and_no_keeper_the_tier_is_off_with_one_line(
    tmp_path: Path, memory: Path
) -> None:
    script = """
import sys, torch, ckpt
model = torch.nn.Linear(1200, 1200)
with ckpt.StateManager(sys.argv[1], model=model, save_every=5, memory=2) as manager:
    manager.resume()
    for _ in range(10):
        manager.step()
print("done", manager.progress.step)
"""
    done = with_tmpfs(memory, 8 << 20, "-c", script, str(tmp_path / "root"), cwd=tmp_path)
    assert done.run() == "done 10\n"
    said = done.errors.read_text()
    assert said.count("snapshots in memory are off until step 22: ") == 1
    assert "is too small, and ckpt could not start a keeper process" in said
    assert [found.step for found in ckpt.list_checkpoints(tmp_path / "root")] == [10, 5]


def test_a_run_that_is_told_to_stop_saves_to_the_root_and_leaves_nothing_in_memory(
    tmp_path: Path, memory: Path
) -> None:
    def run() -> None:
        with ckpt.StateManager(tmp_path / "root", model=nn.Linear(2, 2), memory=1) as manager:
            manager.resume()
            for step in range(1, 10):
                if step == 4:
                    assert names(memory)
                    os.kill(os.getpid(), signal.SIGTERM)
                manager.step()
                tier_of(manager).wait()

    with pytest.raises(ckpt.Preempted):
        run()
    assert list(memory.iterdir()) == []
    assert [found.step for found in ckpt.list_checkpoints(tmp_path / "root")] == [4]


def test_a_run_that_ends_with_more_in_memory_than_in_the_root_says_so(
    manager: ckpt.StateManager, caplog: pytest.LogCaptureFixture
) -> None:
    train(manager, 4)
    manager.close()
    assert "ckpt removes the snapshot of step 4 from memory" in caplog.text
    assert "has no checkpoint. Call save_state() at the end" in caplog.text


def test_a_run_that_ends_with_its_last_step_in_the_root_says_nothing(
    manager: ckpt.StateManager, caplog: pytest.LogCaptureFixture
) -> None:
    train(manager, 5)
    manager.save_state(wait=True)
    manager.close()
    assert "removes the snapshot" not in caplog.text


def test_nor_does_one_that_went_back_to_a_checkpoint_of_the_root(
    manager: ckpt.StateManager, caplog: pytest.LogCaptureFixture
) -> None:
    train(manager, 2)
    manager.save_state("a", wait=True)
    train(manager, 2)
    manager.load_state("a")
    manager.close()
    assert "removes the snapshot" not in caplog.text


def test_state_that_is_saved_whole_is_taken_in_shards(tmp_path: Path, memory: Path) -> None:
    saving_whole = ckpt.SaveOptions(layout="full", background=False)
    with ckpt.StateManager(tmp_path / "root", model=nn.Linear(2, 2), memory=1, saving=saving_whole) as manager:
        manager.resume()
        train(manager, 2)
        assert names(memory) == ["step-00000001", "step-00000002"]


def test_after_training_went_back_its_snapshots_are_in_a_folder_of_their_own(
    manager: ckpt.StateManager, memory: Path
) -> None:
    train(manager, 2)
    manager.save_state("a", wait=True)
    train(manager, 2)
    manager.load_state("a")
    assert list(memory.iterdir()) == []
    train(manager, 2)
    place = tier_of(manager).meeting.place
    assert place is not None
    assert list(memory.iterdir()) == [place.path]
    assert names(memory) == ["step-00000004"]


def test_a_snapshot_that_is_smaller_gives_back_what_it_does_not_need(tmp_path: Path, memory: Path) -> None:
    extra = Stateful({"value": torch.zeros(MB)})
    with ckpt.StateManager(tmp_path / "root", model=nn.Linear(2, 2), memory=1) as manager:
        manager.register(extra=extra)
        manager.resume()
        train(manager, 2)
        extra.state = {"value": torch.zeros(1)}
        train(manager, 2)
        files = [path for path in memory.rglob("*") if path.is_file()]
        assert names(memory) == ["step-00000003", "step-00000004"]
        assert sum(path.stat().st_size for path in files) < MB


class TestRoom:
    def test_two_snapshots_must_fit_into_the_tmpfs(self) -> None:
        have = Room(tmpfs=199 * MB, memory=10_000 * MB, used=0, held=False)
        assert "has room for" in room.problem(have, [60 * MB, 40 * MB], "/dev/shm", 0)
        assert room.problem(Room({**have, "tmpfs": 200 * MB}), [60 * MB, 40 * MB], "/dev/shm", 0) == ""

    def test_what_they_take_already_counts(self) -> None:
        assert room.problem(Room(tmpfs=0, memory=1000 * MB, used=200 * MB, held=False), [100 * MB], "/dev/shm", 0) == ""

    def test_a_reserve_is_left_to_the_training(self) -> None:
        have = Room(tmpfs=10_000 * MB, memory=249 * MB, used=0, held=False)
        assert "is left for training" in room.problem(have, [100 * MB], "/dev/shm", 0)
        assert room.problem(Room({**have, "memory": 250 * MB}), [100 * MB], "/dev/shm", 0) == ""

    def test_also_when_the_snapshots_are_there(self) -> None:
        assert room.problem(Room(tmpfs=0, memory=20 * MB, used=200 * MB, held=False), [100 * MB], "/dev/shm", 0) != ""
        assert room.problem(Room(tmpfs=0, memory=20 * MB, used=80 * MB, held=False), [40 * MB], "/dev/shm", 0) == ""

    def test_so_is_what_a_step_of_it_is_known_to_need(self) -> None:
        have = Room(tmpfs=10_000 * MB, memory=300 * MB, used=0, held=False)
        assert room.problem(have, [100 * MB], "/dev/shm", peak=100 * MB) == ""
        assert "is left for training" in room.problem(have, [100 * MB], "/dev/shm", peak=101 * MB)

    def test_it_is_measured(self, tmp_path: Path) -> None:
        have = room.measure(tmp_path, 7)
        assert have["tmpfs"] > 0
        assert have["memory"] > 0
        assert have["used"] == 7


class TestVerdict:
    def view(self, **known: Any) -> View:
        return cast(View, {"busy": False, "error": "", "full": False, "size": MB, "peak": 0, "room": None, **known})

    def have(self, size: int) -> Room:
        return Room(tmpfs=size, memory=10_000 * MB, used=0, held=False)

    def test_one_busy_rank_is_enough(self) -> None:
        assert verdict_of([self.view(), self.view(busy=True)], ONE_SHARED_ROOT)["do"] == "skip"

    def test_one_failed_rank_is_enough(self) -> None:
        verdict = verdict_of([self.view(), self.view(error="no.", full=True)], ONE_SHARED_ROOT)
        assert verdict == {"do": "give way", "why": "no.", "free": True, "small": []}

    def test_nobody_gives_way_while_another_rank_is_busy_for_it_would_wait_for_that(self) -> None:
        views = [self.view(busy=True), self.view(error="no.", full=True)]
        assert verdict_of(views, ONE_SHARED_ROOT)["do"] == "skip"

    def test_the_ranks_of_a_host_share_its_room(self) -> None:
        views = [self.view(room=self.have(5 * MB)), self.view(), self.view()]
        assert verdict_of(views, ONE_SHARED_ROOT)["do"] == "give way"
        assert verdict_of(views[:2], ONE_SHARED_ROOT)["do"] == "save"

    def test_the_ranks_of_a_host_need_memory_within_their_steps(self) -> None:
        tight = Room(tmpfs=100 * MB, memory=10 * MB, used=0, held=False)
        views = [self.view(room=tight, peak=2 * MB), self.view(peak=3 * MB)]
        assert verdict_of(views, ONE_SHARED_ROOT)["do"] == "save"
        views[1]["peak"] = 5 * MB
        assert verdict_of(views, ONE_SHARED_ROOT)["do"] == "give way"

    def test_every_host_has_its_own(self) -> None:
        hosts = Hosts((0, 0, 2), ("a", "a", "b"))
        views = [self.view(room=self.have(5 * MB)), self.view(), self.view(room=self.have(3 * MB))]
        assert verdict_of(views, hosts)["do"] == "save"
        views[2] = self.view(room=self.have(1 * MB))
        assert verdict_of(views, hosts)["do"] == "give way"

    def test_a_host_needs_room_for_the_copies_of_the_host_before_it(self) -> None:
        hosts = Hosts((0, 1), ("a", "b"))
        views = [self.view(room=self.have(5 * MB)), self.view(size=3 * MB, room=self.have(100 * MB))]
        assert verdict_of(views, hosts)["do"] == "save"
        assert verdict_of(views, hosts, copies=True)["do"] == "give way"
        views[0] = self.view(room=self.have(8 * MB))
        assert verdict_of(views, hosts, copies=True)["do"] == "save"


def _train_until_killed(rank: int, folder: str, name: str, kill: bool, when: str) -> None:
    """A line for each step: its loss, and the step of the newest snapshot. The shortest interval is short here."""
    os.environ["CKPT_MEMORY_DIR"] = f"{folder}/memory"
    cadence.SHORTEST_IN_MEMORY = cadence.LONGEST = 0.05
    cadence._CHEAP = 1.0
    schedule_and_signals._POLL = 0.0
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ckpt.StateManager(f"{folder}/{name}", model=model, optimizer=optimizer, memory=when) as manager:
        for loss in slow_losses(manager, model, optimizer):
            with Path(folder, f"{name}-{rank}").open("a") as file:
                print(manager.progress.step, loss, tier_of(manager)._held_at, file=file)
            if kill and manager.progress.step == 40:
                tier_of(manager).wait()
                os.kill(os.getpid(), signal.SIGKILL)
        assert not kill
        assert manager.restored is None or manager.restored.from_memory


@pytest.mark.slow
@pytest.mark.parametrize("when", ["auto", "0.1s"])
def test_by_time_or_as_is_best_all_ranks_take_the_same_snapshots_and_a_killed_run_is_back_from_one(
    tmp_path: Path, when: str
) -> None:
    run_ranks(2, _train_until_killed, str(tmp_path), "straight", False, when)
    assert -signal.SIGKILL in run_ranks(2, _train_until_killed, str(tmp_path), "killed", True, when, dies=True)
    run_ranks(2, _train_until_killed, str(tmp_path), "killed", False, when)
    lines = {
        (name, rank): [line.split() for line in (tmp_path / f"{name}-{rank}").read_text().splitlines()]
        for name in ("straight", "killed") for rank in range(2)
    }  # fmt: skip
    for name in ("straight", "killed"):
        assert [line[::2] for line in lines[name, 0]] == [line[::2] for line in lines[name, 1]]
        taken = {line[2] for line in lines[name, 0]} - {"None"}
        assert 3 < len(taken) < 40, taken
    for rank in range(2):
        losses = {step: loss for step, loss, _ in lines["straight", rank]}
        assert all(losses[step] == loss for step, loss, _ in lines["killed", rank])
    assert 0 < int(lines["killed", 0][40][0]) - 1 <= 40, "it continues from a snapshot"
