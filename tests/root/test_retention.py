"""Which checkpoints stay."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from torch import nn

import ckpt
from ckpt.root.catalog import HISTORY
from ckpt.storage import open_storage
from tests.helpers.places import PassedOn, Place, committed


def _run(root: Place, keep: ckpt.Keep | None, losses: list[float]) -> list[int | None]:
    with ckpt.StateManager(root, model=nn.Linear(1, 1), keep=keep, save_every=1) as manager:
        manager.resume()
        for loss in losses:
            manager.step(metrics={"loss": loss})
    return [checkpoint.step for checkpoint in ckpt.list_checkpoints(root)]


def test_without_keep_all_stay(root: Place) -> None:
    assert _run(root, None, [1.0] * 5) == [5, 4, 3, 2, 1]


@pytest.mark.also_on_s3
def test_the_last_stay(root: Place) -> None:
    assert _run(root, ckpt.Keep(last=2), [1.0] * 5) == [5, 4]
    left = {name.partition("/")[0] for name in root.files()} - {".lock", HISTORY}
    assert left == {"step-00000004", "step-00000005"}


def test_the_best_stay_too(root: Place) -> None:
    losses = [3.0, 1.0, 2.0, 5.0, 4.0, 6.0]
    assert _run(root / "min", ckpt.Keep(last=1, best=2, metric="loss"), losses) == [6, 3, 2]
    assert _run(root / "max", ckpt.Keep(last=1, best=2, metric="loss", mode="max"), losses) == [6, 4]


def test_with_a_metric_that_no_checkpoint_has_nothing_is_removed_and_it_is_said(
    root: Place, caplog: pytest.LogCaptureFixture
) -> None:
    keep = ckpt.Keep(last=1, best=2, metric="val_loss")
    assert _run(root, keep, [3.0, 1.0, 2.0, 5.0]) == [4, 3, 2, 1]
    said = [record.message for record in caplog.records if "val_loss" in record.message]
    assert len(said) == 1
    assert "no checkpoint has a metric 'val_loss'; there are: loss. Until a checkpoint has the metric, ckpt" in said[0]


def test_saves_before_the_first_evaluation_stay_until_there_is_something_to_rank(
    root: Place, caplog: pytest.LogCaptureFixture
) -> None:
    keep = ckpt.Keep(last=2, best=1, metric="val_loss")
    with ckpt.StateManager(root, model=nn.Linear(1, 1), keep=keep, save_every=1) as manager:
        manager.resume()
        for metrics in (None, None, None, {"val_loss": 2.0}, {"val_loss": 3.0}, None, None):
            manager.step(metrics)
            manager.wait()
            if manager.progress.step == 2:
                assert "val_loss" not in caplog.text  # nothing would have been removed so far
            if manager.progress.step == 3:
                assert "there are: none" in caplog.text
    assert [checkpoint.step for checkpoint in ckpt.list_checkpoints(root)] == [7, 6, 4]


def test_milestones_stay_too(root: Place) -> None:
    assert _run(root, ckpt.Keep(last=1, every=3), [1.0] * 8) == [8, 6, 3]


def test_retention_goes_on_over_several_runs(root: Place) -> None:
    _run(root, ckpt.Keep(last=2), [1.0] * 3)
    assert _run(root, ckpt.Keep(last=2), [1.0] * 2) == [5, 4]


def test_a_damaged_checkpoint_does_not_count(root: Place) -> None:
    _run(root, None, [1.0] * 3)
    (root / "step-00000003" / "model.safetensors").write_bytes(b"")
    with ckpt.StateManager(root, model=nn.Linear(1, 1), keep=ckpt.Keep(last=2)) as manager:
        manager.resume()
        manager.save_state("next", wait=True)
        left = {checkpoint.name for checkpoint in ckpt.list_checkpoints(root)}
        assert left == {"step-00000002", "step-00000003", "next"}
        manager.save_state("after")
    assert {checkpoint.name for checkpoint in ckpt.list_checkpoints(root)} == {"next", "after"}


@pytest.mark.also_on_s3
def test_one_that_is_being_read_is_not_removed_until_it_has_been(root: Place) -> None:
    _run(root, None, [1.0])
    with ckpt.StateManager(root, model=nn.Linear(1, 1), keep=ckpt.Keep(last=1)) as manager:
        manager.resume()
        with open_storage(root).lock("step-00000001", shared=True):  # as a reader in another process does
            manager.save_state("new", wait=True)
            assert ckpt.verify(root) == {"new": [], "step-00000001": []}
        manager.save_state("newer")
    assert ckpt.verify(root) == {"newer": []}


class _CutOff(PassedOn):
    """Removes one object of several, and then no more: as when the process is killed."""

    def delete(self, keys: Iterable[str]) -> None:
        first, rest = (all_keys := list(keys))[:1], all_keys[1:]
        super().delete(first)
        if rest:
            raise ckpt.StorageError("cut off")


@pytest.mark.also_on_s3
def test_what_is_left_of_a_removal_that_was_cut_off_is_swept_by_the_next_run(root: Place) -> None:
    _run(root, None, [1.0] * 2)
    with ckpt.StateManager(_CutOff(root), model=nn.Linear(1, 1), keep=ckpt.Keep(last=2)) as manager:
        manager.resume()
        manager.save_state("new")
    assert len((root / "step-00000001").files()) > 1
    assert committed(root) == {"step-00000002", "new"}
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        manager.resume()
        manager.save_state("newer")
    assert (root / "step-00000001").files() == {}
    assert ckpt.verify(root) == {"newer": [], "new": [], "step-00000002": []}


def test_one_that_was_removed_by_hand_is_no_obstacle(root: Place) -> None:
    with ckpt.StateManager(root, model=nn.Linear(1, 1), keep=ckpt.Keep(last=1)) as manager:
        manager.save_state("first", wait=True)
        (root / "first").remove()
        manager.save_state("second", wait=True)
        assert not (root / "first").exists()
        manager.save_state("first")
    assert ckpt.verify(root) == {"first": []}


def test_nothing_is_removed_when_a_save_fails(root: Place) -> None:
    class Unholdable:
        def state_dict(self) -> dict[str, object]:
            return {"f": print}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    _run(root, None, [1.0] * 3)
    with ckpt.StateManager(root, model=nn.Linear(1, 1), keep=ckpt.Keep(last=1)) as manager:
        manager.register(own=Unholdable())
        with pytest.raises(ckpt.UnsupportedError):
            manager.save_state("bad")
    assert len(ckpt.list_checkpoints(root)) == 3


def test_files_of_others_in_the_root_are_left_alone(root: Place) -> None:
    others = [root / "logs" / "state.txt", root / "notes.txt"]
    for file in others:
        file.write_bytes(b"mine")
    _run(root, ckpt.Keep(last=1), [1.0] * 3)
    assert all(file.read_bytes() == b"mine" for file in others)
