"""A small training job with everything that has state, for tests that kill and resume it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ckpt

SAMPLES = 36
WINDOW = 3


class Counter:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@dataclass(frozen=True)
class Job:
    """What to train and when to die. `kill` is a step and where in it: `before` the optimizer, or `after` its end."""

    root: str
    data: str = "shuffle"
    numerics: str = "fp32"
    epochs: int = 2
    save_every: int = 2
    kill: tuple[int, str] | None = None
    record: str | None = None


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Samples that say who they are, with a random augmentation that draws from every generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return torch.linspace(0, 1, 6) * index / SAMPLES + 0.1 * noise, index


def build(numerics: str) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    generator_state = torch.get_rng_state()
    torch.manual_seed(7)  # the same weights on every rank and in every run
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.ReLU(), nn.Linear(12, 1))
    torch.set_rng_state(generator_state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=200)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) if numerics == "scaler" else None
    return model, optimizer, scheduler, scaler


def loader_for(data: str) -> Iterable[Any]:
    if data == "distributed":
        world = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        sampler: DistributedSampler[Any] = DistributedSampler(Samples(), num_replicas=world[0], rank=world[1], seed=3)
        return DataLoader(Samples(), batch_size=4, sampler=sampler)
    if data == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        stateful: Iterable[Any] = StatefulDataLoader(Samples(), batch_size=4, shuffle=True)
        return stateful
    if data == "workers":
        return DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=2, multiprocessing_context="fork")
    return DataLoader(Samples(), batch_size=4, shuffle=True)


def train(rank: int, job: Job) -> None:
    """Train, and leave a record: every step's samples and loss, and a digest of all state at the end."""
    model, optimizer, scheduler, scaler = build(job.numerics)
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    steps: dict[int, Any] = {}
    with ckpt.StateManager(
        job.root,
        model=wrapped,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        save_every=job.save_every,
        saving=ckpt.SaveOptions(gradients=job.numerics == "accumulation"),
    ) as manager:
        loader = loader_for(job.data)
        for epoch in manager.epochs(job.epochs):
            for inputs, indices in manager.batches(loader):
                _die_if(job, manager.progress.step, "after", manager)
                step = manager.progress.step + 1
                loss = _forward(wrapped, inputs)
                _backward(loss, scaler)
                _die_if(job, step, "before", manager)
                if job.numerics != "accumulation" or step % WINDOW == 0:
                    _update(optimizer, scheduler, scaler)
                steps[step] = [epoch, indices.tolist(), float(loss).hex()]
                manager.step(metrics={"loss": loss})
        if job.record:
            final = digest(model, optimizer, scheduler, scaler)
            approximated = dict(manager.restored.approximated) if manager.restored else {}
            record = {"steps": steps, "final": final, "samples": manager.progress.samples, "approximated": approximated}
            Path(f"{job.record}-{rank}.json").write_text(json.dumps(record))


def _forward(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).pow(2).mean()
    return loss


def _backward(loss: torch.Tensor, scaler: Any) -> None:
    (scaler.scale(loss) if scaler else loss).backward()


def _update(optimizer: torch.optim.Optimizer, scheduler: Any, scaler: Any) -> None:
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def _die_if(job: Job, step: int, where: str, manager: ckpt.StateManager) -> None:
    if job.kill == (step, where):
        if where == "after":
            manager.wait()  # what was saved is committed
        os.kill(os.getpid(), signal.SIGKILL)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, scaler: Any) -> dict[str, str]:
    """A hash of every bit of state, by kind. RNG is looked at by drawing from it."""
    draws = (torch.rand(4).tolist(), random.random(), np.random.rand(4).tolist())
    states = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict() if scaler else None,
        "rng": draws,
    }
    return {kind: hashlib.sha256(exact(state).encode()).hexdigest() for kind, state in states.items()}


def slow_losses(manager: Any, model: Any, optimizer: Any) -> Iterator[float]:
    """Train for an epoch of 60 steps, each of which takes 0.02 s. Yields the loss after every step."""
    for _ in manager.epochs(1):
        for batch in manager.batches(list(torch.arange(120.0).reshape(60, 1, 2))):
            time.sleep(0.02)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            manager.step()
            yield loss.item()


def exact(value: Any) -> str:
    """A text that two values share only if they are equal in every bit."""
    if isinstance(value, torch.Tensor):
        value = getattr(value, "to_local", lambda: value)()  # this rank's shard
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype}{list(value.shape)}{hashlib.sha256(data).hexdigest()}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{exact(value[key])}" for key in sorted(value, key=repr)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(exact, value)) + "]"
    return value.hex() if isinstance(value, float) else repr(value)


def records(path: str, world_size: int) -> list[Any]:
    return [json.loads(Path(f"{path}-{rank}.json").read_text()) for rank in range(world_size)]
