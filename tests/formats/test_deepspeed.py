"""What DeepSpeed itself wrote is read without it: master weights, buffers and tied parameters, bit for bit."""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from tests.helpers.format_pairs import KEEPS_THE_OPTIMIZER, TARGETS, Triple, difference, known
from tests.helpers.processes import run_alone, run_ranks
from tests.helpers.training import exact
from tests.helpers.zero_files import model_states, weights, write_save, zero_states

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def _read_as_deepspeed_does(rank: int, folder: str) -> None:
    """Beside every folder what `zero_to_fp32` makes of it, and a universal one."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.checkpoint.ds_to_universal import main
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from tests.helpers.zero_folders import TAG

    for save in sorted(Path(folder).iterdir()):
        if save.name != "fp32-gradients":  # their own tool does not know it
            torch.save(get_fp32_state_dict_from_zero_checkpoint(str(save)), f"{save}.pt")
        given = {"input_folder": f"{save}/{TAG}", "output_folder": f"{save}-universal/{TAG}_universal"}
        fixed = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        main(Namespace(**given, **fixed, inject_missing_state=True))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.helpers.zero_folders import WORLD_SIZE, write_folders

    folder = tmp_path_factory.mktemp("written")
    assert run_ranks(WORLD_SIZE, write_folders, str(folder)) == [0] * WORLD_SIZE
    assert run_alone(_read_as_deepspeed_does, str(folder)) == 0
    return folder


@pytest.mark.slow
@needs_deepspeed
def test_what_deepspeed_wrote_is_merged_and_loaded_as_its_own_tool_reads_it(written: Path, tmp_path: Path) -> None:
    from tests.helpers.engines import build
    from tests.helpers.zero_folders import STAGES, TAG

    for stage in STAGES:
        theirs = torch.load(written / f"zero-{stage}.pt")
        for number, save in enumerate((f"zero-{stage}", f"zero-{stage}/{TAG}", f"zero-{stage}-universal")):
            ckpt.merge(written / save, tmp_path / f"{stage}-{number}.safetensors")
            ours = load_file(tmp_path / f"{stage}-{number}.safetensors")
            frozen = theirs.get("frozen", ours["frozen"]).float()  # their own tool loses it under ZeRO 1
            same = {"head.weight": ours["words.weight"], "frozen": ours["frozen"].float()}
            assert exact({**ours, **same}) == exact({**theirs, "frozen": frozen}), save
        net = build()
        assert not ckpt.load_model(written / f"zero-{stage}", net)
        assert exact(net.state_dict()) == exact({**theirs, "frozen": frozen})


def _universal(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What DeepSpeed's own tool made of a save: the tensors of every parameter by kind."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for path in sorted(folder.glob("*/zero/*/*.pt")):
        value = torch.load(path)
        found.setdefault(path.parent.name, {})[path.stem] = value["param"] if isinstance(value, dict) else value
    return found


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("case", ["zero-1", "zero-2", "zero-3", "fp32-gradients"])
def test_converted_a_plain_optimizer_continues_from_every_bit_that_deepspeed_held(
    written: Path, tmp_path: Path, case: str
) -> None:
    from tests.helpers.engines import build
    from tests.helpers.zero_folders import groups_of

    theirs = _universal(written / f"{case}-universal")
    for source in (case, f"{case}-universal"):
        converted = ckpt.convert(written / source, tmp_path)
        assert converted.parts == ("model", "optimizer")
        assert converted.skipped.keys() == {"client"}
        net = build().float()
        optimizer = torch.optim.AdamW(groups_of(net), lr=0.5)
        with ckpt.StateManager(tmp_path, model=net, optimizer=optimizer) as manager:
            before = torch.get_rng_state()
            restored = manager.load_state(source)
            assert torch.equal(torch.get_rng_state(), before)
            assert restored.approximated.keys() == {"progress", "rng"}
            assert (restored.step, "rng" in restored.restored) == (2, False)
        named = {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}
        assert len(optimizer.state) == len(named) == 4
        for name, parameter in named.items():
            state = optimizer.state[parameter]
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
            shaped = {key: theirs[name][key].reshape(parameter.shape) for key in ("exp_avg", "exp_avg_sq", "fp32")}
            assert state["exp_avg"].abs().sum() > 0
            assert exact({**state, "fp32": parameter.detach()}) == exact({**shaped, "step": torch.tensor(2.0)})
        rates = [(group["lr"], group["weight_decay"], group["betas"]) for group in optimizer.param_groups]
        assert rates == [(0.01, 0.01, (0.9, 0.999)), (0.01, 0.0, (0.9, 0.999))]
        net(torch.arange(4) % 7, torch.ones(4)).backward()
        optimizer.step()
        assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_every_stage_is_converted_to_every_format_in_every_bit(written: Path, target: str, tmp_path: Path) -> None:
    from tests.helpers.engines import build
    from tests.helpers.zero_folders import STAGES, groups_of

    def parts() -> Triple:
        net = build()
        return net, torch.optim.AdamW(groups_of(net), lr=0.5), None

    for save in (*(f"zero-{stage}" for stage in STAGES), "zero-3-universal"):
        ckpt.convert(written / save, tmp_path / "root", name=save)
        model, optimizer, _ = parts()
        with ckpt.StateManager(tmp_path / "root", model=model, optimizer=optimizer) as manager:
            manager.load_state(save)  # as the test before this one compares it with DeepSpeed's own
        saved = known(written / save, (model, optimizer, None), build=parts, step=2, named=True)
        found = TARGETS[target](saved, tmp_path / f"{save}-out")
        assert difference(saved, found, whole=target in KEEPS_THE_OPTIMIZER) == []


@pytest.mark.slow
@needs_deepspeed
def test_a_model_that_zero_3_divided_gives_the_same_logits_in_transformers(written: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    from tests.helpers.zero_folders import llama, words

    model: Any = llama()
    ckpt.merge(written / "llama", tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    model.load_state_dict(torch.load(written / "llama.pt"))
    merged = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert exact(merged(words()).logits) == exact(model(words()).logits)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_partitions_of_any_number_of_ranks_are_put_together(tmp_path: Path, stage: int, world_size: int) -> None:
    folder = write_save(tmp_path / "save", stage, world_size)
    ckpt.merge(folder, tmp_path / "model.safetensors")
    assert exact(load_file(tmp_path / "model.safetensors")) == exact({**weights(), "seen": torch.ones(2)})


@pytest.mark.parametrize("stage", [1, 2])
def test_the_padding_behind_a_parameter_is_no_part_of_it_or_of_the_next(tmp_path: Path, stage: int) -> None:
    folder = write_save(tmp_path / "save", stage, 3, paddings=[4, 3])
    ckpt.merge(folder, tmp_path / "model.safetensors")
    assert exact(load_file(tmp_path / "model.safetensors")) == exact({**weights(), "seen": torch.ones(2)})


def test_without_zero_the_model_is_read_as_it_was_saved(tmp_path: Path) -> None:
    states = model_states(param_shapes=None)
    torch.save(states, tmp_path / "mp_rank_00_model_states.pt")
    ckpt.merge(tmp_path, tmp_path / "model.safetensors")
    assert exact(load_file(tmp_path / "model.safetensors")) == exact({**states["module"], "seen": torch.ones(2)})


class _Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def _spoilt(folder: Path, how: str) -> None:
    optimizer, model = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt", folder / "mp_rank_00_model_states.pt"
    if how == "a rank is missing":
        optimizer.unlink()
    elif how == "no rank is there":
        for path in folder.glob("*_optim_states.pt"):
            path.unlink()
    elif how == "shapes are too large":
        torch.save(model_states(param_shapes=[{"bias": torch.Size((1 << 40,))}]), model)
    elif how == "shapes are no sizes":
        torch.save(model_states(param_shapes=[{"bias": [-1, 5]}]), model)
    elif how == "a partition is short":
        torch.save(zero_states(2, torch.zeros(2), 2), optimizer)
    elif how == "a partition is long":
        torch.save(zero_states(2, torch.zeros(40), 2), optimizer)
    elif how == "a partition is no tensor":
        torch.save(zero_states(2, "none", 2), optimizer)  # type: ignore[arg-type]
    elif how == "it would run code":
        torch.save(model_states(client=_Runs()), model)
    elif how == "it is no archive":
        model.write_bytes(b"\x80\x02}q\x00.")
    elif how == "a parameter has no place":
        torch.save(model_states(param_shapes=[], module={}, shared_params={"tied": "embed"}), model)


SPOILT = {
    "a rank is missing": "of 1 ranks, but 2 ranks wrote the save",
    "no rank is there": "of 0 ranks, but several ranks wrote the save",
    "shapes are too large": "but its parameters have 1099511627776",
    "shapes are no sizes": "a size or offset can't be -1",
    "a partition is short": "but its parameters have 17",
    "a partition is long": "has 49 elements, but its parameters have 17",
    "a partition is no tensor": "expected a tensor, found a str",
    "it would run code": r"names 'posix.mkdir'.*ckpt did not execute it",
    "it is no archive": "has no valid data of torch.save",
    "a parameter has no place": "partitions of 1 parameter groups",
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_damaged_save_is_refused_by_one_error(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_save(tmp_path / "save", 2)
    _spoilt(folder, how)
    with pytest.raises(ckpt.DamagedError, match=SPOILT[how]):
        ckpt.merge(folder, tmp_path / "model.safetensors")
    assert not Path("executed").exists()


def test_what_latest_names_is_read_and_nothing_outside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_save(tmp_path / "run" / "step", 3)
    (tmp_path / "run" / "latest").write_text("step\n")
    assert ckpt.merge(tmp_path / "run", tmp_path / "model.safetensors")
    write_save(tmp_path / "outside", 3)
    (tmp_path / "run" / "latest").write_text("../outside")
    with pytest.raises(ckpt.MissingError, match=r"latest names '../outside', but DeepSpeed saved nothing"):
        ckpt.merge(tmp_path / "run", tmp_path / "other.safetensors")


@pytest.mark.parametrize("more", ["mp_rank_01_model_states.pt", "layer_03-model_00-model_states.pt"])
def test_other_parallelism_of_deepspeed_is_refused_by_name(tmp_path: Path, more: str) -> None:
    folder = write_save(tmp_path / "save", 1)
    torch.save(model_states(), folder / more)
    with pytest.raises(ckpt.UnsupportedError, match=r"pipeline, tensor or expert parallelism.*save_16bit_model"):
        ckpt.merge(folder, tmp_path / "model.safetensors")
    with pytest.raises(ckpt.MissingError, match="it reads only the model"):
        ckpt.merge(write_save(tmp_path / "other", 1), tmp_path / "model.safetensors", part="optimizer")
