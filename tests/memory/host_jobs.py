"""Jobs whose ranks are on several hosts, as far as their memory is concerned."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckpt
from tests.helpers.processes import run_ranks


class DiedError(Exception):
    """Training ends in the middle."""


def train(
    rank: int, root: str, memories: list[str], options: dict[str, Any], last: int, expected: tuple[bool, int] | None
) -> None:
    """Train to a step and die there, after a resume from where it is expected: memory or not, and the step."""
    os.environ["CKPT_MEMORY_DIR"] = memories[rank]
    torch.manual_seed(1)
    model: nn.Module = nn.Linear(20, 20)
    wrapped = wrap(model, sharded=options.pop("sharded", False)) if torch.distributed.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(50 + rank)
    back = options.pop("back", None)
    options = {"save_every": 5, "memory": 2, **options}
    try:
        with ckpt.StateManager(
            root, model=wrapped, optimizer=optimizer, ranks=ckpt.RankOptions(timeout=30), **options
        ) as manager:
            restored = manager.resume() if back is None else manager.load_state(back)
            found = (restored.from_memory, restored.step) if restored is not None else None
            assert found == expected, str(restored)
            while manager.progress.step < last:
                optimizer.zero_grad()
                wrapped(torch.randn(3, 20)).pow(2).mean().backward()
                optimizer.step()
                manager.step()
                manager.wait()
                assert manager.session.memory is not None
                manager.session.memory.wait()
            raise DiedError
    except DiedError:
        Path(root, f"state-{last}-{rank}").write_text(repr([value.tolist() for value in local(model)]))


def wrap(model: nn.Module, *, sharded: bool) -> nn.Module:
    if not sharded:
        return DistributedDataParallel(model)
    fully_shard(model)
    return model


def local(model: nn.Module) -> list[torch.Tensor]:
    """This rank's values."""
    values = model.state_dict().values()
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


class Job:
    """A job of ranks, each with its directory of memory: the same for all of one host."""

    def __init__(self, folder: Path, *hosts: int, **options: Any) -> None:
        self.root, self.options = folder / "root", options
        self.memories = [folder / f"memory-{host}" for host in hosts]
        for path in (self.root, *self.memories):
            path.mkdir(exist_ok=True)

    def to(self, last: int, expected: tuple[bool, int] | None) -> list[str]:
        """Train to this step, and return the states of all ranks there."""
        memories = [str(path) for path in self.memories]
        world_size = len(memories)
        assert run_ranks(world_size, train, str(self.root), memories, self.options, last, expected) == [0] * world_size
        return [Path(self.root, f"state-{last}-{rank}").read_text() for rank in range(world_size)]

    def replace_host(self, host: int) -> None:
        """Another machine takes the place of a host: nothing is in its memory."""
        self.memories[host].rename(tempfile.mkdtemp(dir=self.root.parent))  # at once, whoever is still at work in it
        self.memories[host].mkdir()
