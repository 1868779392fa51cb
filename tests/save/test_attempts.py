"""What a run tells the history of its root: metrics of every step, and how each attempt ended."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
from ckpt.data import progress
from ckpt.data.progress import MetricCurves
from ckpt.root.catalog import HISTORY, History, PastAttempt
from ckpt.storage import open_storage
from tests.helpers.processes import run_ranks

TOKEN = "hf_" + "a" * 30


def manager_at(root: Path, **options: object) -> ckpt.StateManager:
    return ckpt.StateManager(root, model=nn.Linear(2, 2), save_every=4, **options)  # type: ignore[arg-type]


def train(root: Path, until: int, error: BaseException | None = None, **options: object) -> None:
    with manager_at(root, **options) as manager:
        for _ in manager.epochs(1):
            for _ in manager.batches(range(100)):
                manager.step(metrics={"loss": 1 / (1 + manager.progress.step)})
                if manager.progress.step == until:
                    if error is not None:
                        raise error
                    return


def attempts(root: Path) -> list[PastAttempt]:
    return History.of(open_storage(root)).attempts


def ends(root: Path) -> list[tuple[int, int, str, str]]:
    return [(one.first, one.last, one.ended, one.reason) for one in attempts(root)]


def test_each_attempt_says_where_it_began_how_far_it_got_and_how_it_ended(tmp_path: Path) -> None:
    train(tmp_path, 3)
    with pytest.raises(ValueError, match="no such"):
        train(tmp_path, 6, ValueError(f"no such\nuser: {TOKEN}"))
    with pytest.raises(SystemExit):
        train(tmp_path, 7, SystemExit(3))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 9, KeyboardInterrupt())
    train(tmp_path, 10)
    assert ends(tmp_path) == [
        (0, 3, "finished", ""),
        (0, 6, "failed", "ValueError: no such user: ***"),
        (4, 7, "failed", "SystemExit: 3"),
        (4, 9, "failed", "KeyboardInterrupt"),
        (8, 10, "finished", ""),
    ]
    saved, again = (attempts(tmp_path)[number] for number in (1, 2))
    assert (saved.resumed, again.resumed["name"]) == ({}, "step-00000004")
    assert 0 < again.seconds["ready"] + again.seconds["waited"] <= again.seconds["total"]
    assert [one.since for one in attempts(tmp_path)] == [0, 1, 0, 2, 0]
    assert len({one.run for one in attempts(tmp_path)[1:]}) == 1


def test_a_signal_that_stopped_it_is_named(tmp_path: Path) -> None:
    def run() -> None:
        with manager_at(tmp_path) as manager:
            for _ in manager.epochs(1):
                for _ in manager.batches(range(100)):
                    manager.step()
                    if manager.progress.step == 6:
                        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(ckpt.Preempted):
        run()
    assert ends(tmp_path) == [(0, 7, "stopped", "SIGTERM")]


def test_an_attempt_that_was_killed_says_no_end_and_what_it_said_at_its_last_save(tmp_path: Path) -> None:
    manager = manager_at(tmp_path)
    manager.resume()
    for _ in range(5):
        manager.step(metrics={"loss": 1.0})
    manager.wait()
    found = attempts(tmp_path)
    assert [(one.first, one.ended, one.is_running) for one in found] == [(0, "", True)]
    assert [step for step, _ in found[0].metrics["loss"]][:4] == [1, 2, 3, 4]
    manager.close()


def test_a_load_of_its_own_takes_it_back(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        manager.resume()
        for _ in range(6):
            manager.step()
        manager.load_state("step-00000004")
        manager.step()
    assert [(one.first, one.last, one.redone) for one in attempts(tmp_path)] == [(0, 5, 2)]


def test_a_restart_that_fails_before_its_first_step_is_told_and_one_with_nothing_to_do_is_not(tmp_path: Path) -> None:
    def resume(error: Exception | None) -> None:
        with manager_at(tmp_path) as manager:
            manager.resume()
            if error is not None:
                raise error

    with pytest.raises(ValueError, match="empty"):
        resume(ValueError("the root is empty"))
    assert not (tmp_path / HISTORY).exists()
    train(tmp_path, 4)
    with pytest.raises(ValueError, match="no memory"):
        resume(ValueError("no memory"))
    resume(None)
    assert ends(tmp_path) == [(0, 4, "finished", ""), (4, 4, "failed", "ValueError: no memory")]


def test_a_save_that_fails_at_the_end_is_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, 4)

    def fail(*_: object) -> None:
        raise ckpt.FullError("the disk is full.")

    manager = manager_at(tmp_path)
    manager.resume()
    manager.step()
    monkeypatch.setattr(manager.session.saver, "wait", fail)
    with pytest.raises(ckpt.FullError):
        manager.close()
    assert ends(tmp_path)[-1] == (4, 5, "failed", "FullError: the disk is full.")


def test_a_history_that_cannot_be_written_is_one_line_a_time_and_the_saves_stand(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / HISTORY).mkdir()
    (tmp_path / HISTORY / "x").touch()
    train(tmp_path, 8)
    assert [found.step for found in ckpt.list_checkpoints(tmp_path)] == [8, 4]
    said = [record for record in caplog.records if HISTORY in record.getMessage()]
    assert {record.levelno for record in said} == {logging.WARNING}


MAIN = """
import os, signal, sys
import ckpt
from torch import nn
def main():
    manager = ckpt.StateManager(sys.argv[1], model=nn.Linear(2, 2), save_every=2)
    manager.resume()
    for _ in range(3):
        manager.step()
    manager.wait()
    {ending}
