"""SIGKILL at random moments of a process that does nothing but save."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
from tests.helpers.places import Place, committed
from tests.helpers.processes import DEADLINE, start_alone

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("CKPT_KILLS", "25"))


def _objects() -> tuple[nn.Linear, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """A model whose weights, an optimizer whose moments and a scheduler whose count all say the same step."""
    model = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0)
    return model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def _advance(
    model: nn.Linear, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler
) -> None:
    model.weight.grad = -torch.ones_like(model.weight)
    optimizer.step()
    optimizer.state[model.weight]["count"] = model.weight.detach().clone()
    scheduler.step()


def _save_forever(rank: int, root: str) -> None:
    model, optimizer, scheduler = _objects()
    with ckpt.StateManager(
        root, model=model, optimizer=optimizer, scheduler=scheduler, save_every=1, keep=ckpt.Keep(last=2)
    ) as manager:
        manager.resume()
        while True:
            _advance(model, optimizer, scheduler)
            manager.step()


def test_after_every_kill_the_newest_state_is_whole_and_agrees_with_itself(
    root: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    moments = random.Random(2024)
    reached = 0
    for kill in range(KILLS):
        job = start_alone(str(tmp_path), _save_forever, str(root))
        _await_progress(root, reached)
        time.sleep(moments.random() * 0.03)
        os.kill(job.pid or 0, signal.SIGKILL)
        job.join(DEADLINE)
        model, optimizer, scheduler = _objects()
        with ckpt.StateManager(root, model=model, optimizer=optimizer, scheduler=scheduler) as manager:
            restored = manager.load_state()
        step = float(restored.step)
        assert restored.step > reached, f"kill {kill}: a committed checkpoint was lost"
        assert torch.equal(model.weight, torch.full((64, 64), step))
        assert torch.equal(optimizer.state[model.weight]["count"], torch.full((64, 64), step))
        assert scheduler.last_epoch == restored.step
        reached = restored.step
    hidden = [name for name in root.files() if name.rpartition("/")[2].startswith(".")]
    leftovers = [name for name in hidden if name != ".lock" and not name.startswith(".locks/")]
    assert len(leftovers) <= 3  # those of the last kill: earlier ones have been swept
    capfd.readouterr()


def _await_progress(root: Place, reached: int) -> None:
    """Until the process has resumed and committed a step beyond the last one."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        steps = [int(name[5:]) for name in committed(root)]
        if max(steps, default=0) > reached:
            return
        time.sleep(0.001)
    raise AssertionError("the process made no progress")
