"""Training with the real Accelerate, saved by it and loaded by it, in one process or as a rank of several."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckpt
from tests.helpers.training import digest


class Seen:
    """An object of the user's own, with a state of many kinds."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def see(self) -> None:
        self.state = {
            "words": Counter(["a", "b", "a"]),
            "pair": (1, 2.5),
            "set": {3, 4},
            "bytes": b"\x00\xff",
            "average": torch.linspace(0, 1, 5),
            "long": 1 << 80,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Tied(nn.Module):
    """A head that is the embedding, as language models have it, a buffer of integers, and a name like DDP's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.module = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.places = nn.Buffer(torch.arange(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.module(self.embed(tokens))))
        return result


@dataclass
class Run:
    """Everything that a run has, not prepared yet."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: Any
    seen: Seen = field(default_factory=Seen)

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}


def build(*, scaler: bool, seed: int = 0) -> Run:
    torch.manual_seed(seed)
    model = Tied()
    decayed = [model.embed.weight, model.module.weight]
    others = [model.module.bias, *model.norm.parameters()]
    groups: list[dict[str, Any]] = [
        {"params": others, "weight_decay": 0.0},
        {"params": decayed},
    ]  # not in the order of the model's names
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    return Run(model, optimizer, scheduler, torch.amp.GradScaler("cpu", init_scale=256.0) if scaler else None)


def accelerator_for(run: Run) -> tuple[Any, nn.Module]:
    """The real thing, and the model that it has prepared. On a CPU it has no scaler, unless it is given one."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == (dist.get_world_size() if dist.is_initialized() else 1)
    model, _, _ = accelerator.prepare(run.model, run.optimizer, run.scheduler)
    accelerator.scaler = run.scaler
    accelerator.register_for_checkpointing(run.seen)
    return accelerator, model


def train(run: Run, model: nn.Module, steps: int = 3) -> None:
    for _ in range(steps):
        loss = model(torch.randint(11, (4,))).pow(2).mean()
        (run.scaler.scale(loss) if run.scaler else loss).backward()
        if run.scaler:
            run.scaler.step(run.optimizer)
            run.scaler.update()
        else:
            run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()
    run.seen.see()


def record(run: Run, path: str, rank: int) -> None:
    """What the state is, in every bit, as a file for each rank. Draws from the generators."""
    found = digest(run.model, run.optimizer, run.scheduler, run.scaler)
    state = {key: sorted(value) if isinstance(value, set) else value for key, value in run.seen.state.items()}
    Path(f"{path}-{rank}.json").write_text(json.dumps({**found, "seen": repr(state)}, sort_keys=True))


def recorded(path: Path, ranks: int) -> list[str]:
    return [Path(f"{path}-{rank}.json").read_text() for rank in range(ranks)]


def save_theirs(rank: int, folder: str, scaler: bool, safe: bool) -> None:
    """Train, and let Accelerate save."""
    run = build(scaler=scaler)
    accelerator, model = accelerator_for(run)
    torch.manual_seed(50 + rank)
    train(run, model)
    accelerator.step = 5
    accelerator.save_state(folder, safe_serialization=safe)
    record(run, f"{folder}-saved", rank)


def load_theirs(rank: int, folder: str, step: int, out: str, scaler: bool) -> None:
    """Let Accelerate load into something else."""
    run = build(scaler=scaler, seed=9)
    accelerator, _ = accelerator_for(run)
    accelerator.load_state(folder)
    assert accelerator.step == step
    record(run, out, rank)


def load_ours(rank: int, root: str, name: str | None, out: str, scaler: bool, wrapped: bool = True) -> None:
    """Let a manager load into something else."""
    run = build(scaler=scaler, seed=9)
    parts = run.parts()
    if wrapped and dist.is_initialized():
        parts["model"] = nn.parallel.DistributedDataParallel(run.model)
    with ckpt.StateManager(root, **parts) as manager:
        manager.register(**{"custom.0": run.seen})
        restored = manager.load_state(name)
        assert restored.skipped == {}
        assert list(restored.approximated) == ["progress"]
    record(run, out, rank)


def save_ours(rank: int, root: str, scaler: bool) -> None:
    """Train with a manager alone."""
    run = build(scaler=scaler)
    parts = run.parts()
    if dist.is_initialized():
        parts["model"] = nn.parallel.DistributedDataParallel(run.model)
    torch.manual_seed(50 + rank)
    with ckpt.StateManager(root, **parts) as manager:
        manager.register(seen=run.seen)
        train(run, parts["model"])
        manager.save_state("x", wait=True)
    record(run, f"{root}-saved", rank)
