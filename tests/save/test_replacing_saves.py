"""`when_busy="replace"`: a save waits in memory while another is written, and gives its place to the next one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import nn

import ckpt
from ckpt.save.saver import QueuedSave, SaveQueue
from ckpt.storage import ANY, Buffer
from tests.helpers.places import PassedOn, Place
from tests.helpers.processes import DEADLINE, run_ranks

REPLACE = ckpt.SaveOptions(when_busy="replace")


class Gated(PassedOn):
    """Writes tensors only while its gate is open."""

    def __init__(self, root: Place | str) -> None:
        super().__init__(root)
        self.gate, self.begun, self.broken = threading.Event(), threading.Event(), ""
        self.gate.set()

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        if key.endswith(".safetensors"):
            self.begun.set()
            assert self.gate.wait(DEADLINE)
            if self.broken and key.startswith(self.broken):
                raise ckpt.FullError("no space left")
        super().write(key, pieces, over=over)


@pytest.fixture
def gated(root: Place) -> Iterator[Gated]:
    storage = Gated(root)
    yield storage
    storage.gate.set()


def fill(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def value_of(root: Place, name: str, width: int = 50) -> float:
    model = nn.Linear(width, width)
    with ckpt.StateManager(root, model=model) as manager:
        manager.load_state(name)
    assert bool((model.weight == model.weight[0, 0]).all())
    return float(model.weight.detach()[0, 0])


def test_the_newest_snapshot_takes_the_place_of_one_that_is_not_being_written(
    root: Place, gated: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(200, 200)
    with ckpt.StateManager(gated, model=model, saving=REPLACE) as manager, caplog.at_level(logging.INFO, "ckpt"):
        gated.gate.clear()
        for number in range(6):
            fill(model, number)
            assert manager.save_state(f"step-{number}") == f"step-{number}"
            assert gated.begun.wait(DEADLINE)
            fill(model, -1)
        gated.gate.set()
    assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(root)] == ["step-5", "step-0"]
    assert ckpt.verify(root) == {"step-5": [], "step-0": []}
    assert [value_of(root, name, 200) for name in ("step-0", "step-5")] == [0, 5]
    said = [
        (record.levelname, record.getMessage().partition(",")[0])
        for record in caplog.records
        if " instead, " in record.getMessage()
    ]
    assert said == [
        ("WARNING" if number == 1 else "INFO", f"ckpt skips step-{number} and saves step-{number + 1} instead")
        for number in range(1, 5)
    ]
    assert "ckpt skipped 4 saves" in caplog.text


def test_no_more_than_two_snapshots_are_in_memory(gated: Gated) -> None:
    model = nn.Linear(200, 200)
    with ckpt.StateManager(gated, model=model, saving=REPLACE) as manager:
        images = manager.session.saver.snapshots.memory
        manager.save_state("before", wait=False)
        manager.wait()
        one = images.size
        assert one >= 160_000
        gated.gate.clear()
        for number in range(6):
            manager.save_state(f"step-{number}")
        assert images.size == 2 * one
        gated.gate.set()


def test_without_memory_for_a_second_snapshot_a_save_waits_for_the_first(root: Place, gated: Gated) -> None:
    model = nn.Linear(200, 200)
    saving = ckpt.SaveOptions(when_busy="replace", host_memory=250_000)
    with ckpt.StateManager(gated, model=model, saving=saving) as manager:
        gated.gate.clear()
        fill(model, 1)
        manager.save_state("first")
        threading.Timer(0.3, gated.gate.set).start()
        fill(model, 2)
        manager.save_state("second")
        fill(model, 3)
        assert (root / "first" / "manifest.json").exists()
    assert [value_of(root, name, 200) for name in ("first", "second")] == [1, 2]


def test_a_save_that_waits_is_written_though_the_one_before_it_fails(root: Place, gated: Gated) -> None:
    with ckpt.StateManager(gated, model=nn.Linear(50, 50), saving=REPLACE) as manager:
        gated.gate.clear()
        gated.broken = "first"
        manager.save_state("first")
        manager.save_state("second")
        gated.gate.set()
        with pytest.raises(ckpt.FullError):
            manager.wait()
    assert ckpt.verify(root) == {"second": []}


def test_after_a_save_that_failed_the_next_call_says_so_and_the_one_after_it_saves(root: Place, gated: Gated) -> None:
    with ckpt.StateManager(gated, model=nn.Linear(200, 200), saving=REPLACE) as manager:
        images = manager.session.saver.snapshots.memory
        gated.broken = "first"
        manager.save_state("first")
        while manager.session.saver.busy:
            time.sleep(0.01)
        with pytest.raises(ckpt.FullError):
            manager.save_state("second")
        one = images.size
        manager.save_state("third")
        manager.wait()
        assert images.size == one
    assert ckpt.verify(root) == {"third": []}


def test_a_save_that_is_waited_for_replaces_nothing(root: Place, gated: Gated) -> None:
    with ckpt.StateManager(gated, model=nn.Linear(50, 50), saving=REPLACE) as manager:
        gated.gate.clear()
        for name in ("first", "second"):
            manager.save_state(name)
        threading.Timer(0.3, gated.gate.set).start()
        manager.save_state("third", wait=True)
    assert ckpt.verify(root) == {"third": [], "second": [], "first": []}


def _replace_on_two_ranks(rank: int, root: str) -> None:
    storage, model = Gated(root), nn.Linear(50, 50)
    with ckpt.StateManager(
        storage, model=model, ranks=ckpt.RankOptions(timeout=60), saving=ckpt.SaveOptions(when_busy="replace")
    ) as manager:
        storage.gate.clear()
        for number in range(4):
            fill(model, number)
            manager.save_state(f"step-{number}")
        storage.gate.set()


@pytest.mark.slow
def test_all_ranks_replace_the_same_saves(root: Place) -> None:
    assert run_ranks(2, _replace_on_two_ranks, str(root)) == [0, 0]
    assert ckpt.verify(root) == {"step-3": [], "step-0": []}
    assert [value_of(root, name) for name in ("step-0", "step-3")] == [0, 3]


def _race_on_two_ranks(rank: int, root: str) -> None:
    """Whatever the ranks' timing: what is committed is what all of them had at that call."""
    model = nn.Linear(50, 50)
    with ckpt.StateManager(
        root, model=model, ranks=ckpt.RankOptions(timeout=60), saving=ckpt.SaveOptions(when_busy="replace")
    ) as manager:
        for number in range(40):
            fill(model, number)
            manager.save_state(f"step-{number:02d}")


