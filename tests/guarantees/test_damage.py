"""Bits flip, files are cut short or vanish: it is noticed, and the checkpoint before is taken."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ckpt
from tests.helpers.places import Place


@pytest.fixture
def run(root: Place) -> Place:
    """Two checkpoints: step 1 and step 2."""
    model = nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.resume()
        for step in (1, 2):
            model(torch.ones(1, 40)).sum().backward()
            optimizer.step()
            nn.init.constant_(model.weight, step)
            manager.step()
            manager.save_state()
    return root


def _load(root: Place, name: str | None = None) -> tuple[ckpt.Restored, nn.Linear]:
    model = nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        return manager.load_state(name), model


def test_a_hundred_random_flips_and_truncations_are_all_noticed(run: Place) -> None:
    chance = random.Random(7)
    files = sorted((run / "step-00000002").files())
    assert len(files) == 5
    for _ in range(100):
        hurt = run / "step-00000002" / chance.choice(files)
        whole = hurt.read_bytes()
        data = bytearray(whole)
        if chance.random() < 0.7:
            bit = chance.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            hurt.write_bytes(data)
        else:
            hurt.write_bytes(data[: chance.randrange(len(data))])
        restored, model = _load(run)
        assert restored.name == "step-00000001", hurt.name
        assert hurt.name in restored.passed_over["step-00000002"]
        assert torch.equal(model.weight, torch.ones(40, 40))
        hurt.write_bytes(whole)
    assert _load(run)[0].name == "step-00000002"


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "rank-00000.json"])
def test_a_missing_file_is_named_and_the_checkpoint_before_is_taken(run: Place, file: str) -> None:
    (run / "step-00000002" / file).unlink()
    restored, _ = _load(run)
    assert restored.name == "step-00000001"
    assert restored.passed_over == {"step-00000002": f"step-00000002 is damaged: {file} is missing."}
    assert "passed over" in str(restored)


def test_without_its_manifest_a_checkpoint_does_not_exist(run: Place) -> None:
    (run / "step-00000002" / "manifest.json").unlink()
    restored, _ = _load(run)
    assert restored.name == "step-00000001"
    assert "never committed" in restored.passed_over["step-00000002"]


def test_a_damaged_checkpoint_asked_for_by_name_is_refused(run: Place) -> None:
    (run / "step-00000002" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ckpt.DamagedError, match=r"model\.safetensors is 5 bytes of"):
        _load(run, "step-00000002")


def test_when_none_is_intact_it_says_so_and_never_starts_afresh(run: Place) -> None:
    for name in ("step-00000001", "step-00000002"):
        (run / name / "model.safetensors").write_bytes(b"")
    model = nn.Linear(40, 40)
    with (
        ckpt.StateManager(run, model=model) as manager,
        pytest.raises(ckpt.DamagedError, match=r"no checkpoint in .* is intact") as caught,
    ):
        manager.resume()
    assert "step-00000001" in str(caught.value)
    assert "step-00000002" in str(caught.value)


@pytest.mark.also_on_s3
def test_a_damaged_checkpoint_is_replaced_when_training_comes_to_its_step_again(run: Place) -> None:
    (run / "step-00000002" / "model.safetensors").write_bytes(b"")
    model = nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.StateManager(run, model=model, optimizer=optimizer) as manager:
        manager.resume()
        manager.step()
        assert manager.save_state() == "step-00000002"
    assert ckpt.verify(run) == {"step-00000002": [], "step-00000001": []}


def test_verify_names_what_is_wrong(run: Place) -> None:
    data = bytearray((run / "step-00000001" / "state.json").read_bytes())
    data[10] ^= 1
    (run / "step-00000001" / "state.json").write_bytes(data)
    report = ckpt.verify(run)
    assert report["step-00000002"] == []
    assert report["step-00000001"] == [f"state.json was altered (bytes 0 to {len(data)})"]
    assert ckpt.verify(run / "step-00000001").keys() == {"step-00000001"}


def _large(seed: int) -> nn.Linear:
    """Longer than a block, so that damage at its end is found when its beginning has been read."""
    torch.manual_seed(seed)
    return nn.Linear(3000, 3000, bias=False)


@pytest.fixture(scope="module")
def damaged_at_its_end(new_root: Callable[[], Place]) -> Place:
    root = new_root()
    with ckpt.StateManager(root, model=_large(1)) as manager:
        manager.save_state("old")
        manager.save_state("new")
    file = root / "new" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    return root


def test_what_was_trained_stays_as_it_is_when_a_load_fails(damaged_at_its_end: Place) -> None:
    model = _large(2)
    with ckpt.StateManager(damaged_at_its_end, model=model) as manager:
        manager.load_state("old")
        with torch.no_grad():
            model.weight.add_(1)
        before = model.weight.clone()
        with pytest.raises(ckpt.DamagedError, match=r"model\.safetensors was altered"):
            manager.load_state("new")
        assert torch.equal(model.weight, before)


def test_fresh_objects_take_the_newest_that_is_intact(damaged_at_its_end: Place) -> None:
    model = _large(2)
    with ckpt.StateManager(damaged_at_its_end, model=model) as manager:
        assert manager.load_state().name == "old"
        manager.step()
    assert torch.equal(model.weight, _large(1).weight)


def test_what_was_loaded_in_part_is_neither_saved_nor_trained_on(damaged_at_its_end: Place) -> None:
    with ckpt.StateManager(damaged_at_its_end, model=_large(2)) as manager:
        with pytest.raises(ckpt.DamagedError):
            manager.load_state("new")
        with pytest.raises(ckpt.StateError, match="a load of new failed half-way"):
            manager.save_state("mixed")
        with pytest.raises(ckpt.StateError, match="a load of new failed half-way"):
            next(manager.epochs(1))
        manager.load_state("old")
        manager.step()
