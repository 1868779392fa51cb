"""Models of Transformers and PEFT keep their configuration through a conversion: `from_pretrained` builds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.helpers.training import exact

pytestmark = pytest.mark.filterwarnings("ignore")


def gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8))


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(gpt(), LoraConfig(r=2, target_modules=["c_attn"]))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def saved(root: Path, model: nn.Module) -> Path:
    with ckpt.StateManager(root, model=model) as manager:
        manager.resume()
        manager.save_state("one")
    return root / "one"


def test_from_pretrained_builds_the_model_of_a_checkpoint_of_ours(tmp_path: Path) -> None:
    model = gpt()
    said = ckpt.convert(saved(tmp_path / "root", model), tmp_path / "out", to="hf")
    assert "config.json" not in said.skipped
    again = type(model).from_pretrained(tmp_path / "out")
    assert again.config.n_head == 2
    assert exact(dict(again.state_dict())) == exact(dict(model.state_dict()))


def test_the_configuration_goes_through_a_checkpoint_of_ours_and_other_files_are_named(tmp_path: Path) -> None:
    model = gpt()
    model.save_pretrained(tmp_path / "source")
    (tmp_path / "source/vocab.txt").write_text("a b c")
    said = ckpt.convert(tmp_path / "source", tmp_path / "root")
    assert "vocab.txt" in said.skipped
    ckpt.convert(tmp_path / "root/source", tmp_path / "out", to="hf")
    assert type(model).from_pretrained(tmp_path / "out").config.n_head == 2


def test_without_a_configuration_it_is_said_that_from_pretrained_needs_one(tmp_path: Path) -> None:
    torch.save({"model": nn.Linear(1, 1).state_dict()}, tmp_path / "saved.pt")
    assert "from_pretrained" in ckpt.convert(tmp_path / "saved.pt", tmp_path / "out", to="hf").skipped["config.json"]


@pytest.mark.parametrize("config", ['{"x": NaN}', "[" * 100_000, "[]", '"x'])
def test_a_configuration_that_cannot_be_kept_is_named_and_nothing_is_written(tmp_path: Path, config: str) -> None:
    gpt().save_pretrained(tmp_path / "source")
    (tmp_path / "source/config.json").write_text(config)
    with pytest.raises(ckpt.ConfigError, match=r"config\.json is not (JSON|a configuration: it contains a list)"):
        ckpt.convert(tmp_path / "source", tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_of_a_model_of_peft_the_adapters_are_written_as_peft_reads_them(tmp_path: Path) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    model = adapted()
    said = ckpt.convert(saved(tmp_path / "root", model), tmp_path / "out", to="hf")
    assert "base model" in str(said)
    again = PeftModel.from_pretrained(gpt(), tmp_path / "out")
    assert exact(get_peft_model_state_dict(again)) == exact(get_peft_model_state_dict(model))


def test_an_adapter_alone_is_called_so_and_stays_one(tmp_path: Path) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    model = adapted()
    model.save_pretrained(tmp_path / "source")
    said = ckpt.convert(tmp_path / "source", tmp_path / "root")
    assert "not in the source" in said.approximated["model"]
    ckpt.convert(tmp_path / "root/source", tmp_path / "out", to="hf")
    again = PeftModel.from_pretrained(gpt(), tmp_path / "out")
    assert exact(get_peft_model_state_dict(again)) == exact(get_peft_model_state_dict(model))


def trainer_folder(folder: Path, step: int, epoch: float | None) -> Path:
    gpt().save_pretrained(folder)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": epoch}))
    return folder


@pytest.mark.parametrize("epoch", [0.0, None])
def test_a_trainer_that_has_done_nothing_yet_has_done_no_step(tmp_path: Path, epoch: float | None) -> None:
    ckpt.convert(trainer_folder(tmp_path / "checkpoint-0", 0, epoch), tmp_path / "root")
    (found,) = ckpt.list_checkpoints(tmp_path / "root")
    assert found.step == 0


@pytest.mark.parametrize(("step", "epoch"), [(-1, 1.0), (5, -0.5), (5, float("inf"))])
def test_steps_and_epochs_that_no_trainer_can_have_done_are_damage(tmp_path: Path, step: int, epoch: float) -> None:
    with pytest.raises(ckpt.DamagedError, match="a run can't have"):
        ckpt.convert(trainer_folder(tmp_path / "checkpoint-5", step, epoch), tmp_path / "root")
