"""Runs that forget to save, or to give the manager what they train: told once, in the log and on the console."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.integrations.accelerate import attach
from ckpt.state import unmanaged
from tests.helpers.accelerated import new_accelerator


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(6, 1)), 2)


def _update(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 1)).pow(2).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_objects_are_looked_at_a_few_times_and_never_where_an_integration_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(unmanaged.UnmanagedWatch, "_check_objects", lambda self: looked.append("objects"))
    monkeypatch.setattr(unmanaged.UnmanagedWatch, "_check_changed", lambda self: looked.append("changed"))
    for quiet, steps, times in ((False, 0, 0), (False, 1, 1), (False, 4, 1), (False, 5, 2), (True, 30, 0)):
        watch = unmanaged.UnmanagedWatch(None, None, None)  # type: ignore[arg-type]
        watch.quiet = quiet
        looked.clear()
        for _ in range(steps):
            watch.stepped()
        assert looked == ["objects", "changed"] * times
        for _ in range(20):
            watch.saving()
        assert looked == ["objects", "changed"] * (0 if quiet else 8)
        watch._hook.remove()


class _Trainer:
    """An object of the user's, with schedulers in it."""

    def __init__(self, schedulers: list[Any]) -> None:
        self.schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)


@contextmanager
def _run(root: str, **options: Any) -> Iterator[tuple[ckpt.StateManager, nn.Module, torch.optim.Optimizer]]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckpt.StateManager(root, **{"model": model, "optimizer": optimizer, **options}) as manager:
        yield manager, model, optimizer


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


class TestNothingIsSaved:
    def test_without_save_every_and_save_state(self, anywhere: str, caplog: pytest.LogCaptureFixture) -> None:
        with _run(anywhere) as (manager, model, optimizer):
            for epoch in manager.epochs(3):
                for _ in manager.batches(_loader()):
                    _update(model, optimizer)
                    manager.step()
                    assert len(caplog.records) == (epoch > 0)
        assert [line.partition(":")[0] for line in _lines(caplog)] == [
            "an epoch of training is over and nothing was saved",
            "training is over and nothing was saved",
        ]
        assert "no save_every= was given, and save_state() was not called" in caplog.text

    def test_save_every_without_step(self, anywhere: str, caplog: pytest.LogCaptureFixture) -> None:
        with _run(anywhere, save_every=2) as (manager, model, optimizer):
            for _ in range(2):
                for _ in manager.batches(_loader()):
                    _update(model, optimizer)
        assert len(caplog.records) == 2
        assert "save_every=2 counts the calls of manager.step(), and there was none" in caplog.text

    @pytest.mark.parametrize(("saved", "told"), [(False, 1), (True, 0)])
    def test_many_steps_are_enough_to_say_so_unless_something_was_saved(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, saved: bool, told: int
    ) -> None:
        monkeypatch.setattr(unmanaged, "_LONG", 3)
        with _run(str(tmp_path)) as (manager, model, optimizer):
            if saved:
                manager.save_state("a", wait=True)
            for _ in range(4):
                _update(model, optimizer)
            assert len([record for record in caplog.records if record.levelname == "WARNING"]) == told

    def test_a_manager_that_is_never_called(self, anywhere: str, caplog: pytest.LogCaptureFixture) -> None:
        with _run(anywhere, save_every=2) as (_, model, optimizer):
            for _ in _loader():
                _update(model, optimizer)
        assert len(caplog.records) == 1
        assert "manager.step()" in caplog.text

    def test_fewer_steps_than_save_every(self, anywhere: str, caplog: pytest.LogCaptureFixture) -> None:
        with _run(anywhere, save_every=20) as (manager, model, optimizer):
            for _ in range(2):
                for _ in manager.batches(_loader()):
                    _update(model, optimizer)
                    manager.step()
        assert "save_every=20, and there were 6 steps" in caplog.text

    def test_an_accelerator_that_never_saves(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        accelerator = new_accelerator()
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, _loader())
        attach(accelerator, tmp_path).resume()
        for _ in range(2):
            for _ in loader:
                _update(model, optimizer)
        accelerator.end_training()
        assert len(caplog.records) == 2

    @pytest.mark.parametrize("when", ["in the loop", "after the inner loop", "at the end", "save_every"])
    def test_whoever_saves_hears_nothing(self, anywhere: str, caplog: pytest.LogCaptureFixture, when: str) -> None:
        with _run(anywhere, save_every=2 if when == "save_every" else None) as (manager, model, optimizer):
            for _ in manager.epochs(1 if when == "at the end" else 2):
                for _ in manager.batches(_loader()):
                    _update(model, optimizer)
                    manager.step()
                    if when == "in the loop":
                        manager.save_state()
                if when == "after the inner loop":
                    manager.save_state()
            if when == "at the end":
                manager.save_state()
        assert _lines(caplog) == []


