"""Small training jobs that save in the middle of their second epoch, and make one step more.

They need nothing but `ckpt`, so that the code of any commit can run them: `python jobs.py write FOLDER` writes a
checkpoint of each with the `ckpt` that PYTHONPATH leads to, and reports of the state at the save and a step later.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ckpt

NAME = "saved"  # of the checkpoint
SAVED_AT = 6  # of four steps in an epoch
DEADLINE = 250.0
Step = Callable[[torch.Tensor], None]


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Samples that say who they are, with an augmentation that draws from torch's generator."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.linspace(0, 1, 3) * index / self.size + torch.rand(3) / 8, index


class Counter:
    """An object that is registered."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"count": 0, "names": [], "mean": 0.0}

    def count(self, value: float) -> None:
        count = self.state["count"] + 1
        mean = self.state["mean"] + (value - self.state["mean"]) / count
        self.state = {"count": count, "names": [*self.state["names"], f"step {count}"][-2:], "mean": mean}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@dataclass
class Job:
    """What a manager is given, the data, and a step of training."""

    objects: dict[str, Any]
    loader: DataLoader[Any]
    step: Step
    registered: dict[str, Any] = field(default_factory=dict)

    def state(self) -> dict[str, str]:
        return dict(_flat("", self.objects | self.registered))


def alone(seed: int) -> Job:
    """One process with everything that has state: two models, mixed precision, a schedule, a generator, a counter."""
    torch.manual_seed(seed)
    models = {"first": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "second": nn.Linear(4, 1)}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=0.05) for name, model in models.items()}
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizers["first"], max_lr=0.1, total_steps=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    noise, counter = torch.Generator().manual_seed(seed), Counter()

    def step(inputs: torch.Tensor) -> None:
        noisy = inputs + torch.rand(inputs.shape, generator=noise) / 8
        loss = models["second"](models["first"](noisy)).pow(2).mean()
        scaler.scale(loss).backward()
        for optimizer in optimizers.values():
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        scheduler.step()
        counter.count(random.random())

    objects = {"model": models, "optimizer": optimizers, "scheduler": scheduler, "scaler": scaler}
    loader = DataLoader(Samples(12), batch_size=3, shuffle=True)
    return Job(objects, loader, step, {"noise": noise, "counter": counter})


def fsdp2(seed: int) -> Job:
    """FSDP 2, saved in shards; rows do not divide evenly."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    fully_shard(model)
    return _on_ranks(model)


def own_state(seed: int) -> Job:
    """Every rank has values of its own under the same names."""
    torch.manual_seed(seed + 10 * dist.get_rank())
    return _on_ranks(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))


def _on_ranks(model: nn.Module) -> Job:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def step(inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        optimizer.step()

    torch.manual_seed(dist.get_rank())
    samples = Samples(12 * dist.get_world_size())
    loader = DataLoader(samples, batch_size=3, sampler=DistributedSampler(samples, seed=3))
    return Job({"model": model, "optimizer": optimizer}, loader, step)


BUILDERS: dict[str, Callable[[int], Job]] = {"alone": alone, "fsdp2": fsdp2, "own_state": own_state, "together": fsdp2}
RANKS = {"alone": 1, "fsdp2": 2, "own_state": 2, "together": 4}
SINCE = {"together"}  # cases that the last commit before the packages does not know


def as_if_many() -> None:
    """The ranks of a host write files together, and documents are lines of one, as with more than 64 ranks."""
    from ckpt.save import transaction

    transaction.TOGETHER, transaction.ALONE = 1, 1
    os.environ["LOCAL_WORLD_SIZE"] = "2"


def train(rank: int, action: str, case: str, root: str, report: str) -> None:
    """Write a checkpoint, or read it and continue; report the state at the save and one step later."""
    torch.set_num_threads(1)
    random.seed(rank)
    if case == "together" and action == "write":
        as_if_many()
    job = BUILDERS[case](1 if action == "write" else 2)
    reported: dict[str, Any] = {}
    options: dict[str, Any]
    if hasattr(ckpt, "RankOptions"):
        options = {"ranks": ckpt.RankOptions(timeout=120), "saving": ckpt.SaveOptions(background=False)}
    else:  # the first commits
        options = {"timeout": 120, "background": False}
    with ckpt.StateManager(root, **job.objects, **options) as manager:
        manager.register(**job.registered)
        if action == "read":
            manager.load_state(NAME)
            reported["saved"] = job.state()
        for epoch in manager.epochs(2):
            for inputs, indices in manager.batches(job.loader):
                job.step(inputs)
                manager.step()
                if manager.progress.step == SAVED_AT:
                    manager.save_state(NAME, metrics={"loss": 0.5})
                    reported["saved"] = job.state()
                elif manager.progress.step > SAVED_AT:
                    reported["later"] = job.state() | dict(_flat("", {"torch": torch, "python": random}))
                    reported["data"] = [epoch, manager.progress.samples, *indices.tolist()]
                    Path(f"{report}-{rank}.json").write_text(json.dumps(reported, indent=1))
                    return


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every leaf of a state by its name, as a text that two values share only if they are equal in every bit."""
    if isinstance(value, torch.Tensor):
        own = value.to_local() if hasattr(value, "to_local") else value
        raw = own.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        yield name, f"{str(own.dtype).removeprefix('torch.')} {list(own.shape)} {bytes(raw).hex()}"
    elif isinstance(value, torch.Generator) or value in (torch, random):
        state = value.getstate() if value is random else bytes(_random_state(value).tolist())
        yield name, hashlib.sha256(repr(state).encode()).hexdigest()
    elif hasattr(value, "state_dict"):
        yield from _flat(name, value.state_dict())
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}/{key}", inner)
    elif isinstance(value, list | tuple):
        yield from _flat(name, dict(enumerate(value)))
    else:
        yield name, value.hex() if isinstance(value, float) else repr(value)


def _random_state(source: Any) -> torch.Tensor:
    state: torch.Tensor = source.get_rng_state() if source is torch else source.get_state()
    return state


def launch(action: str, case: str, places: Mapping[Path, Path], code: Path) -> None:
    """Run a job for each root, with its report, by the `ckpt` in a folder; every rank is a process of its own."""
    from torch._C._distributed_c10d import TCPStore

    world_size = RANKS[case]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "PYTHONPATH": str(code), "GLOO_SOCKET_IFNAME": "lo"}
    named = [str(path) for place in places.items() for path in place]
    command = [sys.executable, __file__, action, case, str(code), str(store.port)]
    ranks = [
        subprocess.Popen([*command, str(rank), *named], cwd="/", env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=DEADLINE)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(said)


def _rank(action: str, case: str, code: str, port: int, rank: int, *places: str) -> None:
    from torch._C._distributed_c10d import TCPStore

    assert Path(ckpt.__file__).is_relative_to(code), f"{ckpt.__file__} is not in {code}"
    if RANKS[case] > 1:
        store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS[case])
    for root, report in zip(places[::2], places[1::2], strict=True):
        train(rank, action, case, root, report)
    if dist.is_initialized():
        dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    if len(arguments) > 2:
        action, case, code, port, rank, *places = arguments
        _rank(action, case, code, int(port), int(rank), *places)
        return
    action, folder = arguments
    for case in RANKS:
        place = Path(folder, case).absolute()
        launch(action, case, {place: place}, Path(ckpt.__file__).parents[1])


if __name__ == "__main__":
    main(sys.argv[1:])
