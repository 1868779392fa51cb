"""`ckpt.Joined`: several parts of a model, several optimizers, as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.helpers.training import exact


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2))


class Halves:
    """A model in two parts, which have the names of the whole."""

    def __init__(self, seed: int) -> None:
        model = _model(seed)
        self.first, self.second = nn.ModuleDict({"0": model[0]}), nn.ModuleDict({"1": model[1], "2": model[2]})
        self.model = model

    @property
    def parts(self) -> list[nn.Module]:
        return [self.first, self.second]


def _step(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.linspace(-1, 1, 12).reshape(3, 4)).pow(2).mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def _state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> str:
    """By parameter, whichever optimizer has it."""
    of = {id(value): state for optimizer in optimizers for value, state in optimizer.state.items()}
    return exact([{name: (value, of.get(id(value))) for name, value in model.named_parameters()}])


def test_parts_and_their_optimizers_are_saved_as_one_and_loaded_by_a_whole_model(tmp_path: Path) -> None:
    halves = Halves(1)
    optimizers: list[Any] = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in halves.parts]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
    joined: dict[str, Any] = {
        "model": ckpt.Joined(halves.parts),
        "optimizer": ckpt.Joined(optimizers),
        "scheduler": ckpt.Joined(schedulers),
    }
    with ckpt.StateManager(tmp_path, **joined) as manager:
        _step(halves.model, optimizers)
        for scheduler in schedulers:
            scheduler.step()
        manager.save_state("saved")
    whole = _model(2)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1.0)
    single = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with ckpt.StateManager(tmp_path, model=whole, optimizer=optimizer, scheduler=single) as manager:
        manager.load_state("saved")
    assert _state(whole, [optimizer]) == _state(halves.model, optimizers)
    assert optimizer.param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)
    assert single.last_epoch == 1


def test_an_optimizer_for_every_parameter_is_loaded_from_that_of_a_whole_model(tmp_path: Path) -> None:
    whole = _model(1)
    decayed = [value for value in whole.parameters() if value.dim() > 1]
    others = [value for value in whole.parameters() if value.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    with ckpt.StateManager(tmp_path, model=whole, optimizer=optimizer) as manager:
        _step(whole, [optimizer])
        manager.save_state("saved")
    model = _model(2)
    by_name = {
        name: torch.optim.AdamW([value], lr=1.0, weight_decay=0.1 if value.dim() > 1 else 0.0)
        for name, value in model.named_parameters()
    }
    with ckpt.StateManager(tmp_path, model=model, optimizer=ckpt.Joined(by_name)) as manager:
        manager.load_state("saved")
        assert _state(model, list(by_name.values())) == _state(whole, [optimizer])
        _step(model, list(by_name.values()))
        _step(whole, [optimizer])
        assert _state(model, list(by_name.values())) == _state(whole, [optimizer])
        manager.save_state("again")
    with ckpt.StateManager(tmp_path, model=whole, optimizer=optimizer) as manager:
        _step(whole, [optimizer])
        manager.load_state("again")
    assert _state(model, list(by_name.values())) == _state(whole, [optimizer])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_parts_whose_names_begin_anew_get_a_prefix(tmp_path: Path) -> None:
    parts = {f"stages.{number}": nn.Linear(3, 3) for number in range(2)}
    with ckpt.StateManager(tmp_path, model=ckpt.Joined(parts)) as manager:
        manager.save_state("saved")
    whole = nn.ModuleDict({"stages": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])})
    with ckpt.StateManager(tmp_path, model=whole) as manager:
        manager.load_state("saved")
    saved = [value for part in parts.values() for value in part.parameters()]
    assert exact(saved) == exact(list(whole.parameters()))


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ({"model": lambda: ckpt.Joined([nn.Linear(2, 2), nn.Linear(2, 2)])}, "Give each part its prefix"),
        ({"model": lambda: ckpt.Joined([])}, "got no objects"),
        ({"model": lambda: ckpt.Joined([3])}, "takes modules, not int"),
        ({"optimizer": lambda: ckpt.Joined([nn.Linear(2, 2)])}, "torch optimizers of one class, not Linear"),
        ({"dataloader": lambda: ckpt.Joined([[1]])}, "models, optimizers, schedulers or scalers"),
    ],
)
def test_what_cannot_be_joined_is_refused(tmp_path: Path, objects: dict[str, Any], said: str) -> None:
    with pytest.raises(ckpt.ConfigError, match=said):
        ckpt.StateManager(tmp_path, **{kind: make() for kind, make in objects.items()})


def test_schedulers_that_differ_are_refused_when_they_are_saved(tmp_path: Path) -> None:
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
    with ckpt.StateManager(tmp_path, scheduler=ckpt.Joined(schedulers)) as manager:
        optimizers[0].step()
        schedulers[0].step()
        with pytest.raises(ckpt.UnsupportedError, match="their states differ"):
            manager.save_state("saved")


class Container(torch.optim.Optimizer):
    """Optimizers that step together, as torchtitan has them: its own state is of another form."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([value for one in optimizers for group in one.param_groups for value in group["params"]], {})

    def state_dict(self) -> dict[str, Any]:
        return {"flat": 1}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("of another form")


def test_a_container_of_optimizers_is_saved_as_they_are_and_loaded_by_one(tmp_path: Path) -> None:
    halves = Halves(1)
    inner: list[Any] = [torch.optim.AdamW(part.named_parameters(), lr=0.1) for part in halves.parts]
    with ckpt.StateManager(tmp_path, model=ckpt.Joined(halves.parts), optimizer=Container(inner)) as manager:
        _step(halves.model, inner)
        manager.save_state("saved")
    whole = _model(2)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1.0)
    with ckpt.StateManager(tmp_path, model=whole, optimizer=optimizer) as manager:
        manager.load_state("saved")
    assert _state(whole, [optimizer]) == _state(halves.model, inner)
    assert "param_names" not in optimizer.param_groups[0]


def test_a_container_with_several_classes_has_a_part_for_each(tmp_path: Path) -> None:
    halves = Halves(1)
    inner = [torch.optim.AdamW(halves.first.parameters()), torch.optim.Adagrad(halves.second.parameters())]
    with ckpt.StateManager(tmp_path, model=ckpt.Joined(halves.parts), optimizer=Container(inner)) as manager:
        _step(halves.model, inner)
        manager.save_state("saved")
        before = _state(halves.model, inner)
        _step(halves.model, inner)
        restored = manager.load_state("saved")
    assert {"optimizer.AdamW", "optimizer.Adagrad"} <= set(restored.restored)
    assert _state(halves.model, inner) == before


def test_names_of_parameters_stay_beside_their_parameters_when_the_order_is_another(tmp_path: Path) -> None:
    model = _model(1)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    with ckpt.StateManager(tmp_path, model=model, optimizer=optimizer) as manager:
        _step(model, [optimizer])
        manager.save_state("saved")
    other = _model(2)
    backwards = list(other.named_parameters())[::-1]
    turned = torch.optim.AdamW(backwards, lr=1.0)
    with ckpt.StateManager(tmp_path, model=other, optimizer=turned) as manager:
        manager.load_state("saved")
    assert _state(other, [turned]) == _state(model, [optimizer])
    assert turned.param_groups[0]["param_names"] == [name for name, _ in backwards]
