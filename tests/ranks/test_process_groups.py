"""A manager of some ranks of a job: `RankOptions(process_group=...)`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ckpt
from tests.helpers.processes import run_alone, run_ranks

pytestmark = pytest.mark.slow

PAIRS = [[0, 2], [3, 1]]  # neither contiguous nor, in the second, in order
STEPS = 2


class Job:
    """One of two models that are trained side by side, each by a pair of ranks."""

    def __init__(self, rank: int, how: str, seed: int | None = None) -> None:
        groups = [dist.new_group(pair) for pair in PAIRS]
        self.number = next(number for number, pair in enumerate(PAIRS) if rank in pair)
        self.group = groups[self.number]
        self.place = dist.get_process_group_ranks(self.group).index(rank)
        torch.manual_seed(self.number if seed is None else seed)
        self.model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        mesh = DeviceMesh.from_group(self.group, "cpu")
        if how == "fsdp 2":
            fully_shard(self.model, mesh=mesh)
        elif how == "fsdp 1":
            self.model = FullyShardedDataParallel(self.model, self.group, device_id=torch.device("cpu"))
        else:
            self.model = DistributedDataParallel(self.model, process_group=self.group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def train(self, steps: int = STEPS) -> None:
        torch.manual_seed(self.place)  # each rank of a pair has other data, and the pairs have the same
        for _ in range(steps):
            self.model(torch.randn(4, 5)).pow(2).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def manager(self, folder: str, **options: Any) -> ckpt.StateManager:
        given = ckpt.RankOptions(timeout=60, process_group=self.group, **options)
        return ckpt.StateManager(
            Path(folder, f"model-{self.number}"), model=self.model, optimizer=self.optimizer, ranks=given
        )


def _held(*objects: Any) -> list[bytes]:
    """The bytes of this rank's tensors of a model and its optimizer."""
    model, optimizer = objects
    states = [state[name] for state in optimizer.state.values() for name in sorted(state)]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in (*model.parameters(), *states)]
    return [bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()) for value in local]


def _train_and_resume(rank: int, folder: str, how: str) -> None:
    job = Job(rank, how)
    with job.manager(folder) as manager:
        job.train()
        if how == "fsdp 1" and job.number == 1:
            with pytest.raises(ckpt.UnsupportedError, match="only in a process group that contains rank 0 of the job"):
                manager.save_state("half")
            return
        manager.save_state("half")
        job.train()
    straight = _held(job.model, job.optimizer)
    for broadcast in (None, True):
        again = Job(rank, how, seed=99)
        with again.manager(folder, broadcast=broadcast) as manager:
            manager.load_state("half")
            again.train()
        assert _held(again.model, again.optimizer) == straight


@pytest.mark.parametrize("how", ["fsdp 2", "fsdp 1", "ddp"])
def test_models_side_by_side_are_saved_and_resumed_each_by_its_own_ranks(tmp_path: Path, how: str) -> None:
    assert run_ranks(4, _train_and_resume, str(tmp_path), how) == [0] * 4
    for number in range(1 if how == "fsdp 1" else 2):
        root = tmp_path / f"model-{number}"
        assert [found.name for found in ckpt.list_checkpoints(root)] == ["half"]
        assert json.loads((root / "half" / "manifest.json").read_text())["world_size"] == 2
        assert ckpt.verify(root) == {"half": []}
    assert run_alone(_load_into_plain, str(tmp_path), how) == 0
    if how == "fsdp 2":
        assert run_ranks(4, _load_by_all, str(tmp_path)) == [0] * 4


