"""A Trainer with DeepSpeed and `CkptCallback`, in real processes: ended early, resumed, and compared."""

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
from tests.helpers.variations import cells
from tests.integrations.test_transformers import (
    STEPS,
    interrupting,
    kept,
    last_of_each,
    logged,
    record_losses,
    signalling,
    trainer,
)

ENDS_AT = 11

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


def train(rank: int, folder: str, stage: int, *callbacks: Any) -> None:
    where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    os.environ.update(where, LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
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
        kept(Path(folder, "root"), ranks=ckpt.RankOptions(timeout=60)),
        *callbacks,
        world_size=2,
        deepspeed=config(stage),
        **evaluated,
    )
    record_losses(run, Path(folder, f"batches-{rank}"))
    run.train(resume_from_checkpoint=True)
    losses = last_of_each(Path(folder, f"batches-{rank}"))
    assert len(losses) == STEPS * 2
    Path(folder, f"losses-{rank}").write_text(json.dumps(losses, sort_keys=True))
    Path(folder, f"log-{rank}").write_text(json.dumps(logged(run.state.log_history), sort_keys=True))
    from tests.helpers.engines import everything, weights

    Path(folder, f"weights-{rank}").write_text(exact(weights(run.model_wrapped)))
    Path(folder, f"engine-{rank}").write_text(everything(run.model_wrapped))


def train_and_end_early(rank: int, folder: str, stages: tuple[int, ...]) -> None:
    """With each stage: once to the end, and once until it is interrupted, or, with the last, killed."""
    for stage in stages:
        train(rank, f"{folder}/{stage}/straight", stage)
        seed_everything(rank)
        if stage == stages[-1]:
            train(rank, f"{folder}/{stage}/again", stage, signalling(ENDS_AT, signal.SIGKILL))
        with pytest.raises(KeyboardInterrupt):
            train(rank, f"{folder}/{stage}/again", stage, interrupting(ENDS_AT))
        seed_everything(rank)


def resume(rank: int, folder: str, stages: tuple[int, ...]) -> None:
    for stage in stages:
        seed_everything(rank)
        train(rank, f"{folder}/{stage}/again", stage)


@pytest.mark.parametrize("stages", cells([((0, 1, 2),), ((3,),)], often=[((0, 1, 2),)]))
def test_a_trainer_with_deepspeed_that_ended_early_and_resumes_equals_one_that_did_not(
    tmp_path: Path, stages: tuple[int, ...]
) -> None:
    for stage in stages:
        (tmp_path / str(stage) / "straight").mkdir(parents=True)
        (tmp_path / str(stage) / "again").mkdir()
    assert run_ranks(2, train_and_end_early, str(tmp_path), stages, dies=True) == [-signal.SIGKILL] * 2
    saved = [ckpt.list_checkpoints(tmp_path / str(stage) / "again" / "root")[0].name for stage in stages]
    assert {*saved[:-1]} <= {"step-00000010"}
    assert saved[-1] in ("step-00000010", "step-00000005")
    assert run_ranks(2, resume, str(tmp_path), stages) == [0, 0]
    for stage in stages:
        for name in [f"{kind}-{rank}" for kind in ("log", "losses", "weights", "engine") for rank in range(2)]:
            straight, again = (tmp_path / str(stage) / run / name for run in ("straight", "again"))
            assert again.read_text() == straight.read_text(), name
