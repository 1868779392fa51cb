"""A training job that kills itself at random moments: `torchrun --max-restarts N ... -m tests.memory.killed_training`.

Every attempt notes what it found in memory, where it resumed, every step's loss, and at the end a digest of all state.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ckpt
from tests.helpers.simulated_device import simulate
from tests.helpers.training import exact

SAMPLES = 512
BATCH = 4
SAVE_EVERY, MEMORY_EVERY = 40, 2


@dataclass(frozen=True)
class Plan:
    """Where to train, how many steps, how often to die, and who does: one rank in turn, `all` of them, or
    whoever is killed `by others`."""

    root: str
    notes: str
    steps: int
    kills: int = 0
    who: str = "one"
    seed: int = 0


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.linspace(0, 1, 256) * index / SAMPLES + 0.1 * torch.rand(())


class Notes:
    """Lines of JSON, one file for each rank, written whole: the process may be killed at any moment."""

    def __init__(self, folder: str, rank: int) -> None:
        self._file = os.open(f"{folder}/rank-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, **facts: Any) -> None:
        os.write(self._file, json.dumps({**facts, "at": time.time()}).encode() + b"\n")


def noted(folder: str, rank: int = 0) -> list[dict[str, Any]]:
    """What a rank has noted so far, in all attempts."""
    try:
        lines = Path(folder, f"rank-{rank}").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def furthest_steps(folder: str, world_size: int) -> list[int]:
    """How far each rank came in any attempt: one that is killed may be a step behind the others."""
    return [max((line.get("step", 0) for line in noted(folder, rank)), default=0) for rank in range(world_size)]


def newest_step(*folders: Path) -> int:
    """The step of the newest committed checkpoint in these roots; 0 if there is none."""
    manifests = [json.loads(path.read_text()) for folder in folders for path in folder.glob("*/manifest.json")]
    newest = max(manifests, key=lambda manifest: int(manifest["sequence"]), default=None)
    return int(newest["progress"]["step"]) if newest else 0


def die_later(plan: Plan, rank: int, world_size: int, attempt: int) -> None:
    """Start a thread that kills this process after a while, if its turn is now."""
    if attempt >= plan.kills or plan.who == "by others" or (plan.who == "one" and attempt % world_size != rank):
        return
    moments = random.Random(f"{plan.seed}-{attempt}" if plan.who == "all" else f"{plan.seed}-{attempt}-{rank}")
    delay = moments.uniform(0.05, 1.0)

    def die() -> None:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def average_gradients(model: nn.Module, world_size: int) -> None:
    """Summed in the order of ranks: an all-reduce adds four numbers in an order that depends on its buckets."""
    if world_size > 1:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        mine = torch.cat([gradient.reshape(-1) for gradient in gradients])
        each = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(each, mine)
        mean = torch.stack(each).sum(0) / world_size
        parts = torch.split(mean, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def train(plan: Plan, rank: int, world_size: int, attempt: int) -> None:
    notes = Notes(plan.notes, rank)
    if attempt % 2:  # then snapshots go straight into the files of their slot, of which the moments are large enough
        simulate(pytest.MonkeyPatch())
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(256, 400), nn.Dropout(0.1), nn.Linear(400, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler: DistributedSampler[Any] = DistributedSampler(Samples(), world_size, rank, seed=3)
    loader = DataLoader(Samples(), BATCH, sampler=sampler)
    torch.manual_seed(100 + rank)
    if rank == 0:
        slots = Path(os.environ["CKPT_MEMORY_DIR"]).glob("ckpt-*/slots")
        notes.add(attempt=attempt, there=newest_step(Path(plan.root), *slots))
    with ckpt.StateManager(
        plan.root, model=model, optimizer=optimizer, save_every=SAVE_EVERY, memory=MEMORY_EVERY,
        keep=ckpt.Keep(last=2), ranks=ckpt.RankOptions(timeout=20.0),
    ) as manager:  # fmt: skip
        restored = manager.resume()
        notes.add(resumed=restored.step if restored else 0, memory=bool(restored and restored.from_memory))
        die_later(plan, rank, world_size, attempt)
        last = max(plan.steps, *furthest_steps(plan.notes, world_size)) if attempt >= plan.kills else None
        for _ in manager.epochs(1000):
            sampler.set_epoch(manager.progress.epoch)
            for batch in manager.batches(loader):
                optimizer.zero_grad()
                loss = model(batch).pow(2).mean()
                loss.backward()
                average_gradients(model, world_size)
                optimizer.step()
                manager.step()
                notes.add(step=manager.progress.step, loss=float(loss.detach()).hex())
                if manager.progress.step == last:
                    break
            if manager.progress.step == last:
                break
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.rand(4)}
    notes.add(final=manager.progress.step, digest=exact(state))


def attempt_forked(rank: int, plan: Plan, memory: str, attempt: int) -> None:
    """One attempt as a rank that a test has started, in a process group if there are several."""
    os.environ["CKPT_MEMORY_DIR"] = memory
    train(plan, rank, dist.get_world_size() if dist.is_initialized() else 1, attempt)


def join_group(world_size: int, attempt: int) -> None:
    """Under a prefix of this attempt: torchrun's store has the addresses of killed ranks still, which Gloo may read."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False)
    own = PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group("gloo", store=own, rank=int(os.environ["RANK"]), world_size=world_size)


def main(plan: Plan) -> None:
    torch.set_num_threads(1)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if world_size > 1:
        join_group(world_size, attempt)
    train(plan, int(os.environ.get("RANK", "0")), world_size, attempt)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
