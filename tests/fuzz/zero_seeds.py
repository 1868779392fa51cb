"""The corpus that DeepSpeed wrote: folders of ZeRO 1 and 3 by two ranks, and a universal one."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from pathlib import Path

import torch

from tests.fuzz.live import Live
from tests.helpers.processes import run_alone, run_ranks

STAGES = {"zero-1": 1, "zero-3": 3, "zero-universal": 1}
_RANKS = 2


def zero(stage: int, folder: Path) -> None:
    """`zero`, a folder of DeepSpeed's, and one of its files as `state.pt`."""
    import deepspeed  # noqa: F401  (a corpus that cannot be made is left out)

    folder.mkdir(parents=True)
    wrote = run_ranks(_RANKS, _save, str(folder / "zero"), stage)
    assert not any(wrote), f"DeepSpeed did not write its folder: {wrote}"
    if folder.name == "zero-universal":
        assert not run_alone(_make_universal, str(folder / "zero"))
    for script in (folder / "zero").glob("*.py"):
        script.unlink()
    shutil.copyfile(min(folder.rglob("*model_states.pt")), folder / "state.pt")


def _save(rank: int, folder: str, stage: int) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"})
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
    live = Live(tied=False)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 1, "sub_group_size": 20}
    config = {"train_batch_size": _RANKS, "zero_optimization": zero, "bf16": {"enabled": True}}
    optimizer = torch.optim.AdamW(live.model.parameters())
    engine, *_ = deepspeed.initialize(model=live.model, optimizer=optimizer, config=config, dist_init_required=False)
    engine.backward(engine(torch.arange(4)).float().pow(2).mean())
    engine.step()
    engine.save_checkpoint(folder)


def _make_universal(rank: int, folder: str) -> None:
    """In the place of what it is made of."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.checkpoint.ds_to_universal import main

    tag = Path(folder, "latest").read_text()
    places = {"input_folder": f"{folder}/{tag}", "output_folder": f"{folder}/{tag}_universal"}
    fixed = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    main(Namespace(**places, **fixed, inject_missing_state=True))
    shutil.rmtree(f"{folder}/{tag}")
    Path(folder, "latest").write_text(f"{tag}_universal")
