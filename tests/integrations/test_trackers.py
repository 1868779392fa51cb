"""`on_save`: what is told of every checkpoint, to whom, and when; and the callbacks for trackers."""

from __future__ import annotations

import logging
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.integrations import trackers
from ckpt.save.saver import SaveReport
from tests.helpers.processes import run_ranks


def manager(root: Path | str, **options: Any) -> ckpt.StateManager:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 600).requires_grad_(False), nn.Linear(2, 2))
    return ckpt.StateManager(root, model=model, **options)


def steps(run: ckpt.StateManager, count: int) -> None:
    for _ in range(count):
        run.step({"loss": 0.5})


def test_every_checkpoint_is_told_once_in_the_thread_of_training(tmp_path: Path) -> None:
    told: list[tuple[SaveReport, str]] = []
    with manager(tmp_path, save_every=2) as run:
        run.resume()
        run.on_save(lambda report: told.append((report, threading.current_thread().name)))
        steps(run, 5)
    reports = [report for report, _ in told]
    assert [(report.name, report.step, report.mirrored) for report in reports] == [
        ("step-00000002", 2, None),
        ("step-00000004", 4, None),
    ]
    assert {thread for _, thread in told} == {threading.current_thread().name}
    assert (
        reports[0].size
        == sum(path.stat().st_size for path in (tmp_path / "step-00000002").iterdir())
        - 2 * (tmp_path / "step-00000002" / "manifest.json").stat().st_size  # and its copy
    )
    assert reports[0].metrics == {"loss": 0.5}
    assert 0 <= reports[0].blocked <= reports[0].durable
    assert reports[0].linked == 0 < reports[1].linked < reports[1].size  # frozen weights


def test_a_decorator_is_still_the_function(tmp_path: Path) -> None:
    with manager(tmp_path) as run:

        @run.on_save
        def told(report: SaveReport) -> str:
            return report.name

        assert callable(told)
        with pytest.raises(ckpt.ConfigError, match="on_save"):
            run.on_save("print")  # type: ignore[arg-type]


def test_a_copy_to_the_mirror_is_told_when_it_is_there(tmp_path: Path) -> None:
    told: list[tuple[str, bool | None]] = []
    with manager(tmp_path / "root", mirror=tmp_path / "mirror") as run:
        run.on_save(lambda report: told.append((report.name, report.mirrored)))
        run.save_state("a", wait=True)
    assert told == [("a", False), ("a", True)]


def test_what_a_callback_raises_is_logged_and_the_others_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def fails(report: SaveReport) -> None:
        raise OSError("no network")

    with manager(tmp_path) as run, caplog.at_level(logging.WARNING):
        run.on_save(fails)
        run.on_save(lambda report: told.append(report.name))
        run.save_state("a")
    assert told == ["a"]
    assert "no network" in caplog.text
    assert "fails" in caplog.text


def test_snapshots_in_memory_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path / "memory"))
    told: list[str] = []
    with manager(tmp_path / "root", memory=1) as run:
        run.resume()
        run.on_save(lambda report: told.append(report.name))
        steps(run, 3)
        run.save_state("end")
    assert told == ["end"]


def _told_on_ranks(rank: int, root: str) -> None:
    told: list[str] = []
    with manager(root) as run:
        run.on_save(lambda report: told.append(report.name))
        run.save_state("a")
    assert told == (["a"] if rank == 0 else [])


@pytest.mark.slow
def test_of_several_ranks_the_main_one_is_told(tmp_path: Path) -> None:
    assert not any(run_ranks(2, _told_on_ranks, str(tmp_path)))


def report(**changed: Any) -> SaveReport:
    known = {"name": "a", "url": "runs/a", "step": 7, "size": 100, "linked": 40, "blocked": 0.25, "durable": 1.5}
    return SaveReport(**{**known, **changed})


def test_prometheus_finds_the_newest_save_in_a_file(tmp_path: Path) -> None:
    record = trackers.prometheus(tmp_path / "ckpt.prom", run='a "b"')
    behind = []
    for told in (report(), report(mirrored=False), report(name="b", step=8, mirrored=False), report(mirrored=True)):
        record(told)
        text = (tmp_path / "ckpt.prom").read_text()
        behind.append(text.partition("ckpt_not_mirrored{")[2].split()[-1])
    assert behind == ["0.0", "1.0", "2.0", "1.0"]
    values = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    assert [value for name, _, value in values if "timestamp" not in name] == [
        "0.25", "1.5", "100.0", "40.0", "7.0", "1.0",
    ]  # fmt: skip
    assert 'ckpt_seconds_blocked{run="a \\"b\\""} 0.25\n' in text
    assert "# TYPE ckpt_bytes gauge\n" in text
    assert 'ckpt_not_mirrored{run="a \\"b\\""} 1.0\n' in text
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt.prom"]


def test_tensorboard_has_scalars_at_the_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        trackers.tensorboard(writer)(report())
    found = EventAccumulator(str(tmp_path)).Reload().Scalars("ckpt/seconds_blocked")
    assert [(event.step, event.value) for event in found] == [(7, 0.25)]


def test_what_a_tracker_is_told_of_a_save_and_not_of_its_copy_in_the_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Tracker:
        def add_scalar(self, *given: Any) -> None:
            told.append(given)

        def log(self, *given: Any, **named: Any) -> None:
            told.append((*given, named))

        log_metrics = log

    numbers = {
        "ckpt/seconds_blocked": 0.25, "ckpt/seconds_durable": 1.5, "ckpt/bytes": 100.0, "ckpt/bytes_linked": 40.0,
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "mlflow", Tracker())
    for mirrored in (None, False, True):
        record = report(mirrored=mirrored)
        trackers.tensorboard(Tracker())(record)
        trackers.wandb(Tracker())(record)
        trackers.mlflow("mine")(record)
    once = [
        *((name, value, 7) for name, value in numbers.items()),
        ({**numbers, "ckpt/step": 7}, {"commit": False}),
        (numbers, {"step": 7, "run_id": "mine"}),
    ]
    assert told == once * 2
    library = types.SimpleNamespace(run=None)
    monkeypatch.setitem(sys.modules, "wandb", library)
    with pytest.raises(RuntimeError, match=r"no run of Weights & Biases is active"):
        trackers.wandb()(report())
    library.run = Tracker()
    trackers.wandb()(report())
    assert told[-1] == once[-2]


@pytest.mark.slow
def test_mlflow_has_metrics_at_the_step(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    with mlflow.start_run() as run:
        trackers.mlflow()(report())
    assert mlflow.get_run(run.info.run_id).data.metrics["ckpt/seconds_durable"] == 1.5


@pytest.mark.slow
def test_wandb_sends_them_with_what_is_logged_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with wandb.init(dir=str(tmp_path)) as run:
        trackers.wandb()(report())
        run.log({"loss": 1.0})
        assert run.summary["ckpt/bytes"] == 100
        assert run.summary["ckpt/step"] == 7
