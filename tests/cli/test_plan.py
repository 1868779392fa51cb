"""`ckpt plan`: what saving every so often costs, for a job that is described, and for a run that has measured it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.root.catalog import History, PastAttempt
from ckpt.storage import open_storage

Invoke = Callable[..., Result]
JOB = ("--state", "15GB", "--disk", "1.5GB/s", "--nodes", "16")


@pytest.fixture
def invoke() -> Invoke:
    return lambda *arguments: CliRunner().invoke(main, ["plan", *map(str, arguments)])


def test_a_job_that_is_described_sees_what_each_interval_loses(invoke: Invoke) -> None:
    result = invoke(*JOB)
    assert result.exit_code == 0, result.output
    job, failures, head, *rows = result.output.splitlines()
    assert job == "A save of 15.0 GB costs training 0.05s and is durable after 10s. A restart takes 3min."
    assert failures.startswith("One of 16 nodes fails about every 9d 15h (the published rate; ")
    assert head.split() == ["save_every", "waiting", "repeated", "restarts", "lost", "node-hours", "a", "day"]
    lost = {row.split("  ")[0]: float(row.split("%")[3]) for row in rows}
    assert list(lost) == ["1min", "4min 48s, the best", "5min", "15min", "1h", "4h"]
    assert lost["4min 48s, the best"] == min(lost.values())


def test_a_machine_that_is_lost_takes_its_snapshots_with_it_but_not_those_of_replicas(invoke: Invoke) -> None:
    result = invoke(*JOB, "--step", 5, "--nodes", 2048)
    rows = {row.split("   ")[0]: row for row in result.output.splitlines()[3:]}
    repeated = {name: float(row.split("%")[1]) for name, row in rows.items()}
    alone, replicas = (next(name for name in repeated if text in name) for text in ("memory=10", "replicas=1"))
    assert repeated["1min, the best"] > repeated[alone] > repeated[replicas]


def test_intervals_that_are_shorter_than_a_save_takes_are_left_out(invoke: Invoke) -> None:
    output = invoke("--state", "1TB", "--disk", "1GB/s").output
    assert "\n15min " not in output
    assert "\n33min 20s, the best" in output


def test_a_run_is_planned_with_what_it_has_measured(invoke: Invoke, tmp_path: Path) -> None:
    with ckpt.StateManager(tmp_path, model=nn.Linear(300, 300), save_every=2) as manager:
        for _ in manager.epochs(1):
            for _ in manager.batches([1] * 8):
                manager.step()
    result = invoke(tmp_path)
    assert result.exit_code == 0, result.output
    assert " kB costs training 0." in result.output
    assert "One node fails about every 153d 20h (the published rate" in result.output
    history = History.of(open_storage(tmp_path))
    for number in range(5):
        gone = ("another machine", 1, 1, "1")
        history.note(PastAttempt(f"{number}", "x", "2026-01-01T00:00:00+00:00", seconds={"total": 3600.0}, writer=gone))
    history.store(())
    assert "One node fails about every 1h (this run has failed 5 times in 5h" in invoke(tmp_path).output
    assert "about every 4d (as you said)" in invoke(tmp_path, "--failures", 0.25).output
    assert "costs training 2s and is durable after 1min 40s" in invoke(
        tmp_path, "--save", 2, "--state", "1TB", "--disk", "10GB/s"
    ).output  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "without ROOT: give --state and --disk"),
        (("--state", "15GB"), "without ROOT: give --state and --disk"),
        (("--state", "large", "--disk", "1GB"), "'large' is not a size: write 15GB, or 1.5GB/s."),
        ((*JOB, "--step", 0), "0.0 is not in the range"),
    ],
)
def test_what_is_missing_or_wrong_is_named(invoke: Invoke, given: tuple[str, ...], said: str) -> None:
    result = invoke(*given)
    assert result.exit_code == 2
    assert said in result.output


def test_a_root_without_saves_or_without_a_folder_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    assert f"{tmp_path} has no saves in its history: give" in invoke(tmp_path).output
    assert invoke(tmp_path / "nowhere").exit_code == 1


@pytest.mark.parametrize("said", [1e300, -1e300, 0.0])
def test_absurd_seconds_in_a_history_give_a_table_all_the_same(invoke: Invoke, tmp_path: Path, said: float) -> None:
    with ckpt.StateManager(tmp_path, model=nn.Linear(3, 3)) as manager:
        manager.save_state(wait=True)
    history = History.of(open_storage(tmp_path))
    (save,) = history.saves
    save.seconds.update(blocked=said, total=said)  # type: ignore[attr-defined]
    history._lines.clear()
    history._saves.clear()
    from ckpt.root.catalog import _fields, _line

    history._saves[save.summary.id], history._lines[save.summary.id] = save, _line(_fields(save))
    history.store(())
    result = invoke(tmp_path)
    assert (result.exit_code, result.exception) == (0, None), result.output
