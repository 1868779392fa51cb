"""Every refusal is one short error, with the reason and the way out, however many parameters and ranks there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.errors import CkptError, MismatchError
from ckpt.ranks.consensus import Result, SingleProcess, decide_together
from ckpt.ranks.store_and_heartbeats import format_ranks
from tests.helpers.processes import run_alone, run_ranks

MOST = 10  # lines
LAYERS = 100  # each with two parameters


def _model(width: int = 2, prefix: str = "layer") -> nn.Module:
    model = nn.Module()
    for number in range(LAYERS):
        model.add_module(f"{prefix}{number}", nn.Linear(2, width))
    return model


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


class _Values:
    def state_dict(self) -> dict[str, Any]:
        return {f"callback{number}": print for number in range(200)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def _manager(root: Path, model: nn.Module, **more: Any) -> ckpt.StateManager:
    return ckpt.StateManager(root, model=model, ranks=ckpt.RankOptions(timeout=60), **more)


def _saved(root: Path) -> None:
    model = _model()
    with _manager(root, model, optimizer=_adamw(model)) as manager:
        manager.save_state("a", wait=True)


def _load_into(model: nn.Module, *, optimizer: bool = True) -> Callable[[Path], None]:
    def load(root: Path) -> None:
        _saved(root)
        with _manager(root, model, **({"optimizer": _adamw(model)} if optimizer else {})) as manager:
            manager.load_state("a")

    return load


def _other_groups(root: Path) -> None:
    _saved(root)
    model = _model()
    optimizer = torch.optim.AdamW([{"params": [parameter]} for parameter in model.parameters()])
    with _manager(root, model, optimizer=optimizer) as manager:
        manager.load_state("a")


def _on_meta(root: Path) -> None:
    _saved(root)
    with torch.device("meta"):
        model = _model()
        for number in range(200):
            model.register_buffer(f"buffer{number}", torch.ones(2), persistent=False)
    with _manager(root, model) as manager:
        manager.load_state("a", strict=False)


def _callbacks(root: Path) -> None:
    with _manager(root, _model()) as manager:
        manager.register(callbacks=_Values())
        manager.save_state("a", wait=True)


def _unsuitable_objects(root: Path) -> None:
    with _manager(root, _model()) as manager:
        manager.register(**{f"set{number}": {number} for number in range(200)})


def _model_alone(root: Path) -> None:
    _saved(root)
    ckpt.load_model(str(root / "a"), _model(3))


def _from_a_file(root: Path) -> None:
    _saved(root)
    ckpt.merge(root / "a", root.parent / "plain" / "model.safetensors")
    ckpt.load_model(str(root.parent / "plain"), _model(3))


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "other shapes": (_load_into(_model(3)), "Build the objects as they were"),
    "other names": (_load_into(_model(prefix="block")), "Build the objects as they were"),
    "other groups": (_other_groups, "Build the objects as they were"),
    "on the meta device": (_on_meta, "Call to_empty"),
    "values that no file holds": (_callbacks, "Leave them out of state_dict()"),
    "objects without a state": (_unsuitable_objects, "has no state_dict and load_state_dict"),
    "a model alone": (_model_alone, "strict=False"),
    "a model alone, from a file": (_from_a_file, "strict=False"),
}


def _is_short(error: CkptError, way_out: str) -> None:
    text = str(error)
    assert len(text.splitlines()) <= MOST, text
    assert len(text) < 2500, text
    assert way_out in text, text


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_about_two_hundred_parameters_is_short(tmp_path: Path, case: str) -> None:
    provoke, way_out = REFUSED[case]
    with pytest.raises(CkptError) as raised:
        provoke(tmp_path / "runs")
    _is_short(raised.value, way_out)


def _own_experts(rank: int, folder: str) -> None:
    torch.manual_seed(rank)
    model = _model()
    with _manager(Path(folder), model, optimizer=_adamw(model)) as manager:
        manager.save_state("a", wait=True)


def _load_experts_alone(rank: int, folder: str) -> None:
    model = _model()
    with (
        _manager(Path(folder), model, optimizer=_adamw(model)) as manager,
        pytest.raises(MismatchError, match="each of the 2 ranks that saved it had its own") as raised,
    ):
        manager.load_state("a")
    _is_short(raised.value, "Build the objects as they were")
    assert len(raised.value.problems) >= 200


def _misfits_on_every_rank(rank: int, folder: str) -> None:
    model = _model(3 + rank)
    with (
        _manager(Path(folder), model) as manager,
        pytest.raises(MismatchError, match=r"rank 0: (.|\n)*rank 1: ") as raised,
    ):
        manager.load_state("a")
    _is_short(raised.value, "Build the objects as they were")


def _disagreeing(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = _model(2 + 2 * rank)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    with _manager(Path(folder, "other"), model) as manager, pytest.raises(ckpt.RanksError, match="disagree") as raised:
        manager.save_state("b", wait=True)
    _is_short(raised.value, "Build the same model on every rank")


@pytest.mark.slow
def test_refusals_of_several_ranks_about_two_hundred_parameters_are_short(tmp_path: Path) -> None:
    assert run_ranks(2, _own_experts, str(tmp_path)) == [0, 0]
    assert run_alone(_load_experts_alone, str(tmp_path)) == 0
    assert run_ranks(2, _misfits_on_every_rank, str(tmp_path)) == [0, 0]
    assert run_ranks(2, _disagreeing, str(tmp_path)) == [0, 0]


class _Answers(SingleProcess):
    """Rank 0 of 64, which has been given the answers of the others."""

    world_size = 64

    def __init__(self, answers: list[str]) -> None:
        self.answers = answers

    def gather(self, call: str, value: str) -> list[str]:
        return [value, *self.answers]


def _of_64(texts: list[str]) -> CkptError:
    results = [Result[None](error=MismatchError(text)) for text in texts]
    answers = [result.to_json("load") for result in results[1:]]
    with pytest.raises(MismatchError) as raised:
        decide_together(_Answers(answers), "load", results[0], lambda _: None)
    return raised.value


def test_errors_of_sixty_four_ranks_are_one_short_error() -> None:
    from ckpt.shown import Lines

    listings = [
        Lines.listing(f"{rank} does not fit:", [f"w{rank}.{number}" for number in range(200)], "Mend it.")
        for rank in range(64)
    ]
    text = str(_of_64(list(listings)))
    assert len(text.splitlines()) == MOST
    assert text.startswith("rank 0: 0 does not fit:\n  w0.0\n")
    assert "\n  and more\nMend it.\nrank 1: 1 does not fit: w1.0; rank 2: " in text
    assert text.endswith("; and 60 other errors")
    one_line = str(_of_64([f"file {rank} is gone" for rank in range(64)]))
    assert one_line.startswith("rank 0: file 0 is gone; rank 1: file 1 is gone; ")
    assert one_line.endswith("; and 56 other errors")
    assert str(_of_64(["gone"] * 63 + ["locked"])) == "ranks 0 to 62: gone; rank 63: locked"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 2], "ranks 1, 2"),
        ([*range(63)], "ranks 0 to 62"),
        ([0, 2, *range(4, 9)], "ranks 0, 2, 4 to 8"),
        ([*range(0, 64, 2)], "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 24 more"),
    ],
)
def test_ranks_are_named_in_runs(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text
