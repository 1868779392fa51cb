"""What DeepSpeed wrote becomes a checkpoint of ours with its optimizer, or is refused by one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from tests.helpers.training import exact
from tests.helpers.zero_files import HYPER, model_states, weights, write_save

ADAM = {"exp_avg": weights(100.5), "exp_avg_sq": weights(200.25), "step": torch.tensor(7.0)}


class Net(nn.Module):
    """With the names of the folders."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 4)
        self.bias = nn.Parameter(torch.zeros(5))
        self.register_buffer("seen", torch.zeros(2))


def _loaded(root: Path, name: str) -> tuple[Net, torch.optim.AdamW, ckpt.Restored]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    with ckpt.StateManager(root, model=net, optimizer=optimizer) as manager:
        restored = manager.load_state(name)
    return net, optimizer, restored


def _moments(net: Net, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    return {name: dict(optimizer.state[parameter]) for name, parameter in net.named_parameters()}


@pytest.mark.parametrize(
    ("stage", "world_size", "paddings"),
    [(stage, ranks, ()) for stage in (1, 2, 3) for ranks in (1, 2, 3, 5)] + [(1, 2, (4, 3)), (2, 3, (1, 6))],
)
def test_state_of_any_number_of_ranks_is_cut_into_parameters(
    tmp_path: Path, stage: int, world_size: int, paddings: tuple[int, ...]
) -> None:
    folder = write_save(tmp_path / "save", stage, world_size, ADAM, paddings, global_steps=9, skipped_steps=2)
    ckpt.convert(folder, tmp_path / "root")
    net, optimizer, restored = _loaded(tmp_path / "root", "save")
    wanted = {name: {key: value[name] if isinstance(value, dict) else value for key, value in ADAM.items()} for name in
              weights()}  # fmt: skip
    found = _moments(net, optimizer)
    assert {name: exact(dict(sorted(found[name].items()))) for name in found} == {
        name: exact(dict(sorted(wanted[name].items()))) for name in ("bias", "embed.weight")
    }
    assert exact(net.state_dict()) == exact({**weights(), "seen": torch.ones(2)})
    assert restored.step == 7
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_steps_are_each_parameters_own_also_where_a_group_counted_them(tmp_path: Path) -> None:
    groups = [{**HYPER, "step": 4, "params": [0]}]  # as fused optimizers do
    moments = {key: ADAM[key] for key in ("exp_avg", "exp_avg_sq")}
    ckpt.convert(write_save(tmp_path / "save", 2, 2, {**moments, "param_groups": groups}), tmp_path / "root")
    net, optimizer, _ = _loaded(tmp_path / "root", "save")
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [float(state["step"]) for state in optimizer.state.values()] == [5.0, 5.0]
    assert "step" not in optimizer.param_groups[0]


def test_what_is_not_taken_is_named(tmp_path: Path) -> None:
    more: dict[str, Any] = {"lr_scheduler": {"last_epoch": 3}, "best": 0.5, "data_sampler": None}
    converted = ckpt.convert(write_save(tmp_path / "save", 1, 2, ADAM, **more), tmp_path / "root")
    assert converted.skipped.keys() == {"lr_scheduler", "best"}
    assert "give the manager a scheduler" in str(converted)
    assert converted.approximated.keys() == {"progress", "rng"}
    again = ckpt.convert(tmp_path / "root" / "save", tmp_path / "out", to="accelerate")
    assert again.skipped["rng"] == "the source has none: Accelerate leaves the generators as they are"
    returned = ckpt.convert(tmp_path / "out", tmp_path / "root")
    assert "rng" not in returned.parts
    assert "no random generators" in returned.approximated["rng"]


def test_without_zero_the_optimizer_goes_by_the_order_of_parameters(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.125)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    (tmp_path / "save").mkdir()
    states = {"module": net.state_dict(), "param_shapes": None, "optimizer": optimizer.state_dict()}
    torch.save(model_states(**states), tmp_path / "save" / "mp_rank_00_model_states.pt")
    ckpt.convert(tmp_path / "save", tmp_path / "root")
    again, other, _ = _loaded(tmp_path / "root", "save")
    assert exact(other.state_dict()) == exact(optimizer.state_dict())
    assert exact(again.state_dict()) == exact(net.state_dict())


REFUSED = {
    "a matrix": ({**ADAM, "shampoo": torch.ones(3, 3)}, "shampoo does not have one value per element"),
    "too few": ({**ADAM, "exp_avg": torch.ones(1)}, "exp_avg does not have one value per element"),
    "other groups": (
        {**ADAM, "param_groups": [{"params": [0, 1]}]},
        "2 partitions of an optimizer for 1 parameter groups",
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_state_that_no_parameter_has_by_itself_is_refused(tmp_path: Path, how: str) -> None:
    inner, why = REFUSED[how]
    with pytest.raises(ckpt.UnsupportedError, match=f"{why}.*To read only the model, use ckpt.merge") as caught:
        ckpt.convert(write_save(tmp_path / "save", 2, 2, inner), tmp_path / "root")
    assert len(str(caught.value).splitlines()) == 1
    assert ckpt.list_checkpoints(tmp_path / "root") == []
    assert ckpt.merge(tmp_path / "save", tmp_path / "model.safetensors")


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_alone_lacks_is_damage(tmp_path: Path, rank: int) -> None:
    folder = write_save(tmp_path / "save", 2, 2, ADAM)
    path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    states = torch.load(path)
    del states["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
    torch.save(states, path)
    with pytest.raises(ckpt.DamagedError, match=r"rank 1's optimizer has .*, but rank 0's"):
        ckpt.convert(folder, tmp_path / "root")


@pytest.mark.parametrize("inner", [[{"step": 1}], None, {"optimizer_state_dict": {}}])
def test_an_optimizer_in_another_form_is_refused(tmp_path: Path, inner: Any) -> None:
    folder = write_save(tmp_path / "save", 2, 1)
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    states = torch.load(path)
    states["optimizer_state_dict"]["base_optimizer_state"] = inner
    torch.save(states, path)
    with pytest.raises(ckpt.UnsupportedError, match="which ckpt can't read"):
        ckpt.convert(folder, tmp_path / "root")


def test_the_commands_that_know_only_checkpoints_of_ours_say_what_reads_it(tmp_path: Path) -> None:
    folder = write_save(tmp_path / "run", 2, 2, ADAM)
    for command in ("ls", "verify"):
        result = CliRunner().invoke(main, [command, str(folder)])
        assert "It was written by DeepSpeed: ckpt convert, ckpt merge" in result.output, command
    for name in ("common.pt", "notes.txt"):  # of which the first alone says nothing
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
        assert "written by" not in CliRunner().invoke(main, ["ls", str(tmp_path / name)]).output
    assert "There is no difference." in CliRunner().invoke(main, ["diff", str(folder), str(folder)]).output
    converted = CliRunner().invoke(main, ["convert", str(folder), str(tmp_path / "root"), "--name", "taken"])
    assert "root/taken: model, optimizer" in converted.output
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "root")])
    assert "converted from deepspeed" in shown.output
