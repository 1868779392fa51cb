"""Models whose activations are checkpointed: the wrapper is no part of any name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ckpt
from ckpt.state import optimizer as optimizers
from ckpt.state import unwrap
from tests.helpers.places import Place
from tests.helpers.training import exact


def _model(seed: int, *, wrapped: bool) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1))
    if wrapped:
        model[1] = checkpoint_wrapper(model[1])
    return model


def _trained(seed: int, *, wrapped: bool, steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model(seed, wrapped=wrapped)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return exact([[*model.parameters()], optimizer.state_dict()])


@pytest.mark.parametrize("then", [True, False])
def test_a_run_with_other_activation_wrapping_loads_model_and_optimizer(root: Place, then: bool) -> None:
    model, optimizer = _trained(0, wrapped=then, steps=2)
    with ckpt.StateManager(str(root), model=model, optimizer=optimizer) as manager:
        manager.save_state("a", wait=True)
    again, its = _trained(1, wrapped=not then)
    with ckpt.StateManager(str(root), model=again, optimizer=its) as manager:
        assert not manager.load_state().skipped
    assert _state(again, its) == _state(model, optimizer)


def test_names_of_the_wrapper_that_an_earlier_version_wrote_are_understood(
    root: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = _trained(0, wrapped=True, steps=2)
    leaking = {id(parameter): name for name, parameter in model.named_parameters()}
    with monkeypatch.context() as patch:
        patch.setattr(optimizers, "parameter_names", lambda _: leaking)
        with ckpt.StateManager(str(root), model=model, optimizer=optimizer) as manager:
            manager.save_state("a", wait=True)
    saved = json.loads((root / "a" / "state.json").read_bytes())
    assert "_checkpoint_wrapped_module" in json.dumps(saved["parts"]["optimizer"])
    again, its = _trained(1, wrapped=False)
    with ckpt.StateManager(str(root), model=again, optimizer=its) as manager:
        manager.load_state("a")
    assert _state(again, its) == _state(model, optimizer)


def test_frozen_weights_under_an_activation_wrapper_are_known_as_frozen() -> None:
    model = _model(0, wrapped=True)
    model[1].requires_grad_(False)
    from ckpt.state.model import ModelPart

    assert ModelPart("model", model).frozen() == {"1.0.weight", "1.0.bias"}
    assert unwrap.clean_name(model, "1.0.weight") == "1.0.weight"
    assert unwrap.clean_name(model, "1._checkpoint_wrapped_module.0.weight") == "1.0.weight"
