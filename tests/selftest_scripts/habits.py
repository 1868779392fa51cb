"""Loops as people write them, each with one habit that has made resumes inexact without a word."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ckpt

EPOCHS = 2
DATA = TensorDataset(torch.arange(48.0).view(24, 2) / 48)


class Parts:
    """A small model and what trains it."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)

    def manager(self, **options: Any) -> ckpt.StateManager:
        return ckpt.StateManager("out", model=self.model, optimizer=self.optimizer, **{"save_every": 2, **options})

    def backward(self, batch: torch.Tensor) -> None:
        self.model(batch).pow(2).mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def loader() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=3, shuffle=True)


def plain(parts: Parts) -> None:
    """Neither epochs() nor batches()."""
    data = loader()
    with parts.manager() as manager:
        manager.resume()
        for _ in range(EPOCHS):
            for (batch,) in data:
                parts.backward(batch)
                parts.update()
                manager.step()


def plain_inside_epochs(parts: Parts) -> None:
    data = loader()
    with parts.manager() as manager:
        for _ in manager.epochs(EPOCHS):
            for (batch,) in data:
                parts.backward(batch)
                parts.update()
                manager.step()


def full_batch(parts: Parts) -> None:
    """No loader at all: an epoch is one step."""
    with parts.manager() as manager:
        for _ in manager.epochs(12):
            parts.backward(DATA.tensors[0])
            parts.update()
            manager.step()


def validated(parts: Parts) -> None:
    """A second loader is gone through in the middle of the epoch."""
    data, held_out = loader(), loader()
    with parts.manager() as manager:
        for _ in manager.epochs(EPOCHS):
            for (batch,) in manager.batches(data):
                parts.backward(batch)
                parts.update()
                if manager.progress.step % 3 == 0:
                    with torch.no_grad():
                        sum(parts.model(other).sum() for (other,) in held_out)
                manager.step()


def accumulated(parts: Parts) -> None:
    """Windows of three by the count of steps, saves in between, gradients= not given."""
    with parts.manager() as manager:
        for _ in manager.epochs(EPOCHS):
            for (batch,) in manager.batches(loader()):
                parts.backward(batch)
                if (manager.progress.step + 1) % 3 == 0:
                    parts.update()
                manager.step()


def prefetched(parts: Parts) -> None:
    """One batch is read ahead, around batches()."""

    def ahead(batches: Iterable[Any]) -> Iterator[Any]:
        waiting = None
        for batch in batches:
            if waiting is not None:
                yield waiting
            waiting = batch
        if waiting is not None:
            yield waiting

    with parts.manager() as manager:
        for _ in manager.epochs(EPOCHS):
            for (batch,) in ahead(manager.batches(loader())):
                parts.backward(batch)
                parts.update()
                manager.step()


def prefetched_inside(parts: Parts) -> None:
    class Ahead:
        """Reads one batch ahead of whoever goes through it."""

        def __init__(self, data: DataLoader[Any]) -> None:
            self.data = data

        def __iter__(self) -> Iterator[Any]:
            waiting: list[Any] = []
            for batch in self.data:
                waiting.append(batch)
                if len(waiting) > 1:
                    yield waiting.pop(0)
            yield from waiting

    with parts.manager() as manager:
        for _ in manager.epochs(EPOCHS):
            for (batch,) in manager.batches(Ahead(loader())):
                parts.backward(batch)
                parts.update()
                manager.step()


class Stream(IterableDataset[Any]):
    """Shuffled by the process's own generator, or by the operating system's entropy."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def __iter__(self) -> Iterator[Any]:
        order = list(range(24))
        self.chance.shuffle(order)
        return (DATA[index] for index in order)


def streamed(parts: Parts) -> None:
    random.seed(5)
    _train_on(parts, DataLoader(Stream(random), batch_size=3))  # type: ignore[arg-type]


def _train_on(parts: Parts, data: DataLoader[Any]) -> None:
    with parts.manager() as manager:
        for _ in manager.epochs(EPOCHS):
            for (batch,) in manager.batches(data):
                parts.backward(batch)
                parts.update()
                manager.step()


def enumerated(parts: Parts) -> None:
    """Every third batch by a count that enumerate() makes."""
    with parts.manager() as manager:
        for _ in manager.epochs(EPOCHS):
            for index, (batch,) in enumerate(manager.batches(loader())):
                parts.backward(batch)
                if (index + 1) % 4 == 0:
                    parts.update()
                manager.step()


HABITS: dict[str, Callable[[Parts], None]] = {
    one.__name__: one
    for one in (
        plain, plain_inside_epochs, full_batch, validated, accumulated, prefetched, prefetched_inside, streamed,
        enumerated,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("habit", choices=HABITS)
    HABITS[parser.parse_args().habit](Parts())


if __name__ == "__main__":
    main()
