"""Loops with one known cause each: whether they resume exactly, and where the selftest should see it if not."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt

DATA = TensorDataset(torch.arange(48.0).view(24, 2) / 48)
STEPS = 16


class Parts:
    def __init__(self, dropout: float = 0.0) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(dropout), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)

    def manager(self, **more: Any) -> ckpt.StateManager:
        return ckpt.StateManager("out", **{"model": self.model, "optimizer": self.optimizer, "save_every": 3, **more})

    def train(self, batch: torch.Tensor) -> None:
        self.model(batch).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def loader(shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=3, shuffle=shuffle)


def rows() -> torch.Tensor:
    return DATA.tensors[0]


def by_number(manager: ckpt.StateManager) -> Iterator[torch.Tensor]:
    """A loop without a loader, which finds its place by itself: `manager.step()` saves at once."""
    manager.resume()
    for step in range(manager.progress.step, STEPS):
        yield rows()[step % 20 : step % 20 + 3]


def exact_in_a_function() -> None:
    """The manager, the model and an average of it are gone when the function returns."""
    parts = Parts()
    average = torch.optim.swa_utils.AveragedModel(parts.model)
    with parts.manager(model={"model": parts.model, "average": average}) as manager:
        for _ in manager.epochs(2):
            for (batch,) in manager.batches(loader()):
                parts.train(batch)
                average.update_parameters(parts.model)
                manager.step()


def exact_with_a_frozen_model() -> None:
    """A teacher that no manager has, and that never changes, is no state."""
    parts = Parts()
    torch.manual_seed(5)
    teacher = nn.Linear(2, 2).requires_grad_(False)
    with parts.manager() as manager:
        for _ in manager.epochs(2):
            for (batch,) in manager.batches(loader()):
                parts.train(teacher(batch))
                manager.step()


def scheduler_after_step() -> None:
    parts = Parts()
    scheduler = torch.optim.lr_scheduler.StepLR(parts.optimizer, step_size=4, gamma=0.5)
    with parts.manager(scheduler=scheduler) as manager:
        for batch in by_number(manager):
            parts.train(batch)
            manager.step()
            scheduler.step()


def average_after_step() -> None:
    parts = Parts()
    average = copy.deepcopy(parts.model)
    with parts.manager(model={"model": parts.model, "average": average}) as manager:
        for batch in by_number(manager):
            parts.train(batch)
            manager.step()
            with torch.no_grad():
                for mean, weight in zip(average.parameters(), parts.model.parameters(), strict=True):
                    mean.lerp_(weight, 0.1)


def random_evaluation_after_step() -> None:
    parts = Parts(dropout=0.3)
    with parts.manager() as manager:
        for batch in by_number(manager):
            parts.train(batch)
            manager.step()
            with torch.no_grad():
                parts.model(torch.rand(2, 2))


def cycled() -> None:
    parts = Parts()
    data = loader()
    with parts.manager(dataloader=data) as manager:
        manager.resume()
        for (batch,) in itertools.islice(itertools.cycle(data), STEPS - manager.progress.step):
            parts.train(batch)
            manager.step()


def forgotten_scheduler() -> None:
    parts = Parts()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(parts.optimizer, STEPS)
    with parts.manager() as manager:
        for _ in manager.epochs(2):
            for (batch,) in manager.batches(loader()):
                parts.train(batch)
                scheduler.step()
                manager.step()


def forgotten_scaler() -> None:
    parts = Parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    with parts.manager() as manager:
        for _ in manager.epochs(2):
            for (batch,) in manager.batches(loader()):
                scaler.scale(parts.model(batch).pow(2).mean()).backward()
                scaler.step(parts.optimizer)
                scaler.update()
                parts.optimizer.zero_grad()
                manager.step()


def forgotten_optimizer() -> None:
    parts = Parts()
    with parts.manager(optimizer=None) as manager:
        for _ in manager.epochs(2):
            for (batch,) in manager.batches(loader()):
                parts.train(batch)
                manager.step()


def fetched_ahead() -> None:
    """As nanoGPT does: the next batch is drawn before the step that ends this iteration."""
    parts = Parts()

    def draw() -> torch.Tensor:
        return rows()[torch.randint(0, 24, (3,))]

    with parts.manager() as manager:
        manager.resume()
        batch = draw()
        for _ in range(manager.progress.step, STEPS):
            following = draw()
            parts.train(batch)
            batch = following
            manager.step()


def unannounced() -> None:
    """Batches of an iterable of the script's own."""
    parts = Parts()
    batches = [rows()[start : start + 3] for start in range(0, 24, 3)]
    with parts.manager() as manager:
        manager.resume()
        while manager.progress.step < STEPS:
            for batch in batches:
                parts.train(batch)
                manager.step()


SCRIPTS: dict[Callable[[], None], str] = {  # and what differs first; nothing: it is exact
    exact_in_a_function: "",
    exact_with_a_frozen_model: "",
    scheduler_after_step: "learning rates",
    average_after_step: "final checkpoint",
    random_evaluation_after_step: "losses",
    cycled: "losses",
    forgotten_scheduler: "learning rates",
    forgotten_scaler: "losses",
    forgotten_optimizer: "parameters",
    fetched_ahead: "losses",
    unannounced: "losses",
}

if __name__ == "__main__":
    next(script for script in SCRIPTS if script.__name__ == sys.argv[1])()
