"""`ckpt diff`: what two checkpoints have differently."""

from __future__ import annotations

import json
import math
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckpt
from ckpt.cli.main import main
from ckpt.formats.layout import Box
from ckpt.storage import LocalStorage
from ckpt.tools import diff as comparing
from tests.cli.test_main import flip_a_bit
from tests.helpers.processes import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(60, 50)
        self.second = nn.Linear(50, 4, dtype=torch.bfloat16)
        self.count = nn.Buffer(torch.tensor(3))


def save(root: str | Path, name: str, model: nn.Module, momentum: float = 0.9, seed: int = 1) -> str:
    torch.manual_seed(seed)  # the generators are compared too
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.save_state(name, wait=True)
    return f"{root}/{name}"


def diff(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["diff", *map(str, arguments)])


@pytest.fixture
def first(tmp_path: Path) -> str:
    return save(tmp_path / "first", "a", Net())


def other(tmp_path: Path, model: nn.Module, momentum: float = 0.9) -> str:
    return save(tmp_path / "other", "b", model, momentum)


def test_the_same_state_has_no_difference_and_is_not_read(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = other(tmp_path, Net())
    read = []
    original = LocalStorage.read_into

    def noted(self: LocalStorage, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        read.append(key)
        original(self, key, start, *buffers, again=again)

    monkeypatch.setattr(LocalStorage, "read_into", noted)
    result = diff(first, again)
    assert (result.exit_code, result.output) == (0, "There is no difference.\n")
    assert not [key for key in read if key.endswith(".safetensors")]


@torch.no_grad()
def test_each_tensor_says_how_many_elements_differ_and_by_how_much(first: str, tmp_path: Path) -> None:
    model = Net()
    model.first.weight[3, :7] += 0.5
    model.second.bias[1] = math.nan
    model.count.fill_(7)
    found = ckpt.diff(first, other(tmp_path, model))
    assert {d.name: (d.elements, d.most) for d in found.differences if d.name != "model.second.bias"} == {
        "model.first.weight": (7, pytest.approx(0.5)),
        "model.count": (1, 4.0),
    }
    relative = {d.name: d.relative for d in found.differences}
    assert relative["model.count"] == pytest.approx(4 / 3)
    assert relative["model.first.weight"] == pytest.approx(math.sqrt(7 * 0.25) / Net().first.weight.norm().item())
    assert math.isnan(relative["model.second.bias"] or 0.0)
    (bias,) = (d for d in found.differences if d.name == "model.second.bias")
    assert bias.elements == 1
    assert math.isnan(bias.most or 0.0)


@torch.no_grad()
def test_a_bit_that_changes_no_number_is_a_difference(first: str, tmp_path: Path) -> None:
    model = Net()
    zero, negative = nn.Parameter(torch.zeros(4)), nn.Parameter(-torch.zeros(4))
    model.extra = zero
    first = save(tmp_path / "zero", "a", model)
    model.extra = negative
    (found,) = ckpt.diff(first, save(tmp_path / "negative", "a", model), part="model").differences
    assert (found.name, found.elements, found.most) == ("model.extra", 4, 0.0)


def test_shapes_dtypes_and_names_in_one_only(first: str, tmp_path: Path) -> None:
    model = Net()
    model.first = nn.Linear(60, 51)
    model.second = model.second.float()
    model.third = nn.Linear(1, 1, bias=False)
    del model.count
    rows = {d.name: d for d in ckpt.diff(first, other(tmp_path, model), part="model").differences}
    assert (rows["model.first.weight"].first, rows["model.first.weight"].second) == (
        "float32 [50, 60]",
        "float32 [51, 60]",
    )
    assert rows["model.count"].second == "-"
    assert rows["model.third.weight"].first == "-"
    assert rows["model.second.weight"].second == "float32 [4, 50]"
    assert rows["model.second.weight"].elements == 0  # the same numbers, in another dtype


def test_values_differ_by_their_path(first: str, tmp_path: Path) -> None:
    result = diff(first, other(tmp_path, Net(), momentum=0.8))
    assert re.search(r"(?m)^optimizer\.state\.param_groups\.0\.momentum +0\.9 +0\.8$", result.output)
    assert result.exit_code == 1
    assert result.output.splitlines()[:3] == [f"first   {first}", f"second  {tmp_path}/other/b", ""]
    assert len(result.output.splitlines()) == 5


def test_generators_differ_in_one_line_each(first: str, tmp_path: Path) -> None:
    (found,) = ckpt.diff(first, save(tmp_path / "other", "b", Net(), seed=2)).differences
    assert found.name == "rank-00000.rng.torch"


def _save_sharded(rank: int, root: str) -> None:
    model = Net()
    for layer in (model.first, model.second):
        fully_shard(layer)
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("a", wait=True)


@pytest.mark.slow
def test_how_it_is_laid_out_makes_no_difference(first: str, tmp_path: Path, s3: str) -> None:
    assert run_ranks(2, _save_sharded, str(tmp_path / "sharded")) == [0, 0]
    assert (tmp_path / "sharded" / "a" / "model" / "00001.safetensors").exists()
    assert not ckpt.diff(first, tmp_path / "sharded" / "a", part="model")
    ckpt.merge(first, f"{s3}/model.safetensors")
    assert diff(first, s3).exit_code == 0


def test_json_for_other_programs(first: str, tmp_path: Path) -> None:
    result = diff(first, other(tmp_path, Net(), momentum=0.8), "--json")
    (found,) = json.loads(result.stdout)["differences"]
    assert found == {
        "name": "optimizer.state.param_groups.0.momentum", "first": "0.9", "second": "0.8",
        "elements": None, "most": None, "relative": None,
    }  # fmt: skip


@torch.no_grad()
def test_numbers_that_json_has_not_are_text(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    model.bias.zero_()
    first = save(tmp_path / "first", "a", model)
    model.bias.add_(1)
    (found,) = json.loads(diff(first, other(tmp_path, model), "--json", "--part", "model").stdout)["differences"]
    assert (found["most"], found["relative"]) == (1.0, "inf")


class Deep(nn.Module):
    """Numbered blocks with names of their own, one of them longer than a line."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(12))
        self.add_module("projection_" * 9, nn.Linear(4, 4))


@torch.no_grad()
def test_tensors_of_numbered_modules_are_one_line_of_a_table(tmp_path: Path) -> None:
    model = Deep()
    first = save(tmp_path / "first", "a", model)
    for parameter in model.parameters():
        parameter.mul_(1.5)
    model.get_parameter("blocks.3.0.weight")[0, 0] = math.nan
    model.extra = nn.Linear(2, 2)
    second = other(tmp_path, model)
    found = diff(first, second)
    assert found.exit_code == 1
    lines = [line.split() for line in found.output.splitlines()]
    assert ["model.blocks.*.*.weight", "12", "48", "0.5", "50", "%"] in lines
    assert any(line[:2] == ["model.blocks.*.*.weight", "11"] and line[-2:] == ["50", "%"] for line in lines)
    assert ["model.blocks.3.0.weight", "1", "16", "nan", "nan"] in lines
    assert ["only", "in", "the", "second", "tensors", "dtype", "and", "shape"] in lines
    assert ["model.extra.weight", "1", "float32", "[2,", "2]"] in lines
    listed = diff(first, second, "--tensors").output
    assert re.search(r"(?m)^model\.blocks\.7\.0\.weight +1 +16 +\S+ +50 %$", listed)


def test_what_cannot_be_compared_ends_with_2(first: str, tmp_path: Path) -> None:
    other(tmp_path, Net())
    assert diff(first, tmp_path / "nothing").exit_code == 2
    assert ckpt.diff(first, tmp_path / "other").second == f"{tmp_path}/other/b"  # a root stands for its newest
    with torch.no_grad():
        model = Net()
        model.first.weight += 1
    again = save(tmp_path / "damaged", "c", model)
    flip_a_bit(Path(again, "model.safetensors"))
    result = diff(first, again)
    assert result.exit_code == 2
    assert "model.safetensors was altered" in result.output


def test_large_tensors_are_compared_a_slab_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "SLAB", 100)
    read = []

    class Noted(comparing._LiveTensor):
        def read(self, box: Box) -> torch.Tensor:
            read.append(super().read(box))
            return read[-1]

    one, other = torch.arange(300.0).view(30, 10), torch.arange(300.0).view(30, 10).double()
    other[7, 3] += 2
    found = comparing.compare_tensors(*(Noted(value.dtype, value.shape, (), value) for value in (one, other)))
    assert (found.elements, found.most) == (1, 2.0)
    assert max(slab.nbytes for slab in read) <= 100


class TestAModelInThisProcess:
    def test_has_no_difference_to_its_own_checkpoint(self, first: str) -> None:
        found = ckpt.diff(Net(), first)
        assert not found
        assert (found.first, found.second) == ("Net", first)
        assert not ckpt.diff(first, nn.DataParallel(Net()))

    def test_differs_where_it_was_changed(self, first: str) -> None:
        model = Net()
        with torch.no_grad():
            model.first.weight[3, 5] += 1
        (change,) = ckpt.diff(first, model).differences
        assert (change.name, change.elements) == ("model.first.weight", 1)
        assert change.most == pytest.approx(1.0)

    def test_with_tied_weights_is_the_same_under_every_name(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
        model[1].weight = model[0].weight
        assert not ckpt.diff(model, save(tmp_path / "tied", "a", model))

    def test_that_is_sharded_is_refused_though_not_all_of_it_is(self) -> None:
        model = Net()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        try:
            fully_shard(model.second)
            with pytest.raises(ckpt.UnsupportedError), ExitStack() as held:
                comparing._LiveSide(model).tensors("model", held)
        finally:
            dist.destroy_process_group()

    def test_is_compared_with_the_part_that_is_asked_for(self, tmp_path: Path) -> None:
        teacher, student = Net(), nn.Linear(2, 2)
        with ckpt.StateManager(tmp_path / "two", model={"teacher": teacher, "student": student}) as manager:
            manager.save_state("a", wait=True)
        assert not ckpt.diff(teacher, tmp_path / "two" / "a", part="model.teacher")
        assert ckpt.diff(teacher, tmp_path / "two" / "a", part="model.student")
        with pytest.raises(ckpt.MissingError, match=r"has no part 'model'. It has: model.student, model.teacher"):
            ckpt.diff(teacher, tmp_path / "two" / "a")
