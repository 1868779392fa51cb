"""Every block of Python in the README runs, in its order, as a newcomer would run it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from tests.helpers.hub_server import HubServer

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


class Script:
    """What the blocks take as given."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.train_loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8, shuffle=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10)
        self.steps = 0
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def train_step(self, batch: Any) -> Any:
        self.steps += 1
        loss: Any = self.model(batch[0]).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def run(self, block: str, **more: Any) -> dict[str, Any]:
        names = {name: getattr(self, name) for name in (*vars(self), "train_step")}
        space = {"ckpt": ckpt, **names, **more}
        exec(compile(block, "README.md", "exec"), space)
        return space


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def block(beginning: str) -> str:
    (found,) = (block for block in BLOCKS if beginning in block)
    return str(found)


def test_no_block_is_left_out() -> None:
    assert len(BLOCKS) == 5


def test_the_loop_trains_saves_and_has_nothing_left_to_do_when_it_is_run_again() -> None:
    for left in (12, 0):
        script = Script()
        script.run(block("manager.epochs(3)"))
        assert script.steps == left
    assert [found.step for found in ckpt.list_checkpoints("runs/mrpc")] == [12]


def test_a_loop_that_is_there_stays_as_it_is() -> None:
    for began in (0, 3):
        script = Script()
        with ckpt.StateManager(
            "runs/plain", model=script.model, optimizer=script.optimizer, dataloader=script.train_loader
        ) as manager:
            space = script.run(block("# the loader continues"), manager=manager)
            assert (space["restored"].epoch if space["restored"] else 0) == began
            manager.save_state()


def test_an_accelerator_is_attached() -> None:
    accelerate = pytest.importorskip("accelerate")
    script, accelerator = Script(), accelerate.Accelerator(cpu=True)
    script.model, script.optimizer, script.train_loader = accelerator.prepare(
        script.model, script.optimizer, script.train_loader
    )
    space = script.run(block("attach(accelerator"), accelerator=accelerator)
    with space["manager"]:
        assert space["restored"] is None
    assert ckpt.list_checkpoints("runs/mrpc")


def saved() -> Script:
    script = Script()
    with ckpt.StateManager("runs/mrpc", model=script.model, optimizer=script.optimizer) as manager:
        manager.save_state("step-00001000")
    return script


def test_a_checkpoint_becomes_one_file_and_goes_to_accelerate_and_back() -> None:
    saved().run(block("ckpt.merge("))
    assert Path("model.safetensors").exists()
    assert Path("back/model.safetensors").exists()
    assert ckpt.list_checkpoints("runs/converted")


@pytest.mark.slow
def test_a_checkpoint_is_pushed_and_loaded(hub: HubServer) -> None:
    script = saved()
    before = script.model.weight.clone()
    with torch.no_grad():
        script.model.weight.zero_()
    script.run(block("ckpt.push_to_hub("))
    assert torch.equal(script.model.weight, before)