manager = main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "last", "ended", "reason"),
    [
        ("return manager", 3, "exited", ""),
        ("return None", 3, "exited", ""),
        ("raise ValueError('not a number')", 3, "failed", "ValueError: not a number"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 2, "", ""),
    ],
    ids=["open", "dropped", "raises", "killed"],
)
def test_a_program_that_does_not_close_its_manager_tells_its_end_unless_it_is_killed(
    tmp_path: Path, ending: str, last: int, ended: str, reason: str
) -> None:
    code = MAIN.format(ending=ending)
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    found = [(one.last >= last, one.ended, one.reason, one.is_running) for one in attempts(tmp_path)]
    assert found == [(True, ended, reason, False)], done.stderr


# The metrics of all steps, a few hundred points of each.


def points(curves: MetricCurves, name: str = "loss") -> list[tuple[int, float]]:
    return curves.numbers()[name]


@pytest.mark.parametrize(("given", "stride"), [(400, 1), (401, 2), (800, 2), (801, 4), (100_000, 256)])
def test_curves_are_thinned_evenly_from_the_first_value_on(given: int, stride: int) -> None:
    curves = MetricCurves()
    for step in range(1, given + 1):
        curves.note(step, {"loss": float(step)})
    assert points(curves) == [(step, float(step)) for step in range(1, given + 1, stride)]


def test_a_metric_that_is_given_now_and_then_has_all_its_values() -> None:
    curves = MetricCurves()
    for step in range(1, 10_001):
        curves.note(step, {"loss": 1.0, **({"eval": step / 2} if step % 1000 == 0 else {})})
    assert points(curves, "eval") == [(step, step / 2) for step in range(1000, 10_001, 1000)]
    assert 200 <= len(points(curves)) <= 400


def test_a_tensor_that_the_script_writes_into_again_has_the_value_of_its_step() -> None:
    curves, loss = MetricCurves(), torch.zeros(1)
    for step in range(1, 4):
        loss += step
        curves.note(step, {"loss": loss})
    assert points(curves) == [(1, 1.0), (2, 3.0), (3, 6.0)]


def test_only_so_many_names_are_kept_and_only_numbers_under_names_that_are_text() -> None:
    curves = MetricCurves()
    odd = {"complex": torch.tensor(1j), "lone\ud800": 1.0, "x" * 5000: 1.0, "flag": True, "nan": float("nan")}
    curves.note(1, odd | {f"m{number}": 1.0 for number in range(100)})
    curves.settle()
    assert {"complex", *odd} & curves.numbers().keys() == {"flag", "nan"}
    assert len(curves.numbers()) == progress._MOST_CURVES - 3
    assert points(curves, "flag") == [(1, 1.0)]


class Distributed(torch.Tensor):
    """What has to ask other ranks for its value."""

    def __float__(self) -> float:
        raise AssertionError("asked the other ranks")

    item = __float__


def test_a_value_for_which_other_ranks_must_be_asked_is_left_out() -> None:
    curves = MetricCurves()
    curves.note(1, {"loss": torch.ones(()).as_subclass(Distributed)})
    curves.settle()
    assert curves.numbers() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_values_on_a_device_are_copied_there_and_fetched_when_a_save_waits_anyway() -> None:
    curves, loss = MetricCurves(), torch.zeros((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 6):
            loss += step
            curves.note(step, {"loss": loss, "whole": torch.ones(1, dtype=torch.int64, device="cuda")})
        assert curves.numbers() == {}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    curves.settle()
    assert points(curves) == [(1, 1.0), (2, 3.0), (3, 6.0), (4, 10.0), (5, 15.0)]
    assert points(curves, "whole")[0] == (1, 1.0)


def train_as(rank: int, root: Path) -> None:
    with manager_at(root) as manager:
        manager.resume()
        for _ in range(4):
            manager.step(metrics={"rank": rank})
        assert (manager.goodput() is not None) == (rank == 0)


@pytest.mark.slow
def test_rank_0_alone_tells_it(tmp_path: Path) -> None:
    run_ranks(2, train_as, tmp_path)
    assert [(one.last, one.metrics["rank"]) for one in attempts(tmp_path)] == [(4, [(n, 0.0) for n in range(1, 5)])]
