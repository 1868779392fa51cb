"""One folder, one answer: whatever is asked what a folder holds says the same, or refuses it with the same words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckpt
from ckpt.cli.main import main
from tests.helpers.zero_files import model_states, weights, write_save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
ADAM = {"step": 3, "exp_avg": weights(1), "exp_avg_sq": weights(2)}
NEW, OLD = weights(), {name: tensor + 100 for name, tensor in weights().items()}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 4)
        self.bias = nn.Parameter(torch.zeros(5))


def net(values: dict[str, torch.Tensor]) -> Net:
    model = Net()
    model.load_state_dict(values)
    return model


def deepspeed(folder: Path) -> None:
    write_save(folder, 2, inner=ADAM)


def deepspeed_with_a_tracker_of_megatron(folder: Path) -> None:
    folder.mkdir()
    write_save(folder / "global_step5", 2, inner=ADAM)
    (folder / "latest").write_text("global_step5")
    (folder / "latest_checkpointed_iteration.txt").write_text("5")


def dcp(folder: Path) -> None:
    save_dcp({"model": NEW}, checkpoint_id=folder)


def fsdp_of_accelerate(folder: Path) -> None:
    save_dcp({"model": NEW}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    torch.save({"step": 0}, folder / "random_states_0.pkl")


def trainer_under_deepspeed(folder: Path) -> None:
    deepspeed_with_a_tracker_of_megatron(folder)
    (folder / "latest_checkpointed_iteration.txt").unlink()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 5, "epoch": 1.0}))


def adapter(folder: Path) -> None:
    folder.mkdir()
    save_file(NEW, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


def root(folder: Path) -> None:
    with ckpt.StateManager(folder, model=net(NEW)) as manager:
        manager.save_state("x")


def checkpoint(folder: Path) -> None:
    root(folder.parent / "run")
    (folder.parent / "run" / "x").rename(folder)


def checkpoint_without_a_manifest(folder: Path) -> None:
    checkpoint(folder)
    for path in folder.glob("manifest*"):
        path.unlink()


def shards(folder: Path) -> None:
    folder.mkdir()
    save_file(NEW, folder / "all.safetensors")
    ckpt.merge(folder, folder / "model.safetensors", max_shard_size=40)
    (folder / "all.safetensors").unlink()


def old_pickle(folder: Path) -> None:
    folder.mkdir()
    torch.save(NEW, folder / "pytorch_model.bin")


Answer = dict[str, Any] | str


def answers(folder: Path, scratch: Path, **chosen: Any) -> dict[str, Answer]:
    """What every entry point takes from a folder: its weights, or why it refuses it."""

    def merged() -> Answer:
        (written,) = ckpt.merge(folder, scratch / "merged.safetensors", **chosen)
        return load_file(written)

    def loaded() -> Answer:
        model = Net()
        ckpt.load_model(folder, model, strict=False, **chosen)  # DeepSpeed's has a buffer more
        return model.state_dict()

    def converted() -> Answer:
        ckpt.convert(folder, scratch / "converted", to="hf", **chosen)
        return load_file(scratch / "converted" / "model.safetensors")

    def compared() -> Answer:
        save_file(NEW, scratch / "new.safetensors")
        differs = {each.name for each in ckpt.diff(folder, scratch / "new.safetensors", **chosen).differences}
        return {name: OLD[name] if f"model.{name}" in differs else NEW[name] for name in NEW}

    return {ask.__name__: answer(ask) for ask in (merged, loaded, converted, compared)}


def answer(ask: Callable[[], Answer]) -> Answer:
    try:
        found = ask()
    except ckpt.CkptError as error:
        return f"{type(error).__name__}: {error}"
    assert isinstance(found, dict)
    return {name: found[name].float().tolist() for name in NEW}  # of a buffer that a model has not, nothing


def agreed(found: dict[str, Answer]) -> Answer:
    assert len({str(each) for each in found.values()}) == 1, found
    return next(iter(found.values()))


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


@pytest.mark.parametrize(
    "write", [deepspeed, deepspeed_with_a_tracker_of_megatron, dcp, fsdp_of_accelerate, checkpoint, shards, old_pickle]
)
def test_every_entry_point_reads_the_same_weights(write: Callable[[Path], None], tmp_path: Path, scratch: Path) -> None:
    write(tmp_path / "saved")
    assert agreed(answers(tmp_path / "saved", scratch)) == answer(lambda: NEW)


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (deepspeed, "deepspeed (mp_rank_00_model_states.pt)"),
        (deepspeed_with_a_tracker_of_megatron, "deepspeed (global_step5/)"),
        (dcp, "dcp ("),
        (adapter, "peft (adapter_model.safetensors)"),
        (root, "root (x/)"),
        (fsdp_of_accelerate, "has files of two saves"),
        (shards, "model.safetensors.index.json or "),
    ],
)
def test_an_older_model_beside_it_is_never_taken_in_silence(
    write: Callable[[Path], None], told: str, tmp_path: Path, scratch: Path
) -> None:
    write(tmp_path / "saved")
    save_file(OLD, tmp_path / "saved" / "model.safetensors")
    refusal = str(agreed(answers(tmp_path / "saved", scratch)))
    assert refusal.startswith("ConfigError")
    assert "model.safetensors" in refusal
    assert told in refusal
    assert write in (fsdp_of_accelerate, shards) or "format='hf'" in refusal


def test_an_option_chooses_between_two_formats(tmp_path: Path, scratch: Path) -> None:
    deepspeed(tmp_path / "saved")
    save_file(OLD, tmp_path / "saved" / "model.safetensors")
    assert agreed(answers(tmp_path / "saved", scratch, format="hf")) == answer(lambda: OLD)
    (scratch / "converted").rename(tmp_path / "of-hf")
    assert agreed(answers(tmp_path / "saved", scratch, format="deepspeed")) == answer(lambda: NEW)


def test_a_format_that_it_is_not_and_one_that_there_is_not_are_refused(tmp_path: Path, scratch: Path) -> None:
    dcp(tmp_path / "saved")
    assert "format='zip' is not a format " in str(agreed(answers(tmp_path / "saved", scratch, format="zip")))
    found = answers(tmp_path / "saved", scratch, format="deepspeed")
    assert found.pop("compared") == answer(lambda: NEW)  # the option may be for the other side
    assert "is not in the format deepspeed, but in dcp" in str(agreed(found))


def test_what_the_trainer_wrote_beside_its_engine_is_one_save(tmp_path: Path, scratch: Path) -> None:
    trainer_under_deepspeed(tmp_path / "saved")
    rounded = {name: tensor.bfloat16() for name, tensor in model_states()["module"].items()}
    save_file(rounded, tmp_path / "saved" / "model.safetensors")
    assert agreed(answers(tmp_path / "saved", scratch)) == answer(lambda: NEW)


def test_a_manifest_says_what_belongs_to_its_checkpoint_whatever_lies_beside_it(tmp_path: Path, scratch: Path) -> None:
    checkpoint(tmp_path / "saved")
    torch.save({"step": 0}, tmp_path / "saved" / "random_states_0.pkl")
    torch.save(OLD, tmp_path / "saved" / "pytorch_model.bin")
    assert agreed(answers(tmp_path / "saved", scratch)) == answer(lambda: NEW)


def test_a_checkpoint_that_lost_its_manifest_is_no_folder_of_weights(tmp_path: Path, scratch: Path) -> None:
    checkpoint_without_a_manifest(tmp_path / "saved")
    for entry, found in answers(tmp_path / "saved", scratch).items():
        assert "has lost manifest.json" in str(found), entry


def test_what_knows_only_checkpoints_of_ours_takes_them_from_a_root_with_a_model_beside(tmp_path: Path) -> None:
    root(tmp_path / "run")
    save_file(OLD, tmp_path / "run" / "model.safetensors")
    assert ckpt.verify(tmp_path / "run") == {"x": []}
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    ckpt.pull(tmp_path / "run", tmp_path / "copy")
    assert ckpt.verify(tmp_path / "copy") == {"x": []}
    assert ckpt.load_model(tmp_path / "copy", model := Net()) == {}
    assert answer(model.state_dict) == answer(lambda: NEW)


@pytest.mark.parametrize("command", ["merge", "convert", "diff", "push"])
def test_every_command_that_refuses_two_formats_has_the_option_that_chooses(command: str) -> None:
    assert "--format" in CliRunner().invoke(main, [command, "--help"]).output
