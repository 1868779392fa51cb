"""Ranks that share a host's memory, and hosts that each have their own: all resume at one step, or from the root."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
from tests.helpers.processes import run_ranks


class DiedError(Exception):
    """Training ends in the middle."""


def train(rank: int, root: str, memories: list[str], last: int, expected: tuple[bool, int] | None) -> None:
    """Train to a step and die there, after a resume from where it is expected: memory or not, and the step."""
    os.environ["CKPT_MEMORY_DIR"] = memories[rank]
    torch.manual_seed(1)
    model: nn.Module = nn.Linear(20, 20)
    wrapped = DistributedDataParallel(model) if torch.distributed.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(50 + rank)
    options: dict[str, Any] = {"save_every": 5, "memory_every": 2, "follow": False}
    try:
        with ckpt.StateManager(
            root, model=wrapped, optimizer=optimizer, ranks=ckpt.RankOptions(timeout=30), **options
        ) as manager:
            restored = manager.resume()
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
        Path(root, f"state-{last}-{rank}").write_text(repr([value.tolist() for value in model.state_dict().values()]))


class Job:
    """A job of ranks, each with its directory of memory: the same for all of one host."""

    def __init__(self, folder: Path, *hosts: int) -> None:
        self.root = folder / "root"
        self.memories = [folder / f"memory-{host}" for host in hosts]
        for path in (self.root, *self.memories):
            path.mkdir(exist_ok=True)

    def to(self, last: int, expected: tuple[bool, int] | None) -> list[str]:
        """Train to this step, and return the states of all ranks there."""
        memories = [str(path) for path in self.memories]
        world_size = len(memories)
        assert run_ranks(world_size, train, str(self.root), memories, last, expected) == [0] * world_size
        return [Path(self.root, f"state-{last}-{rank}").read_text() for rank in range(world_size)]


@pytest.fixture
def straight(tmp_path: Path) -> list[str]:
    (tmp_path / "straight").mkdir()
    return Job(tmp_path / "straight", 0, 0).to(12, None)


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=["one host", "two hosts"])
def test_all_ranks_resume_from_memory(tmp_path: Path, straight: list[str], hosts: tuple[int, int]) -> None:
    job = Job(tmp_path, *hosts)
    job.to(9, None)
    assert job.to(12, (True, 8)) == straight


def test_a_host_that_was_replaced_makes_all_take_the_roots(tmp_path: Path, straight: list[str]) -> None:
    job = Job(tmp_path, 0, 1)
    job.to(9, None)
    shutil.rmtree(job.memories[1])
    job.memories[1].mkdir()
    assert job.to(12, (False, 5)) == straight


def test_a_host_that_lacks_the_newest_makes_all_take_the_older(tmp_path: Path, straight: list[str]) -> None:
    job = Job(tmp_path, 0, 1)
    job.to(9, None)
    for slot in job.memories[1].glob("ckpt-*/slots/step-00000008"):
        shutil.rmtree(slot)
    assert job.to(12, (True, 6)) == straight


def test_a_flipped_bit_on_one_host_makes_all_take_the_older(tmp_path: Path, straight: list[str]) -> None:
    job = Job(tmp_path, 0, 1)
    job.to(9, None)
    (file,) = job.memories[1].glob("ckpt-*/slots/step-00000008/model.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert job.to(12, (True, 6)) == straight


def test_another_number_of_ranks_resumes_from_memory_too(tmp_path: Path) -> None:
    Job(tmp_path, 0, 0).to(9, None)
    Job(tmp_path, 0).to(12, (True, 8))
