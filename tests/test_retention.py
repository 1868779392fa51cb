"""Which checkpoints stay."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from torch import nn

import ckpt
from ckpt.storage import LocalStorage


def _run(root: Path, keep: ckpt.Keep | None, losses: list[float]) -> list[int | None]:
    with ckpt.StateManager(root, model=nn.Linear(1, 1), keep=keep, save_every=1) as manager:
        manager.resume()
        for loss in losses:
            manager.step(metrics={"loss": loss})
    return [one.step for one in ckpt.list_checkpoints(root)]


def test_without_keep_all_stay(tmp_path: Path) -> None:
    assert _run(tmp_path, None, [1.0] * 5) == [5, 4, 3, 2, 1]


def test_the_last_stay(tmp_path: Path) -> None:
    assert _run(tmp_path, ckpt.Keep(last=2), [1.0] * 5) == [5, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000004", "step-00000005"]


def test_the_best_stay_too(tmp_path: Path) -> None:
    losses = [3.0, 1.0, 2.0, 5.0, 4.0, 6.0]
    assert _run(tmp_path / "min", ckpt.Keep(last=1, best=2, metric="loss"), losses) == [6, 3, 2]
    assert _run(tmp_path / "max", ckpt.Keep(last=1, best=2, metric="loss", mode="max"), losses) == [6, 4]


def test_milestones_stay_too(tmp_path: Path) -> None:
    assert _run(tmp_path, ckpt.Keep(last=1, every=3), [1.0] * 8) == [8, 6, 3]


def test_retention_goes_on_over_several_runs(tmp_path: Path) -> None:
    _run(tmp_path, ckpt.Keep(last=2), [1.0] * 3)
    assert _run(tmp_path, ckpt.Keep(last=2), [1.0] * 2) == [5, 4]


def test_a_damaged_checkpoint_does_not_count(tmp_path: Path) -> None:
    _run(tmp_path, None, [1.0] * 3)
    (tmp_path / "step-00000003" / "model.safetensors").write_bytes(b"")
    with ckpt.StateManager(tmp_path, model=nn.Linear(1, 1), keep=ckpt.Keep(last=2)) as manager:
        manager.resume()
        manager.save_state("next", wait=True)
        left = {one.name for one in ckpt.list_checkpoints(tmp_path)}
        assert left == {"step-00000002", "step-00000003", "next"}
        manager.save_state("after")
    assert {one.name for one in ckpt.list_checkpoints(tmp_path)} == {"next", "after"}


def test_one_that_is_being_read_is_not_removed_until_it_has_been(tmp_path: Path) -> None:
    _run(tmp_path, None, [1.0])
    with ckpt.StateManager(tmp_path, model=nn.Linear(1, 1), keep=ckpt.Keep(last=1)) as manager:
        manager.resume()
        with LocalStorage(tmp_path).lock("step-00000001", shared=True):  # as a reader in another process does
            manager.save_state("new", wait=True)
            assert ckpt.verify(tmp_path) == {"new": [], "step-00000001": []}
        manager.save_state("newer")
    assert ckpt.verify(tmp_path) == {"newer": []}


def test_one_that_was_removed_by_hand_is_no_obstacle(tmp_path: Path) -> None:
    with ckpt.StateManager(tmp_path, model=nn.Linear(1, 1), keep=ckpt.Keep(last=1)) as manager:
        manager.save_state("first", wait=True)
        shutil.rmtree(tmp_path / "first")
        manager.save_state("second", wait=True)
        assert not (tmp_path / "first").exists()
        manager.save_state("first")
    assert ckpt.verify(tmp_path) == {"first": []}


def test_nothing_is_removed_when_a_save_fails(tmp_path: Path) -> None:
    class Unholdable:
        def state_dict(self) -> dict[str, object]:
            return {"f": print}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    _run(tmp_path, None, [1.0] * 3)
    with ckpt.StateManager(tmp_path, model=nn.Linear(1, 1), keep=ckpt.Keep(last=1)) as manager:
        manager.register(own=Unholdable())
        with pytest.raises(ckpt.UnsupportedError):
            manager.save_state("bad")
    assert len(ckpt.list_checkpoints(tmp_path)) == 3


def test_files_of_others_in_the_root_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "state.txt").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    _run(tmp_path, ckpt.Keep(last=1), [1.0] * 3)
    assert (tmp_path / "logs" / "state.txt").read_text() == "mine"
    assert (tmp_path / "notes.txt").read_text() == "mine"
