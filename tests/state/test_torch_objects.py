"""Schedulers and scalers of PyTorch whose saved state is something else: nothing is changed before that is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ckpt
from ckpt.state.optimizer import OptimizerPart
from tests.helpers.forgery import alter_json

MAKE: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "scaler": lambda optimizer: torch.amp.GradScaler("cpu"),
}


def manager_of(root: Path, kind: str) -> tuple[nn.Module, ckpt.StateManager]:
    model = nn.Linear(2, 2)
    made = MAKE[kind](torch.optim.SGD(model.parameters(), lr=1.0))
    option = {"scaler" if kind == "scaler" else "scheduler": made}
    return model, ckpt.StateManager(root, model=model, **option)


@pytest.mark.parametrize("kind", MAKE)
def test_its_own_state_fits(tmp_path: Path, kind: str) -> None:
    saved, manager = manager_of(tmp_path, kind)
    with manager:
        manager.save_state("a")
    model, manager = manager_of(tmp_path, kind)
    with manager:
        manager.load_state("a")
    assert all(map(torch.equal, model.parameters(), saved.parameters()))


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("value", [5, [1, 2]])
def test_what_is_no_state_is_refused_and_nothing_is_changed(tmp_path: Path, kind: str, value: Any) -> None:
    _, manager = manager_of(tmp_path, kind)
    with manager:
        manager.save_state("a")
    part = "scaler" if kind == "scaler" else "scheduler"

    def change(document: Any) -> None:
        document["parts"][part]["state"] = value

    alter_json(tmp_path / "a" / "state.json", change)
    model, manager = manager_of(tmp_path, kind)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with manager:
        with pytest.raises(ckpt.MismatchError, match=rf"{part}.*no state of a"):
            manager.load_state("a")
        assert all(map(torch.equal, model.parameters(), before))
        assert part in manager.load_state("a", strict=False).skipped


def test_a_class_with_a_state_of_its_own_kind_is_asked_itself(tmp_path: Path) -> None:
    class Own(lr_scheduler.LambdaLR):
        def state_dict(self) -> Any:
            return [self.last_epoch]

        def load_state_dict(self, state: Any) -> None:
            (self.last_epoch,) = state

    def manager() -> tuple[Own, ckpt.StateManager]:
        model = nn.Linear(2, 2)
        own = Own(torch.optim.SGD(model.parameters(), lr=1.0), lambda step: 1.0)
        return own, ckpt.StateManager(tmp_path, model=model, scheduler=own)

    first, saving = manager()
    with saving:
        first.last_epoch = 7
        saving.save_state("a")
    second, loading = manager()
    with loading:
        loading.load_state("a")
    assert second.last_epoch == 7


@pytest.mark.parametrize(
    ("state", "why"), [([1, 2], "no state of AdamW"), ({"exp_avg": None}, "no state of AdamW: step is missing")]
)
def test_a_state_that_an_optimizer_would_stumble_over_is_a_misfit(state: object, why: str) -> None:
    model = nn.Linear(2, 2)
    part = OptimizerPart("optimizer", torch.optim.AdamW(model.parameters()), {"": model})
    saved = {"state": {"weight": state}, "param_groups": [{"params": ["weight", "bias"]}]}
    assert part.check(saved) == {"state.weight": why}


def test_an_optimizer_of_ones_own_may_keep_its_state_as_it_likes() -> None:
    class Own(torch.optim.SGD):
        pass

    model = nn.Linear(2, 2)
    part = OptimizerPart("optimizer", Own(model.parameters(), lr=0.1), {"": model})
    assert part.check({"state": {"weight": [1, 2]}, "param_groups": [{"params": ["weight", "bias"]}]}) == {}
