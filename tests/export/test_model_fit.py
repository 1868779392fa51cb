"""`load_model` and `merge` take the part that was asked for, as it was saved, or say what is different."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckpt
from tests.helpers.training import exact

pytestmark = pytest.mark.filterwarnings("ignore")


def saved_by_accelerate(folder: Path, *, safe: bool) -> list[nn.Module]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    models: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 2)]
    accelerator = Accelerator(cpu=True)
    for model in models:
        accelerator.prepare(model)
    accelerator.save_state(str(folder), safe_serialization=safe)
    AcceleratorState._reset_state(reset_partial_state=True)
    return models


@pytest.mark.parametrize("safe", [True, False])
def test_of_several_models_of_accelerate_the_one_that_is_named_is_taken(tmp_path: Path, safe: bool) -> None:
    models = saved_by_accelerate(tmp_path / "saved", safe=safe)
    for number, model in enumerate(models):
        part, out = f"model.{number}", tmp_path / f"{number}.safetensors"
        ckpt.merge(tmp_path / "saved", out, part=part)
        assert exact(load_file(out)) == exact(dict(model.state_dict()))
        fresh = nn.Linear(2, 2)
        ckpt.load_model(tmp_path / "saved", fresh, part=part)
        assert exact(dict(fresh.state_dict())) == exact(dict(model.state_dict()))
    for part in ("model", "model.2", "optimizer", "ema"):
        with pytest.raises(ckpt.MissingError, match=r"model\.0, model\.1"):
            ckpt.merge(tmp_path / "saved", tmp_path / "none.safetensors", part=part)


@pytest.mark.parametrize("part", ["optimizer", "ema", "model.1"])
def test_a_folder_of_safetensors_has_no_part_but_the_model(tmp_path: Path, part: str) -> None:
    (tmp_path / "saved").mkdir()
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "saved/model.safetensors")
    with pytest.raises(ckpt.MissingError, match=f"no part '{part}'"):
        ckpt.merge(tmp_path / "saved", tmp_path / "out.safetensors", part=part)
    with pytest.raises(ckpt.MissingError, match=f"no part '{part}'"):
        ckpt.load_model(tmp_path / "saved", nn.Linear(2, 2), part=part)


def test_a_folder_with_pytorch_model_bin_is_loaded(tmp_path: Path) -> None:
    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    ckpt.load_model(tmp_path, fresh)
    assert exact(dict(fresh.state_dict())) == exact(dict(model.state_dict()))


def test_a_model_on_the_meta_device_gets_memory_and_values(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        fresh = nn.Linear(2, 2)
    ckpt.load_model(tmp_path / "model.safetensors", fresh)
    assert exact(dict(fresh.state_dict())) == exact(dict(model.state_dict()))
    with torch.device("meta"):
        larger = nn.ModuleDict({"other": nn.Linear(2, 2)})
    with pytest.raises(ckpt.MismatchError, match="meta device"):
        ckpt.load_model(tmp_path / "model.safetensors", larger, strict=False)


class Buffer(nn.Module):
    """A model with one buffer."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (torch.int64, torch.uint8),
        (torch.float32, torch.int64),
        (torch.complex64, torch.float32),
        (torch.int64, torch.bool),
    ],
)
def test_values_that_another_dtype_cannot_hold_are_a_mismatch(
    tmp_path: Path, there: torch.dtype, here: torch.dtype
) -> None:
    torch.save(Buffer(torch.ones(2, dtype=there)).state_dict(), tmp_path / "saved.pt")
    model = Buffer(torch.zeros(2, dtype=here))
    with pytest.raises(ckpt.MismatchError, match="value: dtype"):
        ckpt.load_model(tmp_path / "saved.pt", model)
    assert "value" in ckpt.load_model(tmp_path / "saved.pt", model, strict=False)
    assert not model.value.any()  # type: ignore[operator]


def test_rounding_is_told_and_a_wider_dtype_is_not_worth_a_word(tmp_path: Path) -> None:
    torch.save(Buffer(torch.tensor([0.1])).state_dict(), tmp_path / "saved.pt")
    assert "rounded from float32 to bfloat16" in str(
        ckpt.load_model(tmp_path / "saved.pt", Buffer(torch.zeros(1, dtype=torch.bfloat16)))
    )
    assert ckpt.load_model(tmp_path / "saved.pt", Buffer(torch.zeros(1, dtype=torch.float64))) == {}


class Head(nn.Module):
    """An embedding and a head, tied or not."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_weights_that_are_tied_here_and_differ_there_are_a_mismatch(tmp_path: Path) -> None:
    apart = Head(tied=False)
    torch.save(apart.state_dict(), tmp_path / "saved.pt")
    with pytest.raises(ckpt.MismatchError, match=r"head\.weight: its values there differ from those of embed\.weight"):
        ckpt.load_model(tmp_path / "saved.pt", Head(tied=True))
    apart.head.weight.data.copy_(apart.embed.weight.data)  # equal, though saved twice
    torch.save(apart.state_dict(), tmp_path / "equal.pt")
    assert ckpt.load_model(tmp_path / "equal.pt", Head(tied=True)) == {}


class Counting(nn.Linear):
    """A layer with state that is no tensor."""

    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def test_state_that_is_no_tensor_is_named_where_it_is_not_loaded(tmp_path: Path) -> None:
    torch.save(Counting(2, 2).state_dict(), tmp_path / "saved.pt")
    assert "_extra_state" in ckpt.load_model(tmp_path / "saved.pt", Counting(2, 2))


def test_a_model_whose_own_layer_is_called_module_is_loaded_and_a_removed_prefix_is_told(tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    fresh = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert ckpt.load_model(tmp_path / "saved.pt", fresh) == {}
    assert exact(dict(fresh.state_dict())) == exact(dict(model.state_dict()))
    said = ckpt.convert(tmp_path / "saved.pt", tmp_path / "out.pt", to="torch")
    assert "'module.' in the names of model" in said.skipped
