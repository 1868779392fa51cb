"""Small jobs with Accelerate, for tests that interrupt and resume them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ckpt.integrations.accelerate import attach
from tests.helpers.processes import seed_everything
from tests.helpers.training import exact

SAMPLES = 22


class Numbers(Dataset[Any]):
    """Samples that say who they are, with a random augmentation that draws from every generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item() + random.random() + float(np.random.rand())


class Stream(IterableDataset[Any]):
    """The same samples, one after the other, without a word about the position."""

    def __iter__(self) -> Iterator[Any]:
        yield from (Numbers()[index] for index in range(SAMPLES))


class StatefulStream(Stream):
    """A stream that knows its position, as the datasets of Hugging Face do."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < SAMPLES:
            self.position += 1
            yield Numbers()[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def _shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, **options)


Kind = tuple[dict[str, Any], Callable[[], DataLoader[Any]]]
KINDS: dict[str, Kind] = {
    "sharded": ({}, _shuffled),
    "with a generator": ({}, lambda: _shuffled(generator=torch.Generator().manual_seed(5))),
    "seedable": ({"use_seedable_sampler": True}, _shuffled),
    "seedable and split": ({"use_seedable_sampler": True, "split_batches": True}, _shuffled),
    "split": ({"split_batches": True}, _shuffled),
    "not evened": ({"even_batches": False}, _shuffled),
    "dropping the last": ({}, lambda: _shuffled(drop_last=True)),
    "dispatched": ({"dispatch_batches": True}, _shuffled),
    "dispatched and split": ({"dispatch_batches": True, "split_batches": True}, _shuffled),
    "stateful": ({"use_stateful_dataloader": True}, _shuffled),
    "stateful and dispatched": ({"use_stateful_dataloader": True, "dispatch_batches": True}, _shuffled),
    "workers": ({}, lambda: _shuffled(num_workers=2, multiprocessing_context="fork")),
    "a stream": ({"dispatch_batches": False}, lambda: DataLoader(Stream(), batch_size=4)),
    "a stream, dispatched": ({}, lambda: DataLoader(Stream(), batch_size=4)),
    "a stateful stream": ({"dispatch_batches": False}, lambda: DataLoader(StatefulStream(), batch_size=4)),
    "a stateful stream, dispatched": ({}, lambda: DataLoader(StatefulStream(), batch_size=4)),
    "a stateful loader of a stream": (
        {"use_stateful_dataloader": True, "dispatch_batches": False},
        lambda: DataLoader(StatefulStream(), batch_size=4),
    ),
    "a stateful loader of a stream, dispatched": (
        {"use_stateful_dataloader": True},
        lambda: DataLoader(StatefulStream(), batch_size=4),
    ),
}


def new_accelerator(
    *, rank: int = 0, world_size: int = 1, loaders: dict[str, Any] | None = None, **options: Any
) -> Any:
    """An accelerator as a process finds it that has just been started."""
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    if world_size > 1:  # as a launcher sets them; the process group is there
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(number) for name, number in ranks.items()})
    config = DataLoaderConfiguration(**(loaders or {}))
    return Accelerator(cpu=True, dataloader_config=config, **options)


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    state = torch.get_rng_state()
    torch.manual_seed(7)  # the same weights on every rank and in every run
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
    torch.set_rng_state(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)


def reseed(rank: int, run: int) -> None:
    """Another run begins with other generators: what it then shares with an earlier one, it has taken over."""
    seed_everything(rank + 1000 * run)


@dataclass(frozen=True)
class Loop:
    """A training with Accelerate in a root, over one kind of loader, with plain `for` loops."""

    root: str
    kind: str = "sharded"
    rank: int = 0
    world_size: int = 1
    epochs: int = 3
    accumulate: int = 1

    def run(self, run: int = 0, stop: int | None = None, back: int | None = None) -> list[Any]:
        """Train to the end, or until a save after so many batches; what was seen: samples, noise, loss.

        After `back` batches everything is saved, and after one more that is trained it is loaded again.
        """
        reseed(self.rank, run)
        options, make = KINDS[self.kind]
        accelerator = new_accelerator(
            rank=self.rank, world_size=self.world_size, loaders=options, gradient_accumulation_steps=self.accumulate
        )
        loader, *parts = accelerator.prepare(make(), *build())
        with attach(accelerator, self.root) as manager:
            restored = manager.resume()
            assert not (restored and restored.approximated), restored
            seen: list[Any] = []
            for epoch in range(restored.epoch if restored else 0, self.epochs):
                for batch in loader:
                    loss = train_on(batch, accelerator, *parts)
                    seen.append([epoch, *(one.tolist() for one in batch), loss.hex(), accelerator.step])
                    if len(seen) == stop:
                        accelerator.save_state()
                        return seen
                    if len(seen) == back:
                        accelerator.save_state("here")
                    elif back and len(seen) == back + 1:
                        accelerator.load_state("here")
                        seen.pop()
                        back = None
            seen.append(exact([one.state_dict() for one in parts]))
        return seen


def train_on(batch: Any, accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> float:
    with accelerator.accumulate(model):
        loss = model(batch[1].float().reshape(-1, 1)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return float(loss.item())
