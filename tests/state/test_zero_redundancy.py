"""ZeroRedundancyOptimizer: every rank has the state of its own parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import ckpt
from tests.helpers.processes import run_alone, run_ranks
from tests.helpers.training import exact

pytestmark = pytest.mark.slow


def _built(seed: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def _train(model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
    for number in steps:
        optimizer.zero_grad()
        model(torch.linspace(0, 1, 8).reshape(2, 4) * (1 + number)).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()


def _mine(model: nn.Module, optimizer: Any) -> str:
    return exact([model.state_dict(), optimizer.optim.state_dict(), [group["lr"] for group in optimizer.param_groups]])


def _managed(folder: str, model: nn.Module, optimizer: Any, scheduler: Any) -> ckpt.StateManager:
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return ckpt.StateManager(f"{folder}/runs", **parts, ranks=ckpt.RankOptions(timeout=60))


def _straight(rank: int, folder: str) -> None:
    model, optimizer, scheduler = _built(1)
    with _managed(folder, model, optimizer, scheduler) as manager:
        manager.save_state("start")
        _train(model, optimizer, scheduler, range(3))
        manager.save_state("middle")
        _train(model, optimizer, scheduler, range(3, 6))
    Path(folder, f"end-{rank}").write_text(_mine(model, optimizer))


def _resumed(rank: int, folder: str) -> None:
    model, optimizer, scheduler = _built(2)
    with _managed(folder, model, optimizer, scheduler) as manager:
        restored = manager.load_state("middle")
        assert restored.approximated.keys() <= {"data"}, restored  # these steps read no loader
        _train(model, optimizer, scheduler, range(3, 6))
    assert _mine(model, optimizer) == Path(folder, f"end-{rank}").read_text()


def _all_state(optimizer: Any, model: nn.Module) -> dict[str, str]:
    """The state of every parameter that this rank's optimizer has, by name."""
    inner = getattr(optimizer, "optim", optimizer)
    names = {id(value): name.removeprefix("module.") for name, value in model.named_parameters()}
    return {names[id(value)]: exact(state) for value, state in inner.state.items()}


def _noted(folder: str) -> dict[str, str]:
    return {name: text for path in Path(folder).glob("state-*") for name, text in json.loads(path.read_text()).items()}


def _note(rank: int, folder: str) -> None:
    model, optimizer, scheduler = _built(2)
    with _managed(folder, model, optimizer, scheduler) as manager:
        manager.load_state("middle")
    Path(folder, f"state-{rank}").write_text(json.dumps(_all_state(optimizer, model)))


def _alone(rank: int, folder: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.StateManager(f"{folder}/runs", model=model, optimizer=optimizer) as manager:
        manager.load_state("middle")
        assert _all_state(optimizer, model) == _noted(folder)
        manager.save_state("alone")


def _three(rank: int, folder: str, name: str) -> None:
    model, optimizer, _ = _built(2)
    with ckpt.StateManager(
        f"{folder}/runs", model=model, optimizer=optimizer, ranks=ckpt.RankOptions(timeout=60)
    ) as manager:
        manager.load_state(name)
    mine = _all_state(optimizer, model)
    assert mine == {key: value for key, value in _noted(folder).items() if key in mine}
    assert optimizer.param_groups[0]["lr"] == optimizer.optim.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_zero_redundancy_optimizer_goes_on_exactly_and_is_loaded_by_any_number_of_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, _straight, str(tmp_path)) == [0, 0]
    assert run_ranks(2, _resumed, str(tmp_path)) == [0, 0]
    assert run_ranks(2, _note, str(tmp_path)) == [0, 0]
    assert len(_noted(str(tmp_path))) == 4
    assert run_ranks(3, _three, str(tmp_path), "middle") == [0, 0, 0]
    assert run_alone(_alone, str(tmp_path)) == 0
    assert run_ranks(3, _three, str(tmp_path), "alone") == [0, 0, 0]
