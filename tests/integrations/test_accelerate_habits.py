"""Accelerate: what scripts, notebooks and Accelerate's own tests do with an accelerator, attached."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import ckpt
from ckpt.integrations.accelerate import attach
from ckpt.root.write_link_commit import Attempt
from tests.helpers.accelerated import Numbers, build, new_accelerator, reseed, train_on
from tests.helpers.processes import run_ranks


def _prepared(accelerator: Any, **options: Any) -> tuple[Any, list[Any]]:
    """A prepared loader, and a prepared model, optimizer and scheduler."""
    loader, *parts = accelerator.prepare(DataLoader(Numbers(), batch_size=4, shuffle=True, **options), *build())
    return loader, parts


@pytest.mark.parametrize("background", [True, False])
def test_a_cell_that_is_run_twice_takes_the_root_from_the_manager_that_nobody_uses_any_more(
    tmp_path: Path, background: bool
) -> None:
    def cell(namespace: dict[str, Any]) -> None:
        namespace["accelerator"] = new_accelerator()
        namespace["loader"], namespace["parts"] = _prepared(namespace["accelerator"])
        options = ckpt.SaveOptions(background=background)
        namespace["manager"] = attach(namespace["accelerator"], tmp_path, saving=options)
        namespace["manager"].resume()
        namespace["accelerator"].save_state(f"step_{len(ckpt.list_checkpoints(tmp_path))}")

    namespace: dict[str, Any] = {}
    for _ in range(3):
        cell(namespace)
    namespace["manager"].close()
    assert {found.name for found in ckpt.list_checkpoints(tmp_path)} == {"step_0", "step_1", "step_2"}


def test_a_manager_that_is_still_in_use_keeps_its_root_and_the_other_is_told_how_to_take_it(tmp_path: Path) -> None:
    first, second = new_accelerator(), new_accelerator()
    _prepared(first)
    _prepared(second)
    with attach(first, tmp_path) as manager:
        first.save_state("once")
        manager.wait()
        later = attach(second, tmp_path)
        second.load_state("once")
        with pytest.raises(ckpt.LockedError, match=r"a StateManager of this process: close\(\) it first"):
            later.save_state("twice", wait=True)
    with later:
        second.save_state("twice")
    assert {found.name for found in ckpt.list_checkpoints(tmp_path)} == {"once", "twice"}


def test_an_attached_accelerator_is_pickled_and_its_copy_is_one_of_accelerates_own(tmp_path: Path) -> None:
    accelerator = new_accelerator()
    loader = accelerator.prepare(DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
    with attach(accelerator, tmp_path):
        other = pickle.loads(pickle.dumps(accelerator))
        assert type(other) is type(accelerator)
        assert other.save_state.__func__ is Accelerator.save_state
        assert other.end_training.__self__ is other
        assert [batch.tolist() for batch in other._dataloaders[0]] == [batch.tolist() for batch in loader]
        accelerator.save_state("ours")
        with attach(other, tmp_path / "other"):
            other.save_state("its")
    assert [found.name for found in ckpt.list_checkpoints(tmp_path)] == ["ours"]
    assert [found.name for found in ckpt.list_checkpoints(tmp_path / "other")] == ["its"]


def test_a_loader_alone_is_saved_and_continues_where_it_stopped(tmp_path: Path) -> None:
    def run(stop: int) -> list[list[int]]:
        reseed(0, 0)
        accelerator = new_accelerator()
        loader = accelerator.prepare(DataLoader(Numbers(), batch_size=4, shuffle=True))
        seen = []
        with attach(accelerator, tmp_path / f"root-{stop < 9}") as manager:
            manager.resume()
            for batch in loader:
                seen.append([tensor.tolist() for tensor in batch])
                if len(seen) == stop:
                    accelerator.save_state()
                    break
        return seen

    straight = run(9)
    assert run(2) + run(8) == straight
    assert len(straight) == 6


def _names(root: Path) -> set[str]:
    return {found.name for found in ckpt.list_checkpoints(root) if found.committed}


def _saved_anywhere(rank: int, folder: str, world_size: int) -> None:
    root = Path(folder, "root")
    accelerator = new_accelerator(rank=rank, world_size=world_size)
    _, parts = _prepared(accelerator)
    weight = accelerator.unwrap_model(parts[0])[0].weight
    (at := Path(folder, "there")).mkdir(exist_ok=True)
    places = [root / "plain", root / "epoch_0" / "step_5", Path(folder, "out", "final"), at]
    with attach(accelerator, root) as manager:
        for number, place in enumerate(places):
            nn.init.constant_(weight, number)
            assert accelerator.save_state(str(place)) == place
        manager.wait()
        for number, place in enumerate(places):
            accelerator.load_state(str(place))
            assert weight.unique().tolist() == [number]
            assert manager.restored is not None
            assert manager.restored.url == str(place)
        accelerator.save_state("again")  # in the root, and not linked to files of another one
        manager.wait()
        accelerator.load_state()
        assert manager.restored is not None
        assert manager.restored.name == "again"
        accelerator.save_state(str(at))  # replaced
    accelerator.wait_for_everyone()
    assert _names(root) == {"plain", "again"}
    assert _names(root / "epoch_0") == {"step_5"}
    assert ckpt.verify(at)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_is_saved_to_any_folder_deeper_in_the_root_or_outside_it_and_loaded_from_there(
    tmp_path: Path, world_size: int
) -> None:
    assert run_ranks(world_size, _saved_anywhere, str(tmp_path), world_size) == [0] * world_size


def test_a_save_outside_the_root_looks_at_nothing_beside_it_and_leaves_nothing_there(tmp_path: Path) -> None:
    """The folder above may be /tmp, with leftovers of other runs and files of other users."""
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / ".saving").write_text("of another run")
    (tmp_path / ".notes.ckpt-tmp").write_text("of another run")
    accelerator = new_accelerator()
    _prepared(accelerator)
    with attach(accelerator, tmp_path / "root"):
        accelerator.save_state(str(tmp_path / "out"))
    assert {path.name for path in tmp_path.iterdir()} == {"cut", ".notes.ckpt-tmp", "out"}
    assert (tmp_path / "cut" / ".saving").read_text() == "of another run"


def test_a_save_outside_the_root_does_not_stand_for_the_one_in_it_that_is_due(tmp_path: Path) -> None:
    accelerator = new_accelerator()
    loader, parts = _prepared(accelerator)
    with attach(accelerator, tmp_path / "root", save_every=2) as manager:
        for batch in loader:
            train_on(batch, accelerator, *parts)
            accelerator.save_state(str(tmp_path / "out"))
            manager.step()
    assert {"step-00000002", "step-00000004", "step-00000006"} <= _names(tmp_path / "root")


def test_a_load_of_a_folder_outside_the_root_waits_for_the_save_under_way_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Attempt.write

    def write_late(*args: Any, **options: Any) -> Any:
        time.sleep(0.5)
        return write(*args, **options)

    monkeypatch.setattr(Attempt, "write", write_late)
    accelerator = new_accelerator()
    _prepared(accelerator)
    with attach(accelerator, tmp_path / "root"):
        accelerator.save_state(str(tmp_path / "out"))
        accelerator.load_state(str(tmp_path / "out"))


def test_a_checkpoint_of_another_run_outside_the_root_is_not_replaced_by_a_fresh_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(root: str) -> None:
        accelerator = new_accelerator()
        _prepared(accelerator)
        with attach(accelerator, tmp_path / root, saving=ckpt.SaveOptions(background=False)) as manager:
            if root == "resumed":
                manager.resume()
            accelerator.save_state(str(tmp_path / "out"))

    run("first")
    with pytest.raises(ckpt.ConfigError, match=r"out is the newest.*has not resumed from"):
        run("second")
    run("resumed")
    assert "out, a checkpoint of another run" in caplog.text