@pytest.mark.slow
def test_ranks_that_are_at_different_points_of_a_save_replace_the_same_ones(root: Place) -> None:
    assert run_ranks(2, _race_on_two_ranks, str(root)) == [0, 0]
    names = [checkpoint.name for checkpoint in ckpt.list_checkpoints(root)]
    assert names[0] == "step-39"
    assert all(value_of(root, name) == int(name[-2:]) for name in names)
    assert ckpt.verify(root) == {name: [] for name in names}


def _replace_where_rank_1_has_no_memory(rank: int, root: str) -> None:
    model = nn.Linear(50, 50)
    saving = ckpt.SaveOptions(when_busy="replace", host_memory=1000 if rank else None)
    with ckpt.StateManager(root, model=model, ranks=ckpt.RankOptions(timeout=60), saving=saving) as manager:
        for number in range(10):
            fill(model, number)
            manager.save_state(f"step-{number}")


@pytest.mark.slow
def test_where_one_rank_has_no_memory_for_a_snapshot_all_of_them_wait(root: Place) -> None:
    assert run_ranks(2, _replace_where_rank_1_has_no_memory, str(root)) == [0, 0]
    assert len(ckpt.verify(root)) == 10
    assert value_of(root, "step-9") == 9


def test_a_save_that_is_put_back_is_run_though_the_one_before_it_has_failed() -> None:
    queue, ran = SaveQueue(), list[str]()
    begun, go_on = threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        assert go_on.wait(DEADLINE)
        raise ckpt.FullError("no space left")

    queue.add(QueuedSave("first", fail, lambda: None))
    assert begun.wait(DEADLINE)
    queue.add(QueuedSave("second", lambda: ran.append("second"), lambda: None))
    second = queue.withdraw()
    assert second is not None
    go_on.set()
    while queue.busy:
        time.sleep(0.01)
    queue.restore(second)
    with pytest.raises(ckpt.FullError):
        queue.wait()
    queue.wait()
    assert ran == ["second"]


def test_a_third_save_waits_until_the_second_has_its_turn() -> None:
    queue, ran = SaveQueue(), list[str]()
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(DEADLINE)
        ran.append("first")

    queue.add(QueuedSave("first", first, lambda: None))
    assert begun.wait(DEADLINE)
    queue.add(QueuedSave("second", lambda: ran.append("second"), lambda: None))
    third = QueuedSave("third", lambda: ran.append("third"), lambda: None)
    adding = threading.Thread(target=queue.add, args=[third], daemon=True)
    adding.start()
    adding.join(0.1)
    waited = adding.is_alive()
    go_on.set()
    adding.join(DEADLINE)
    queue.wait()
    assert waited
    assert ran == ["first", "second", "third"]
