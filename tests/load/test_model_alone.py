"""The model of a checkpoint is loaded alone, for integrations: verified before it is changed, without side effects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
from ckpt.export.load_model import load_checkpoint_model
from ckpt.storage import open_storage
from tests.helpers.training import exact


def _saved(root: Path, *names: str) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        for name in names:
            manager.save_state(name)
    return model


def test_the_model_alone_is_restored_and_no_generator_is_touched(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = _saved(tmp_path, "x")
    model = nn.Linear(3, 3)
    before = torch.get_rng_state()
    restored = load_checkpoint_model(open_storage(tmp_path), "x", model)
    assert torch.equal(torch.get_rng_state(), before)
    assert exact(model.state_dict()) == exact(saved.state_dict())
    assert restored.restored == ("model",)
    unmanaged = "in the checkpoint, but not managed here"
    assert restored.skipped == {"gradients (each rank's own)": unmanaged, "optimizer": unmanaged}
    assert f"resumed from {tmp_path}/x" in capfd.readouterr().err


def test_without_a_name_a_damaged_checkpoint_is_left_for_the_newest_intact_one(tmp_path: Path) -> None:
    saved = _saved(tmp_path, "older", "newer")
    file = tmp_path / "newer" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    model = nn.Linear(3, 3)
    restored = load_checkpoint_model(open_storage(tmp_path), None, model)
    assert restored.name == "older"
    assert list(restored.passed_over) == ["newer"]
    assert exact(model.state_dict()) == exact(saved.state_dict())


def test_a_damaged_checkpoint_or_one_that_does_not_fit_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    _saved(tmp_path, "x", "damaged")
    file = tmp_path / "damaged" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    for name, model, error in (
        ("damaged", nn.Linear(3, 3), ckpt.DamagedError),
        ("x", nn.Linear(4, 3), ckpt.MismatchError),
    ):
        before = exact(model.state_dict())
        with pytest.raises(error):
            load_checkpoint_model(open_storage(tmp_path), name, model)
        assert exact(model.state_dict()) == before


def test_where_there_is_no_checkpoint_that_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ckpt.MissingError, match="there is no checkpoint"):
        load_checkpoint_model(open_storage(tmp_path), None, nn.Linear(3, 3))
