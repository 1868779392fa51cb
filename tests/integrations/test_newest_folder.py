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
from ckpt.root.write_link_commit import Attempt
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


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["no marker yet", "nothing committed"])
def test_the_newest_folder_by_name_is_one_that_was_committed(tmp_path: Path, moment: str) -> None:
    assert run_ranks(1, _script, str(tmp_path / "straight"), 1) == [0]
    run = tmp_path / "run"
    assert run_ranks(1, _script, str(run), 1, moment, dies=True) == [-signal.SIGKILL]
    assert (run / "checkpoint-4" / "config" / "config.json").exists()
    assert run_ranks(1, _script, str(run), 1) == [0]
    assert _losses(run) == _losses(tmp_path / "straight")
    assert (run / ".checkpoint-4.uncommitted" / "config" / "config.json").exists()
    assert {found.committed for found in ckpt.list_checkpoints(run)} == {True}


def test_folders_that_are_no_checkpoints_are_left_alone(tmp_path: Path) -> None:
    accelerator = new_accelerator()
    accelerator.prepare(*build())
    before, after = ["checkpoint-9"], ["logs", "samples-3", "2024", "checkpoint-1"]
    _write_theirs(tmp_path, before)
    with attach(accelerator, tmp_path):
        accelerator.save_state("checkpoint-2")
    _write_theirs(tmp_path, after)
    attach(accelerator, tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} >= {*before, *after, "checkpoint-2"}


def _write_theirs(root: Path, names: list[str]) -> None:
    for name in names:
        (root / name).mkdir()
        (root / name / "theirs").write_text("")


def _named_after_a_kill(rank: int, root: str, world_size: int) -> None:
    """`load_state` by a name whose save was cut off: twice, because the first `attach` clears it away."""
    for _ in range(2):
        accelerator = new_accelerator(rank=rank, world_size=world_size)
        accelerator.prepare(*build())
        with attach(accelerator, root) as manager:
            accelerator.load_state(os.path.join(root, "checkpoint-4"))
            assert manager.restored is not None
            assert manager.restored.name == "checkpoint-2"
            with pytest.raises(ckpt.MissingError, match=r"no checkpoint 'checkpoint-80'.*There are: checkpoint-2"):
                accelerator.load_state(os.path.join(root, "checkpoint-80"))
        accelerator.wait_for_everyone()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["no marker yet", "nothing committed"])
def test_in_place_of_a_name_that_was_never_committed_the_newest_intact_one_is_loaded(
    tmp_path: Path, moment: str
) -> None:
    assert run_ranks(1, _script, str(tmp_path), 1, moment, dies=True) == [-signal.SIGKILL]
    assert run_ranks(2, _named_after_a_kill, str(tmp_path), 2) == [0, 0]


def test_it_is_said_in_one_line_and_only_where_there_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = new_accelerator()
    accelerator.prepare(*build())
    with attach(accelerator, tmp_path) as manager:
        for name in ("checkpoint-2", "checkpoint-3"):
            (tmp_path / "checkpoint-4").mkdir(exist_ok=True)
            (tmp_path / "checkpoint-4" / ".saving").write_text("{}")
            if name == "checkpoint-2":
                with pytest.raises(ckpt.CheckpointError, match="checkpoint-4 was never committed"):
                    accelerator.load_state("checkpoint-4")
            accelerator.save_state(name)
        manager.wait()
        (tmp_path / "checkpoint-4").mkdir(exist_ok=True)
        (tmp_path / "logs").mkdir()
        caplog.clear()
        accelerator.load_state("checkpoint-4")
        messages = [record.getMessage() for record in caplog.records]  # and what was passed over, if it is there yet
        (said,) = [message for message in messages if "loaded the newest" in message]
        assert said.startswith(
            "checkpoint-4 was never committed, so ckpt loaded the newest intact checkpoint, checkpoint-3"
        )
        assert "\n" not in said
        with pytest.raises(ckpt.MissingError, match="no checkpoint 'logs'"):
            accelerator.load_state("logs")
        (tmp_path / "checkpoint-3" / "model.safetensors").write_bytes(b"")
        with pytest.raises(ckpt.DamagedError, match=r"Load another checkpoint, or call load_state\(\) without"):
            accelerator.load_state("checkpoint-3")  # it was committed: nobody but the user may choose another
