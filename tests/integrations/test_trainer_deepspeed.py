"""A Trainer with DeepSpeed and `CkptCallback`, in real processes: killed, resumed, and compared."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import ckpt
from tests.helpers.processes import run_ranks, seed_everything
from tests.helpers.training import exact
from tests.integrations.test_transformers import kept, logged, signalling, trainer

KILLED_AT = 11

pytestmark = pytest.mark.slow


def config(stage: int) -> dict[str, Any]:
    steps = {"total_num_steps": "auto", "warmup_num_steps": "auto"}
    schedule = {"scheduler": {"type": "WarmupDecayLR", "params": steps}}
    return {
        "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "zero_allow_untested_optimizer": True,
        **(schedule if stage == 3 else {}),
    }


def train(rank: int, folder: str, world_size: int, stage: int, killed_at: int) -> None:
    where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "DS_ACCELERATOR": "cpu"}
    os.environ.update(where, LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
    evaluated: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_steps": 5,
        "load_best_model_at_end": True,
    }
    evaluated["warmup_steps"] = 2
    run = trainer(
        Path(folder),
        kept(Path(folder, "root"), ranks=ckpt.RankOptions(timeout=60), saving=ckpt.SaveOptions(background=False)),
        signalling(killed_at, signal.SIGKILL),
        world_size=world_size,
        deepspeed=config(stage),
        **evaluated,
    )
    run.train(resume_from_checkpoint=True)
    Path(folder, f"log-{rank}").write_text(json.dumps(logged(run.state.log_history), sort_keys=True))
    from tests.helpers.engines import weights

    Path(folder, f"weights-{rank}").write_text(exact(weights(run.model_wrapped)))


def train_and_be_killed(rank: int, straight: str, killed: str, world_size: int, stage: int) -> None:
    train(rank, straight, world_size, stage, -1)
    seed_everything(rank)
    train(rank, killed, world_size, stage, KILLED_AT)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_trainer_with_deepspeed_that_was_killed_and_resumes_equals_one_that_was_not(
    tmp_path: Path, stage: int
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    both = (str(straight), str(killed), 2, stage)
    assert run_ranks(2, train_and_be_killed, *both, dies=True) == [-signal.SIGKILL] * 2
    assert ckpt.list_checkpoints(killed / "root")[0].name == "step-00000010"
    assert run_ranks(2, train, str(killed), 2, stage, -1) == [0, 0]
    for name in [f"{kind}-{rank}" for kind in ("log", "weights") for rank in range(2)]:
        assert (killed / name).read_bytes() == (straight / name).read_bytes(), name
