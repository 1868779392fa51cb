"""Subclasses of Trainer that override how it saves and loads: their methods run, and what they write comes back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import ckpt
from ckpt.errors import ConfigError
from ckpt.integrations.transformers import CkptCallback
from tests.integrations.test_transformers import with_callbacks

pytestmark = pytest.mark.slow  # transformers takes seconds to import


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


CONTROL = "control/of/loss.json"


class Controlled(Trainer):  # type: ignore[misc]
    """Keeps a coefficient as TRL's GRPO does: in a file of the checkpoint's folder, written after the rest."""

    coefficient = 1.0

    def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
        self.coefficient *= 1.5
        loss: torch.Tensor = super().training_step(*given, **named)
        return loss

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        os.makedirs(os.path.join(folder, "control", "of"))
        with open(os.path.join(folder, CONTROL), "w") as file:
            json.dump(self.coefficient, file)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and os.path.exists(path := os.path.join(checkpoint, CONTROL)):
            with open(path) as file:
                self.coefficient = json.load(file)


class Stopping(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def build(kind: type[Trainer], folder: Path, *callbacks: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    args = TrainingArguments(
        str(folder / "output"), max_steps=4, per_device_train_batch_size=1, save_steps=2, learning_rate=0.1,
        report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    data = [{"x": torch.tensor([1.0, float(number)])} for number in range(8)]
    ours = CkptCallback(folder / "root", **options)
    return with_callbacks(kind(Net(), args, train_dataset=data), [ours, *callbacks])


@pytest.mark.parametrize("options", [{}, {"memory": 1}], ids=["from the root", "from memory"])
def test_what_an_override_keeps_comes_back(tmp_path: Path, options: dict[str, Any]) -> None:
    straight = build(Controlled, tmp_path / "straight")
    straight.train()
    with pytest.raises(KeyboardInterrupt):
        build(Controlled, tmp_path, Stopping(), **options).train()
    again = build(Controlled, tmp_path, **options)
    assert isinstance(again, Controlled)
    again.train(resume_from_checkpoint=True)
    assert again.coefficient == straight.coefficient == 1.5**4
    assert torch.equal(again.model.layer.weight, straight.model.layer.weight)
    assert not list((tmp_path / "output").glob("checkpoint-*"))


class WithoutSuper(Controlled):
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.save_model()


class LoadsWithoutSuper(Controlled):
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        pass


def test_an_override_that_leaves_ckpt_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"WithoutSuper\._save_checkpoint does not call super\(\)\._save_checkpoint"):
        build(WithoutSuper, tmp_path / "saves").train()
    with pytest.raises(KeyboardInterrupt):
        build(Controlled, tmp_path, Stopping()).train()
    with pytest.raises(ConfigError, match=r"LoadsWithoutSuper\._load_optimizer_and_scheduler does not call super\(\)"):
        build(LoadsWithoutSuper, tmp_path).train(resume_from_checkpoint=True)
    assert [found.name for found in ckpt.list_checkpoints(tmp_path / "root")] == ["step-00000002"]


class WithMuch(Controlled):
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}", "more")
        folder.mkdir()
        (folder / "large.bin").write_bytes(bytes(17_000_000))


def test_files_that_are_too_large_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"wrote 17\.0 MB into .*checkpoint-2 \(mostly in more/large\.bin\)"):
        build(WithMuch, tmp_path).train()


def test_a_checkpoint_of_a_trainer_is_not_overwritten(tmp_path: Path) -> None:
    theirs = tmp_path / "output" / "checkpoint-2" / "trainer_state.json"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("{}")
    with pytest.raises(ConfigError, match=r"a Trainer without ckpt wrote the checkpoint .*checkpoint-2"):
        build(Controlled, tmp_path).train()
    assert theirs.read_text() == "{}"


class OfGenerators(Trainer):  # type: ignore[misc]
    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)


def test_an_override_that_is_not_called_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(Trainer, tmp_path / "plain")
    build(Controlled, tmp_path / "called")
    assert "overrides" not in caplog.text
    build(OfGenerators, tmp_path)
    assert "OfGenerators overrides _save_rng_state, which the Trainer calls for its own checkpoints" in caplog.text
