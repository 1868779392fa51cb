"""The first checkpoint after a load says what was loaded, and what had to be passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ckpt
from ckpt.formats.native.manifest import Manifest
from ckpt.root import catalog
from ckpt.root.catalog import History
from ckpt.save.root_writer import LONGEST, MOST, resumption
from ckpt.storage import LocalStorage
from tests.cli.test_main import flip_a_bit


def train(root: Path, steps: int, **options: Any) -> None:
    """Load what is there, then save every step."""
    with ckpt.StateManager(root, model=nn.Linear(3, 3), save_every=1, **options) as manager:
        manager.resume()
        for _ in range(steps):
            manager.step()


def manifest_at(root: Path, step: int) -> Manifest:
    return catalog.read_manifest(LocalStorage(root), f"step-{step:08d}")


def test_only_the_first_checkpoint_after_a_load_says_what_was_loaded(tmp_path: Path) -> None:
    train(tmp_path, 2)
    train(tmp_path, 2)
    loaded = manifest_at(tmp_path, 2)
    assert [manifest_at(tmp_path, step).resumed for step in (1, 2, 4)] == [{}, {}, {}]
    assert manifest_at(tmp_path, 3).resumed == {
        "name": "step-00000002", "id": loaded.id, "step": 2, "found_in": "root", "passed_over": {},
    }  # fmt: skip


def test_it_says_what_was_passed_over_and_why(tmp_path: Path) -> None:
    train(tmp_path, 3)
    flip_a_bit(tmp_path / "step-00000003" / "model.safetensors")
    train(tmp_path, 1)
    resumed = manifest_at(tmp_path, 3).resumed
    assert resumed["name"] == "step-00000002"
    assert resumed["passed_over"].keys() == {"step-00000003"}
    assert "model.safetensors was altered" in resumed["passed_over"]["step-00000003"]


def test_it_says_that_the_mirror_had_it(tmp_path: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    train(root, 1, mirror=str(mirror))
    flip_a_bit(root / "step-00000001" / "model.safetensors")
    train(root, 1, mirror=str(mirror))
    assert manifest_at(root, 2).resumed["found_in"] == "mirror"


def test_a_save_that_fails_leaves_it_for_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, 1)
    with ckpt.StateManager(tmp_path, model=nn.Linear(3, 3)) as manager:
        manager.resume()
        with monkeypatch.context() as patched:

            def refuse(*arguments: object, **options: object) -> None:
                raise ckpt.StorageError("no")

            patched.setattr(LocalStorage, "write", refuse)
            with pytest.raises(ckpt.StorageError):
                manager.save_state("fails", wait=True)
        manager.save_state("second", wait=True)
    assert catalog.read_manifest(LocalStorage(tmp_path), "second").resumed["name"] == "step-00000001"


def test_the_history_keeps_it_when_a_later_run_removes_the_checkpoint(tmp_path: Path) -> None:
    for _ in range(3):
        train(tmp_path, 2)
    train(tmp_path, 1, keep=ckpt.Keep(last=1))
    past = {save.summary.step: save for save in History.of(LocalStorage(tmp_path)).saves}
    assert [step for step, save in past.items() if save.resumed] == [3, 5, 7]
    assert past[3].resumed["name"] == "step-00000002"
    assert all(save.seconds["blocked"] >= 0 for save in past.values())


def test_reasons_are_short_few_and_without_secrets() -> None:
    loaded = Manifest(name="a\x1b", id="1", sequence=1, created="2026-01-01T00:00:00+00:00", run="r", files=())
    reasons = {f"step-{number}": f"https://me:hunter2hunter2@host/x {'y' * 999}" for number in range(MOST + 5)}
    found = resumption(loaded, 7, reasons)
    assert (found["name"], found["found_in"], found["more"]) == ("a\\x1b", "elsewhere", 5)
    assert len(found["passed_over"]) == MOST
    assert all(len(why) == LONGEST and "hunter2" not in why for why in found["passed_over"].values())


@pytest.mark.parametrize("wrong", ["x", {"name": "a"}, {"passed_over": {"a": 1}}])
def test_a_manifest_that_says_it_wrongly_is_refused(wrong: Any) -> None:
    said = {"name": "a", "id": "1", "step": 1, "found_in": "root", "passed_over": {}}
    good = Manifest(name="a", id="1", sequence=1, created="2026-01-01T00:00:00+00:00", run="r", files=(), resumed=said)
    assert Manifest.from_bytes(good.to_bytes(), "it").resumed == said
    with pytest.raises(ckpt.UnsupportedError, match="resumed"):
        Manifest(**{**vars(good), "resumed": wrong}).to_bytes()
