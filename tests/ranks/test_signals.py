"""Signals to real processes: Ctrl-C stops like SIGTERM, SIGUSR1 saves, and a grace period bounds the last save."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ckpt
from ckpt.storage import ANY, Buffer
from tests.helpers.places import PassedOn
from tests.helpers.processes import run_ranks


def _steps(root: Path) -> list[int]:
    return sorted(found.step or 0 for found in ckpt.list_checkpoints(root))


def _train(manager: ckpt.StateManager, signals: dict[int, int], steps: int, pause: float = 0.0) -> None:
    """Steps, with a signal to this process in the middle of some."""
    manager.resume()
    while manager.progress.step < steps:
        time.sleep(pause)
        if number := signals.get(manager.progress.step + 1):
            os.kill(os.getpid(), number)
        manager.step()


def _manager(root: Any, **options: Any) -> ckpt.StateManager:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever starts tests in the background has it ignored
    return ckpt.StateManager(root, model=nn.Linear(2, 2), ranks=ckpt.RankOptions(**options))


def _interrupted(rank: int, root: str) -> None:
    try:
        with _manager(root, handle_sigint=True) as manager:
            _train(manager, {5: signal.SIGINT}, 100)
    finally:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_ctrl_c_saves_the_step_and_stops_on_request(tmp_path: Path) -> None:
    assert run_ranks(1, _interrupted, str(tmp_path), dies=True) == [130]
    assert _steps(tmp_path) == [5]


def _interrupted_twice(rank: int, root: str) -> None:
    with _manager(root, handle_sigint=True) as manager:
        manager.resume()
        manager.step()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_the_second_ctrl_c_interrupts_at_once(tmp_path: Path) -> None:
    assert run_ranks(1, _interrupted_twice, str(tmp_path)) == [0]
    assert _steps(tmp_path) == []


def _interrupted_as_ever(rank: int, root: str) -> None:
    with pytest.raises(KeyboardInterrupt), _manager(root) as manager:
        _train(manager, {5: signal.SIGINT}, 100)


@pytest.mark.slow
def test_without_the_request_ctrl_c_interrupts_as_ever(tmp_path: Path) -> None:
    assert run_ranks(1, _interrupted_as_ever, str(tmp_path)) == [0]
    assert _steps(tmp_path) == []


def _with_workers(rank: int, root: str) -> None:
    """Ctrl-C in a terminal reaches the loader workers too, and some more steps are needed until all ranks stop."""
    model = DistributedDataParallel(nn.Linear(2, 2))
    data: Any = torch.ones(400, 2)
    loader: DataLoader[Any] = DataLoader(data, batch_size=1, num_workers=1, multiprocessing_context="fork")
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ckpt.StateManager(root, model=model, ranks=ckpt.RankOptions(handle_sigint=True)) as manager:
        for _ in manager.epochs(1):
            for batch in manager.batches(loader):
                model(batch).sum().backward()
                if manager.progress.step == 4 and rank == 1:
                    os.killpg(0, signal.SIGINT)
                time.sleep(0.05)
                manager.step()


@pytest.mark.slow
def test_ctrl_c_at_one_rank_and_its_workers_stops_all_ranks_at_the_same_step(tmp_path: Path) -> None:
    assert sorted(run_ranks(2, _with_workers, str(tmp_path), dies=True)) == [130, 143]
    (step,) = _steps(tmp_path)
    assert 5 < step < 400


def _told_to_save(rank: int, root: str) -> None:
    with _manager(root, save_on_sigusr1=True) as manager:
        _train(manager, {3: signal.SIGUSR1, 6: signal.SIGUSR1}, 8)
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.slow
def test_sigusr1_saves_the_step_and_training_continues(tmp_path: Path) -> None:
    assert run_ranks(1, _told_to_save, str(tmp_path)) == [0]
    assert _steps(tmp_path) == [3, 6]


class _Stuck(PassedOn):
    """A disk that does not answer any more."""

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        if key.startswith("step-00000005/") and key.endswith(".safetensors"):
            time.sleep(100)
        super().write(key, pieces, over=over)


def _terminated(rank: int, root: str, grace: float) -> None:
    sys.stderr = open(f"{root}.err", "w")  # noqa: SIM115
    with _manager(_Stuck(root), grace=grace) as manager:
        manager.resume()
        manager.step()
        manager.save_state(wait=True)
        _train_on(manager)


def _train_on(manager: ckpt.StateManager) -> None:
    while True:
        if manager.progress.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        manager.step()


@pytest.mark.slow
def test_a_last_save_that_takes_longer_than_the_grace_period_is_given_up(tmp_path: Path) -> None:
    began = time.monotonic()
    assert run_ranks(1, _terminated, str(tmp_path / "run"), 1.0, dies=True) == [143]
    assert time.monotonic() - began < 60
    assert [found.name for found in ckpt.list_checkpoints(tmp_path / "run") if found.committed] == ["step-00000001"]
    assert "could not save within the grace period of 1 s" in (tmp_path / "run.err").read_text()


def _slow_farewell(rank: int, root: str) -> None:
    """What a script does after the last save is its own affair."""
    try:
        with _manager(root, grace=2.0) as manager:
            _train(manager, {5: signal.SIGTERM}, 100)
    except ckpt.Preempted:
        time.sleep(3)
        raise


@pytest.mark.slow
def test_what_comes_after_the_last_save_is_not_cut_off(tmp_path: Path) -> None:
    assert run_ranks(1, _slow_farewell, str(tmp_path), dies=True) == [143]
    assert _steps(tmp_path) == [5]


def test_a_grace_period_without_a_signal_to_answer_is_refused() -> None:
    with pytest.raises(ckpt.ConfigError, match="it needs handle_sigterm=True"):
        ckpt.RankOptions(grace=5, handle_sigterm=False)
