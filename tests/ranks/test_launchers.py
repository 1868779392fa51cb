"""Processes that a launcher has started together: refused without a process group, and alone where they say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt
from tests.helpers.processes import run_ranks

STARTED = {
    "torchrun": {"WORLD_SIZE": "2"},
    "srun": {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
    "mpirun": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
    "mpiexec": {"PMI_SIZE": "2", "PMI_RANK": "1"},
}
ALONE = ckpt.RankOptions(alone=True)


@pytest.fixture(params=STARTED)
def launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in STARTED[request.param].items():
        monkeypatch.setenv(name, value)
    return str(request.param)


def test_processes_without_a_process_group_are_refused_with_both_ways_out(tmp_path: Path, launcher: str) -> None:
    with pytest.raises(ckpt.RanksError) as refused:
        ckpt.StateManager(tmp_path / "run", model=nn.Linear(1, 1))
    text = str(refused.value)
    assert f"this job has 2 processes, started by {launcher}" in text
    assert "init_process_group()" in text
    assert "RankOptions(alone=True)" in text
    assert not (tmp_path / "run").exists()


def test_each_may_say_that_it_is_a_run_of_its_own(tmp_path: Path, launcher: str) -> None:
    model = nn.Linear(2, 2)
    with ckpt.StateManager(tmp_path, model=model, ranks=ALONE) as manager:
        manager.save_state("first")
    saved = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    with ckpt.StateManager(tmp_path, model=model, ranks=ALONE) as manager:
        assert manager.resume()
    assert torch.equal(model.weight, saved)


def test_any_of_them_may_read_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, loaded = nn.Linear(2, 2), nn.Linear(2, 2)
    with ckpt.StateManager(tmp_path, model=saved) as manager:
        manager.save_state("first")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    ckpt.load_model(tmp_path / "first", loaded)
    assert torch.equal(loaded.weight, saved.weight)
    assert torch.equal(loaded.bias, saved.bias)


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script that starts one process
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1", "WORLD_SIZE": "1"},
        {"PMI_SIZE": "", "WORLD_SIZE": "many"},
    ],
)
def test_one_process_of_a_job_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with ckpt.StateManager(tmp_path, model=nn.Linear(1, 1)) as manager:
        manager.save_state("first")


def _save_alone(rank: int, root: str) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, rank)
    with ckpt.StateManager(f"{root}/{rank}", model=model, ranks=ALONE) as manager:
        for step in range(1 + 2 * rank):  # none waits for the other
            manager.save_state(f"step-{step}")
            nn.init.constant_(model.weight, -1.0)
            assert manager.load_state(f"step-{step}")
            assert torch.equal(model.weight, torch.full((2, 2), float(rank)))


@pytest.mark.slow
def test_ranks_of_a_group_may_each_be_a_run_of_their_own(tmp_path: Path) -> None:
    run_ranks(2, _save_alone, str(tmp_path))
    assert [len(ckpt.list_checkpoints(tmp_path / str(rank))) for rank in range(2)] == [1, 3]


def _save_a_shard_alone(rank: int, root: str) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model)
    with ckpt.StateManager(f"{root}/{rank}", model=model, ranks=ALONE) as manager:
        with pytest.raises(ckpt.CkptError, match="alone"):
            manager.save_state("first")
        with pytest.raises(ckpt.CkptError, match="alone"):
            manager.save_state("first", wait=True)


@pytest.mark.slow
def test_the_shard_of_one_rank_is_not_saved_as_if_it_were_the_model(tmp_path: Path) -> None:
    run_ranks(2, _save_a_shard_alone, str(tmp_path))
    assert [ckpt.list_checkpoints(tmp_path / str(rank)) for rank in range(2)] == [[], []]