def _expected(number: int) -> nn.Module:
    """The model of a pair after `STEPS` steps, trained by one process with the data of both ranks."""
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generators = [torch.Generator().manual_seed(place) for place in range(2)]
    for _ in range(STEPS):
        for generator in generators:
            (model(torch.randn(4, 5, generator=generator)).pow(2).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _load_into_plain(rank: int, folder: str, how: str) -> None:
    for number in range(1 if how == "fsdp 1" else 2):
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        ckpt.load_model(Path(folder, f"model-{number}", "half"), model)
        for ours, theirs in zip(model.parameters(), _expected(number).parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def _load_by_all(rank: int, folder: str) -> None:
    """What two ranks of a group have saved is loaded by all four of the job."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ckpt.StateManager(Path(folder, "model-1"), model=model, optimizer=optimizer) as manager:
        restored = manager.load_state("half")
    assert restored.resharded.keys() == {"model", "optimizer"}
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    ckpt.load_model(Path(folder, "model-1", "half"), plain)
    assert all(torch.equal(whole[name], value) for name, value in plain.state_dict().items())


def _save_on_a_pair_alone(rank: int, folder: str) -> None:
    """The ranks of one group save, while the others do nothing that has to do with ckpt."""
    group = dist.new_group([1, 3])
    if rank in (0, 2):
        return
    model = nn.Linear(2, 2)
    options = ckpt.RankOptions(timeout=60, process_group=group)
    with ckpt.StateManager(folder, model=model, ranks=options) as manager:
        manager.save_state("only")
    assert dist.get_rank(group) == (rank - 1) // 2


def test_ranks_outside_the_group_have_nothing_to_do(tmp_path: Path) -> None:
    assert run_ranks(4, _save_on_a_pair_alone, str(tmp_path)) == [0] * 4
    assert [found.name for found in ckpt.list_checkpoints(tmp_path)] == ["only"]


def _refused(rank: int, folder: str) -> None:
    group = dist.new_group([2, 3])
    options = ckpt.RankOptions(timeout=2, process_group=group)
    if rank < 2:
        with pytest.raises(ckpt.ConfigError, match=f"rank {rank} is not in the process_group"):
            ckpt.StateManager(folder, model=nn.Linear(2, 2), ranks=options)
    if rank == 3:  # the other one never comes: it is named by its number in the job
        with pytest.raises(ckpt.RanksError, match="rank 2 did not answer"):
            ckpt.StateManager(folder, model=nn.Linear(2, 2), ranks=options).save_state("never", wait=True)
    with pytest.raises(ckpt.ConfigError, match="process_group=5 must be a process group"):
        ckpt.RankOptions(process_group=5)
    dist.barrier()
    wide = nn.ParameterDict({"weight": nn.Parameter(distribute_tensor(torch.ones(8), _whole(), [Shard(0)]))})
    if rank >= 2:
        with (
            pytest.raises(
                ckpt.RanksError, match=r"sharded over ranks 0, 1, 2, 3, but this manager covers ranks 2, 3"
            ) as no,
            ckpt.StateManager(f"{folder}/wide", model=wide, ranks=ckpt.RankOptions(process_group=group)) as manager,
        ):
            manager.save_state("never")
        assert len(str(no.value).splitlines()) <= 3


def _whole() -> DeviceMesh:
    return DeviceMesh("cpu", [0, 1, 2, 3])


def test_ranks_outside_lost_ranks_and_shards_elsewhere_are_named_by_their_numbers_in_the_job(tmp_path: Path) -> None:
    assert run_ranks(4, _refused, str(tmp_path)) == [0] * 4


def _save_alone(rank: int, folder: str) -> None:
    """A DTensor on a mesh of this rank alone is saved and loaded by a manager of this process alone."""
    meshes = [DeviceMesh("cpu", [number]) for number in range(2)]
    for run in range(2):
        value = torch.full((4,), float(rank + 1) if run == 0 else 0.0)
        model = nn.ParameterDict({"weight": nn.Parameter(distribute_tensor(value, meshes[rank], [Shard(0)]))})
        options = ckpt.RankOptions(alone=True)
        with ckpt.StateManager(Path(folder, str(rank)), model=model, ranks=options) as manager:
            if run == 0:
                manager.save_state("one")
            else:
                manager.load_state("one")
        loaded: Any = model["weight"]
        assert loaded.to_local().tolist() == [rank + 1.0] * 4


def test_a_shard_that_is_the_whole_is_loaded_by_a_manager_of_one_process_on_any_rank(tmp_path: Path) -> None:
    assert run_ranks(2, _save_alone, str(tmp_path)) == [0, 0]
