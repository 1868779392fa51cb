"""What is measured in each checkout. Every task is a context manager whose `sample` gives seconds by metric.

Imported by processes whose ckpt may be another version: nothing but its public names may be used.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.nn import functional

import ckpt
from benchmarks.shared.fsdp import build, local_shards
from benchmarks.shared.measure import cold, seconds, warm
from benchmarks.shared.state import State, Transformer, fingerprints

T = TypeVar("T")


class Task(AbstractContextManager["Task"]):
    """Measures one thing again and again. The first sample of a process is not counted: it warms up."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder, self.size = folder, megabytes * 1e6

    def sample(self) -> dict[str, float]:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release what the task holds."""


def is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def on_all_ranks(call: Callable[[], T]) -> T | None:
    """What the main rank's call returns, on every rank."""
    if not dist.is_initialized():
        return call()
    shared: list[T | None] = [call() if is_main() else None]
    dist.broadcast_object_list(shared)
    return shared[0]


def at_rest(do: Callable[[], object]) -> float:
    """Seconds of something that starts with no dirty pages, on all ranks at once."""
    if is_main():
        os.sync()
    if dist.is_initialized():
        dist.barrier()
    return seconds(do)


class Save(Task):
    """`save_state(wait=True)` of a model with its AdamW state."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        super().__init__(folder, megabytes)
        self.state = State.trained(self.size)
        self.manager = ckpt.StateManager(folder, model=self.state.model, optimizer=self.state.optimizer)

    def sample(self) -> dict[str, float]:
        took = at_rest(lambda: self.manager.save_state("saved", wait=True))
        shutil.rmtree(self.folder / "saved")
        return {"save_state(wait=True)": took}

    def __exit__(self, *error: object) -> None:
        self.manager.close()


class Load(Task):
    """`load_state` into objects without moments, as in a new run, from the page cache and from the disk."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        super().__init__(folder, megabytes)
        state = State.trained(self.size)
        with ckpt.StateManager(folder, model=state.model, optimizer=state.optimizer) as manager:
            manager.save_state("saved", wait=True)
        self.expected = fingerprints(state.tensors())
        self.verified = False

    def sample(self) -> dict[str, float]:
        return {"load_state, warm": self.load(warm), "load_state, cold": self.load(cold)}

    def load(self, prepare: Callable[[Path], None]) -> float:
        state = State.to_load_into(self.size)
        prepare(self.folder / "saved")
        took = at_rest(lambda: self.resume(state))
        if not self.verified:
            assert fingerprints(state.tensors()) == self.expected, "what was loaded is not what was saved"
            self.verified = True
        return took

    def resume(self, state: State) -> None:
        with ckpt.StateManager(self.folder, model=state.model, optimizer=state.optimizer) as manager:
            manager.load_state("saved")


class Blocked(Task):
    """A background save in a loop that reads its loss in every step: the call, and what all steps lose by it."""

    STEPS = 5

    def __init__(self, folder: Path, megabytes: int) -> None:
        super().__init__(folder, megabytes)
        model = Transformer.of(self.size).to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        self.state = State(model, torch.optim.AdamW(model.parameters(), lr=1e-6))
        self.tokens = torch.arange(8).reshape(1, 8)
        self.manager = ckpt.StateManager(folder, model=model, optimizer=self.state.optimizer)
        self.step()

    def sample(self) -> dict[str, float]:
        call: list[float] = []
        loop = at_rest(lambda: self.loop(call))
        self.manager.wait()
        shutil.rmtree(self.folder / "saved")
        return {"save_state() in a loop, the call": call[0], f"save_state() in a loop, {self.STEPS} steps": loop}

    def loop(self, call: list[float]) -> None:
        for number in range(self.STEPS):
            if number == 1:
                call.append(seconds(lambda: self.manager.save_state("saved")))
            self.step()

    def step(self) -> float:
        model, optimizer = self.state.model, self.state.optimizer
        loss = functional.cross_entropy(model(self.tokens).flatten(0, 1), self.tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def __exit__(self, *error: object) -> None:
        self.manager.close()


class Sharded(Task):
    """A model sharded with FSDP 2 over two ranks: `save_state(wait=True)`, and `load_state` from the page cache."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        super().__init__(folder, megabytes)
        dist.init_process_group("gloo")
        self.model, self.optimizer = build(megabytes, seed=1)
        self.target = build(megabytes, seed=2)

    def sample(self) -> dict[str, float]:
        return {"sharded save_state(wait=True)": at_rest(self.save), "sharded load_state, warm": self.load()}

    def save(self) -> None:
        with ckpt.StateManager(self.folder, model=self.model, optimizer=self.optimizer) as manager:
            manager.save_state("saved", wait=True)
        dist.barrier()

    def load(self) -> float:
        if is_main():
            warm(self.folder / "saved")
        took = at_rest(self.resume)
        shards = zip(local_shards(self.model, self.optimizer), local_shards(*self.target), strict=True)
        assert all(torch.equal(saved, loaded) for saved, loaded in shards), "what was loaded is not what was saved"
        dist.barrier()
        if is_main():
            shutil.rmtree(self.folder / "saved")
        dist.barrier()
        return took

    def resume(self) -> None:
        model, optimizer = self.target
        with ckpt.StateManager(self.folder, model=model, optimizer=optimizer) as manager:
            manager.load_state("saved")
        dist.barrier()

    def __exit__(self, *error: object) -> None:
        dist.destroy_process_group()


class Merge(Task):
    """`merge` of a folder that two ranks wrote with torch.distributed.checkpoint, into one safetensors file."""

    def sample(self) -> dict[str, float]:
        source, target = self.folder.parent / SOURCE, self.folder / "model.safetensors"
        warm(source)
        took = at_rest(lambda: ckpt.merge(source, target))
        target.unlink()
        return {"merge": took}


MARK = "@sample "  # begins the lines with samples on standard output; other lines are ignored
SOURCE = "source"  # beside the folders of the checkouts
TASKS: dict[str, type[Task]] = {
    "save": Save,
    "load": Load,
    "blocked": Blocked,
    "sharded": Sharded,
    "merge": Merge,
}
RANKS = {"sharded": 2}  # of tasks that torchrun starts
