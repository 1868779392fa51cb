"""Retention and cleaning beside what somebody else has written: older runs, and newer versions of this library."""

from __future__ import annotations

import math

import pytest
from torch import nn

import ckpt
from ckpt.formats.native import manifest as manifest_format
from ckpt.root import deletion
from ckpt.root.catalog import mark_save
from ckpt.storage import open_storage
from tests.helpers.places import Place


def run(root: Place, keep: ckpt.Keep | None, losses: list[float]) -> list[int | None]:
    with ckpt.StateManager(root, model=nn.Linear(1, 1), keep=keep, save_every=1) as manager:
        manager.resume()
        for loss in losses:
            manager.step(metrics={"loss": loss})
            manager.wait()
    return [checkpoint.step for checkpoint in ckpt.list_checkpoints(root)]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("losses", [[1.0, math.nan], [math.nan, 1.0], [math.nan, 1.0, math.nan]])
def test_a_nan_that_an_earlier_run_has_saved_is_not_the_best(root: Place, losses: list[float], mode: str) -> None:
    run(root, None, losses)
    keep = ckpt.Keep(last=1, best=1, metric="loss", mode=mode)
    worse = 9.0 if mode == "min" else -9.0
    assert run(root, keep, [worse]) == [len(losses) + 1, losses.index(1.0) + 1]


def test_a_save_that_fails_lets_nothing_go_of_what_was_there_before(root: Place) -> None:
    class Unholdable:
        def state_dict(self) -> dict[str, object]:
            return {"f": print}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    run(root, None, [1.0, 2.0, 3.0])
    with ckpt.StateManager(root, model=nn.Linear(1, 1), keep=ckpt.Keep(last=1)) as manager:
        manager.resume()
        manager.register(own=Unholdable())
        with pytest.raises(ckpt.UnsupportedError):
            manager.save_state("bad", wait=True)
    assert [checkpoint.step for checkpoint in ckpt.list_checkpoints(root)] == [3, 2, 1]


def test_what_a_newer_version_has_replaced_is_not_cleaned_away_by_an_older_one(
    root: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer version was killed between its commit and its cleaning: its mark names files that its manifest lists."""
    monkeypatch.setattr(manifest_format, "VERSION", 2)
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        manager.save_state("newer", wait=True)
    (found,) = ckpt.list_checkpoints(root)
    assert found.manifest is not None
    storage = open_storage(root)
    mark_save(storage, "newer", [file.path for file in found.manifest.files], [], found.manifest.id)
    before = (root / "newer").files()
    monkeypatch.setattr(manifest_format, "VERSION", 1)
    deletion.sweep(storage)
    assert (root / "newer").files() == before
    monkeypatch.setattr(manifest_format, "VERSION", 2)
    assert ckpt.verify(root) == {"newer": []}


def test_what_a_newer_version_has_written_is_not_replaced_by_an_older_one(
    root: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_format, "VERSION", 2)
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        manager.save_state("newer", wait=True)
    monkeypatch.setattr(manifest_format, "VERSION", 1)
    with (
        ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager,
        pytest.raises(ckpt.VersionError, match="format version 2"),
    ):
        manager.save_state("newer", wait=True)
    monkeypatch.setattr(manifest_format, "VERSION", 2)
    assert ckpt.verify(root) == {"newer": []}
