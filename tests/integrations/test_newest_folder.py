"""A script that takes the newest folder by its name, saves with hooks and skips by hand, killed in a save."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import ckpt
from ckpt.integrations.accelerate import attach
from ckpt.root.commit import Attempt
from tests.helpers.accelerated import Numbers, build, new_accelerator, reseed, train_on
from tests.helpers.processes import run_ranks

EVERY = 2


def _script(rank: int, output: str, world_size: int, killed_at: str = "") -> None:
    """As such scripts are, but for one line. `killed_at`: the moment of the second save in which all is over."""
    reseed(0, 0)
    accelerator = new_accelerator(rank=rank, world_size=world_size)
    manager = attach(accelerator, output)  # the one line
    loader, *parts = accelerator.prepare(DataLoader(Numbers(), batch_size=4, shuffle=True), *build())

    def write_config(models: list[Any], weights: list[Any], folder: str) -> None:
        if accelerator.is_main_process:
            os.makedirs(os.path.join(folder, "config"), exist_ok=True)
            Path(folder, "config", "config.json").write_text("{}")

    accelerator.register_save_state_pre_hook(write_config)
    done = 0
    folders = [name for name in os.listdir(output) if name.startswith("checkpoint")] if os.path.isdir(output) else []
    if folders:
        newest = max(folders, key=lambda name: int(name.split("-")[1]))
        accelerator.load_state(os.path.join(output, newest))
        done = int(newest.split("-")[1])
    resumed = done
    losses = []
    for epoch in range(resumed // len(loader), 2):
        for number, batch in enumerate(loader):
            if epoch == resumed // len(loader) and number < resumed % len(loader):
                continue
            losses.append((done, train_on(batch, accelerator, *parts)))
            done += 1
            if done % EVERY == 0:
                if killed_at and done == 2 * EVERY:
                    manager.wait()
                    _arrange_kill(killed_at)
                accelerator.save_state(os.path.join(output, f"checkpoint-{done}"))
                if rank == 0:
                    Path(output, f"losses-{done}.txt").write_text(repr(losses[-EVERY:]))
    accelerator.end_training()


def _arrange_kill(moment: str) -> None:
    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(Attempt, {"no marker yet": "begin", "nothing committed": "commit"}[moment], die)


def _losses(output: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in output.glob("losses-*.txt")}


@pytest.mark.parametrize("moment", ["no marker yet", "nothing committed"])
def test_the_newest_folder_by_name_is_one_that_was_committed(tmp_path: Path, moment: str) -> None:
    assert run_ranks(1, _script, str(tmp_path / "straight"), 1) == [0]
    run = tmp_path / "run"
    assert run_ranks(1, _script, str(run), 1, moment) == [-signal.SIGKILL]
    assert (run / "checkpoint-4" / "config" / "config.json").exists()
    assert run_ranks(1, _script, str(run), 1) == [0]
    assert _losses(run) == _losses(tmp_path / "straight")
    assert (run / ".checkpoint-4.uncommitted" / "config" / "config.json").exists()
    assert all(found.committed for found in ckpt.list_checkpoints(run))


def test_folders_that_are_no_checkpoints_are_left_alone(tmp_path: Path) -> None:
    accelerator = new_accelerator()
    accelerator.prepare(*build())
    with attach(accelerator, tmp_path):
        accelerator.save_state("checkpoint-2")
    for name in ("logs", "samples-3", "2024", "checkpoint-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "theirs").write_text("")
    attach(accelerator, tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} >= {"logs", "samples-3", "2024", "checkpoint-1", "checkpoint-2"}