class TestSomethingIsNotManaged:
    def test_no_object_at_all(self, anywhere: str, caplog: pytest.LogCaptureFixture) -> None:
        with ckpt.StateManager(anywhere, save_every=1) as manager:
            for _ in manager.batches(_loader()):
                manager.step()
        assert len(caplog.records) == 1
        assert "no object is managed" in caplog.text

    def test_no_optimizer(self, anywhere: str, caplog: pytest.LogCaptureFixture) -> None:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ckpt.StateManager(anywhere, model=model, save_every=1) as manager:
            for _ in manager.batches(_loader()):
                _update(model, optimizer)
                manager.step()
        assert len(caplog.records) == 1
        assert "SGD of 4 tensors trains the model and is not managed" in caplog.text
        with ckpt.StateManager(anywhere, model=_model()) as manager:
            assert "optimizer" in manager.load_state().approximated["unmanaged optimizer"]

    def test_a_second_optimizer_that_was_forgotten(self, anywhere: str, caplog: pytest.LogCaptureFixture) -> None:
        with _run(anywhere, save_every=1) as (manager, model, optimizer):
            other = torch.optim.Adam(list(model.parameters())[2:], lr=0.1)
            for _ in manager.batches(_loader()):
                _update(model, optimizer, other)
                manager.step()
        assert len(caplog.records) == 1
        assert "Adam of 2 tensors" in caplog.text

    def test_a_parameter_that_no_optimizer_has_and_that_changed(
        self, anywhere: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = _model()
        optimizer = torch.optim.SGD(list(model.parameters())[:2], lr=0.1)
        with ckpt.StateManager(anywhere, model=model, optimizer=optimizer, save_every=1) as manager:
            for _ in manager.batches(_loader()):
                model(torch.ones(2, 1)).sum().backward()
                optimizer.step()
                with torch.no_grad():  # an optimizer of one's own
                    for parameter in list(model.parameters())[2:]:
                        assert parameter.grad is not None
                        parameter.sub_(parameter.grad, alpha=0.1)
                manager.step()
        assert len(caplog.records) == 1
        assert "model: 1.weight, model: 1.bias changed" in caplog.text

    def test_a_scheduler_that_was_forgotten(self, anywhere: str, caplog: pytest.LogCaptureFixture) -> None:
        with _run(anywhere) as (manager, model, optimizer):
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
            manager.resume()
            for _ in range(3):
                _update(model, optimizer)
                scheduler.step()
                manager.step()
            manager.save_state(wait=True)
        (line,) = (line for line in _lines(caplog) if "scheduler" in line)
        assert line == (
            "optimizer: an LR scheduler was built for it and is not managed, so its schedule starts over after a "
            "resume. Pass it too: StateManager(root, ..., scheduler=scheduler)."
        )

    def test_schedulers_that_are_managed_are_not_forgotten_and_one_of_two_is(
        self, anywhere: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = _model()
        first, second = model.children()
        optimizers = {"a": torch.optim.SGD(first.parameters()), "b": torch.optim.SGD(second.parameters())}
        schedulers = [torch.optim.lr_scheduler.LinearLR(optimizer) for optimizer in optimizers.values()]
        cases: list[dict[str, Any]] = [{"scheduler": schedulers}, {"scheduler": schedulers[0]}, {}]
        for number, given in enumerate(cases):
            caplog.clear()
            with ckpt.StateManager(f"{anywhere}-{number}", model=model, optimizer=optimizers, **given) as manager:
                if not given:
                    manager.register(trainer=_Trainer(schedulers))
                manager.save_state(wait=True)
            told = [line.partition(":")[0] for line in _lines(caplog) if "LR scheduler" in line]
            assert told == (["optimizer.b"] if number == 1 else [])

    @pytest.mark.parametrize("managed", [True, False])
    def test_a_scaler_that_was_forgotten_where_the_optimizer_is_fused(
        self, anywhere: str, caplog: pytest.LogCaptureFixture, managed: bool
    ) -> None:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu")
        given: dict[str, Any] = {"scaler": scaler} if managed else {}
        with ckpt.StateManager(anywhere, model=model, optimizer=optimizer, **given) as manager:
            scaler.scale(model(torch.ones(2, 1)).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            manager.save_state(wait=True)
        assert ("a GradScaler steps SGD of 4 tensors and is not managed" in caplog.text) is not managed

    def test_an_optimizer_of_another_model(self, anywhere: str, caplog: pytest.LogCaptureFixture) -> None:
        with _run(anywhere, model=_model(), save_every=1) as (manager, model, optimizer):
            for _ in manager.batches(_loader()):
                _update(model, optimizer)
                manager.step()
        assert len(caplog.records) == 1
        assert "optimizer: none of its parameters belongs to the model" in caplog.text

    def test_averages_registered_optimizers_and_inference_hear_nothing(
        self, anywhere: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, second = _model(), _model()
        optimizer, other = (torch.optim.SGD(owner.parameters(), lr=0.1) for owner in (model, second))
        average = copy.deepcopy(model)
        models = {"net": model, "second": second, "ema": average}
        with ckpt.StateManager(anywhere, model=models, optimizer=optimizer, save_every=1) as manager:
            manager.register(other=other)
            for _ in manager.batches(_loader()):
                _update(model, optimizer)
                _update(second, other)
                with torch.no_grad():
                    for averaged, mine in zip(average.parameters(), model.parameters(), strict=True):
                        averaged.lerp_(mine, 0.5)
                manager.step()
        with ckpt.StateManager(anywhere, model=models) as manager:
            manager.load_state(strict=False)
            for _ in _loader():
                model(torch.ones(2, 1))
        (left_out,) = _lines(caplog)  # by `strict=False`, and nothing else
        assert left_out.startswith(
            "not everything is as it was when step-00000003 was saved:\n  skipped       optimizer"
        )
