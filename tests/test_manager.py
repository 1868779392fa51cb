"""What a manager calls, names, refuses and says, in one process: each call by its cases."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt import manager
from ckpt.errors import ConfigError, DamagedError, MetricError, MissingError, Preempted, StorageError
from ckpt.formats.native.manifest import digest
from ckpt.root.catalog import HISTORY

FOREGROUND = ckpt.SaveOptions(background=False)


class Run:
    """A model with its optimizer and loader, and their manager."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(TensorDataset(torch.arange(6.0).reshape(-1, 1)), 2)
        objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "dataloader": self.loader}
        self.manager = ckpt.StateManager(root, **{**objects, "saving": FOREGROUND, **options})

    def train(self, epochs: int = 1) -> None:
        for _ in self.manager.epochs(epochs):
            for (inputs,) in self.manager.batches(self.loader):
                self.step(inputs)

    def step(self, inputs: torch.Tensor | None = None, **metrics: float) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 1) if inputs is None else inputs).pow(2).mean().backward()
        self.optimizer.step()
        self.manager.step(metrics or None)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    found = Run(tmp_path / "run")
    with found.manager:
        yield found


def _names(root: Path) -> list[str]:
    return sorted(found.name for found in ckpt.list_checkpoints(root))


# -- saves ------------------------------------------------------------------------------------------------------------


def test_the_source_of_the_objects_is_told_before_and_after_a_save_and_before_a_load(run: Run) -> None:
    told: list[Any] = []
    source: Any = run.manager.session.source
    source.before_save = lambda folder: told.append(("before save", folder))
    source.after_save = lambda: told.append("after save")
    source.before_load = lambda folder: told.append(("before load", folder))
    source.release = lambda: told.append("released")
    run.manager.save_state("a")
    assert told == [("before save", f"{run.manager.url}/a"), "after save"]
    run.manager.load_state()
    assert told[2:] == [("before load", f"{run.manager.url}/a")]
    run.manager.close()
    assert told[3:] == ["released"]


def test_a_metric_that_cannot_be_ranked_by_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=ckpt.Keep(last=1, best=1, metric="loss"))
    with run.manager as manager:
        manager.save_state("good", metrics={"loss": 1.0})
        with pytest.raises(MetricError, match="metric 'loss' is NaN at bad"):
            manager.save_state("bad", metrics={"loss": float("nan")})
        assert _names(tmp_path) == ["good"]
        manager.save_state("other", metrics={"accuracy": float("nan")})


def test_checkpoints_are_named_by_their_step_and_have_the_metrics_of_the_last_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.manager as manager:
        manager.resume()
        run.step(loss=0.5)
        assert manager.save_state() == "step-00000001"
        run.step()
        assert manager.save_state() == "step-00000002"
        assert manager.save_state("named", metrics={"loss": 0.25}, wait=True) == "named"
    found = {one.name: one.manifest.metrics for one in ckpt.list_checkpoints(tmp_path) if one.manifest is not None}
    assert found == {"step-00000001": {"loss": 0.5}, "step-00000002": {}, "named": {"loss": 0.25}}


def test_steps_that_are_due_are_saved_and_the_final_state_too(tmp_path: Path) -> None:
    for every, names in (
        (2, ["step-00000002", "step-00000004", "step-00000006"]),
        (4, ["step-00000004", "step-00000006"]),
        (ckpt.Every(epoch_end=True), ["step-00000003", "step-00000006"]),
        (ckpt.Every(steps=3, epoch_end=True), ["step-00000003", "step-00000006"]),
        (ckpt.Every(steps=2, epoch_end=True), ["step-00000002", "step-00000003", "step-00000004", "step-00000006"]),
        (None, []),
    ):
        root = tmp_path / str(every).replace("/", "_")
        run = Run(root, save_every=every)
        with run.manager:
            run.train(2)
        assert (_names(root) if names else []) == names


class Scheduled(Run):
    """With a scheduler and a plain value."""

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(root, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.manager.register(best=0.0, schedule=self.scheduler)


AFTER_THE_LAST_STEP: dict[str, Callable[[Scheduled], object]] = {
    "a scheduler's step": lambda run: run.scheduler.step(),
    "a plain value": lambda run: run.manager.values.update(best=1.0),
    "a random number, as in an evaluation": lambda run: torch.rand(1),
    "a weight": lambda run: run.model.bias.data.add_(1),
    "nothing": lambda run: None,
}


@pytest.mark.parametrize("what", AFTER_THE_LAST_STEP)
def test_the_checkpoint_of_the_last_step_has_the_end_of_its_epoch_too(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is the same stays where it is. A line is said where a file of tensors was written."""
    caplog.set_level(logging.INFO, logger="ckpt")
    run = Scheduled(tmp_path, save_every=3)
    with run.manager as manager:
        for _ in manager.epochs(1):
            for (inputs,) in manager.batches(run.loader):
                run.step(inputs)
            AFTER_THE_LAST_STEP[what](run)
        at_end = manager.fingerprint()
    lines = [line.split(":")[0] for line in caplog.messages if "durable after" in line]
    assert lines == ["saved step-00000003", *(["updated step-00000003"] if what == "a weight" else [])]
    assert _names(tmp_path) == ["step-00000003"]
    files = {path.name for path in (tmp_path / "step-00000003").iterdir()}
    assert ("model.safetensors" in files) == (what != "a weight")
    assert ".saving" not in files
    assert ckpt.verify(tmp_path) == {"step-00000003": []}
    with Scheduled(tmp_path, save_every=3).manager as manager:
        assert list(manager.epochs(1)) == []
        assert manager.fingerprint() == at_end


def test_a_loader_that_does_not_know_its_end_has_its_end_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, save_every=3)
    with run.manager as manager:
        for _ in manager.epochs(1):
            for (inputs,) in manager.batches(batch for batch in run.loader):
                run.step(inputs)
    (found,) = ckpt.list_checkpoints(tmp_path)
    assert found.manifest is not None
    assert (found.name, found.manifest.progress["epoch"]) == ("step-00000003", 1)


@pytest.mark.parametrize("changed", [False, True])
def test_a_save_after_the_inner_loop_stays_as_it_is_unless_something_changes_after_it(
    tmp_path: Path, changed: bool
) -> None:
    run = Scheduled(tmp_path, save_every=2)
    told: list[Any] = []
    run.manager.on_save(told.append)
    with run.manager as manager:
        for _ in manager.epochs(1):
            for (inputs,) in manager.batches(run.loader):
                run.step(inputs)
            manager.save_state()
            before = (tmp_path / "step-00000003" / "manifest.json").read_bytes()
            if changed:
                run.scheduler.step()
    assert (before != (tmp_path / "step-00000003" / "manifest.json").read_bytes()) == changed
    assert [report.name for report in told] == ["step-00000002", "step-00000003", *["step-00000003"] * changed]
    assert _names(tmp_path) == ["step-00000002", "step-00000003"]
    assert ckpt.verify(tmp_path) == {"step-00000003": [], "step-00000002": []}
    assert not list(tmp_path.glob("*/.saving"))


def test_every_checkpoint_is_reported_to_who_asked_for_it(run: Run) -> None:
    reports: list[Any] = []
    callback = reports.append
    assert run.manager.on_save(callback) is callback
    for name in "ab":
        run.manager.save_state(name)
    assert [report.name for report in reports] == ["a", "b"]
    with pytest.raises(ConfigError, match="on_save needs a function"):
        run.manager.on_save(3)  # type: ignore[arg-type]


def test_an_exception_says_that_the_save_that_was_due_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, save_every=1)
    with suppress(ZeroDivisionError), run.manager as manager:
        for (inputs,) in manager.batches(run.loader):
            run.step(inputs)
            raise ZeroDivisionError
    assert (
        "step 1 was due to be saved at the end of its iteration, which ZeroDivisionError has cut short" in caplog.text
    )
    assert _names(tmp_path) == []
    caplog.clear()
    other = Run(tmp_path / "other", save_every=1)
    for (inputs,) in other.manager.batches(other.loader):
        other.step(inputs)
        break
    try:
        raise KeyError
    except KeyError:
        other.manager.close()
    assert "which KeyError has cut short" in caplog.text
    clean = Run(tmp_path, save_every=1)
    with clean.manager as manager:
        for (inputs,) in manager.batches(clean.loader):
            clean.step(inputs)
            break
    assert _names(tmp_path) == ["step-00000001"]  # at the end of the manager


def test_the_last_boundary_is_saved_after_an_exception_if_that_is_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path, save_every=ckpt.Every(exception=True))
    with suppress(ZeroDivisionError), run.manager as manager:
        for number, (inputs,) in enumerate(manager.batches(run.loader)):
            if number == 2:
                raise ZeroDivisionError
            run.step(inputs)
    assert _names(tmp_path) == ["step-00000002"]


def test_a_manager_that_is_dropped_says_that_its_last_save_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, save_every=1)
    before = signal.getsignal(signal.SIGTERM)
    for (inputs,) in run.manager.batches(run.loader):
        run.step(inputs)
        break
    del run
    gc.collect()
    assert "the last save to" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before
    caplog.clear()
    quiet = Run(tmp_path / "other")
    del quiet
    gc.collect()
    assert "the last save to" not in caplog.text


def test_a_process_that_is_told_to_terminate_saves_and_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ckpt")
    before = signal.getsignal(signal.SIGTERM)
    run = Run(tmp_path)

    def train() -> None:
        with run.manager as manager:
            for (inputs,) in manager.batches(run.loader):
                assert not manager.told_to_stop()
                os.kill(os.getpid(), signal.SIGTERM)
                run.step(inputs)

    with pytest.raises(Preempted) as raised:
        train()
    assert raised.value.code == 143
    assert _names(tmp_path) == ["step-00000001"]
    assert f"asked to terminate: saved step 1 in {tmp_path}" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before


# -- loads ------------------------------------------------------------------------------------------------------------


def test_a_step_is_loaded_by_its_number_or_its_name(run: Run) -> None:
    with pytest.raises(MissingError, match="there is no checkpoint in"):
        run.manager.load_state()
    assert run.manager.resume() is None
    assert run.manager.restored is None
    run.step()
    run.manager.save_state()
    run.step()
    run.manager.save_state()
    for name, step in ((1, 1), ("step-00000002", 2), (None, 2)):
        restored = run.manager.load_state(name)
        assert (restored.step, run.manager.progress.step) == (step, step)
        assert run.manager.restored is restored
    for wrong in (9, "none"):
        with pytest.raises(MissingError):
            run.manager.load_state(wrong)


def test_after_a_newest_checkpoint_that_cannot_be_loaded_nothing_is_saved(tmp_path: Path) -> None:
    with Run(tmp_path).manager as manager:
        manager.save_state("a")
    for path in (tmp_path / "a").glob("*.safetensors"):
        path.write_bytes(b"")
    for name, refused in ((None, True), ("a", False)):
        with Run(tmp_path).manager as manager:
            with pytest.raises(DamagedError):
                manager.load_state(name)
            with pytest.raises(ConfigError):
                manager.save_state("b")
            found = manager.session.saver.root.lineage.failed_load
            assert bool(found) is refused


def test_a_run_that_has_all_its_epochs_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ckpt")
    for total, complete in ((2, False), (2, True), (1, True), (3, False)):
        run = Run(tmp_path, save_every=100)
        caplog.clear()
        with run.manager:
            run.train(total)
        assert (f"has all {total} epochs" in caplog.text) is complete, total


def test_a_load_drops_what_was_due_of_the_state_that_it_replaces(tmp_path: Path) -> None:
    run = Run(tmp_path, save_every=2)
    with run.manager as manager:
        passing = iter(manager.batches(run.loader))
        next(passing)
        run.step()
        manager.save_state("early")
        next(passing)
        run.step()
        manager.load_state("early")
    assert _names(tmp_path) == ["early"]


def test_calls_before_the_resume_and_after_the_end_are_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"called step\(\) before you resumed"):
        run.manager.step()
    run.manager.resume()
    run.step()
    run.manager.close()
    run.manager.close()
    with pytest.raises(ConfigError, match=r"step\(\) on a closed StateManager"):
        run.manager.step()
    with pytest.raises(ConfigError, match=r"epochs\(\) or batches\(\) on a closed StateManager"):
        next(iter(run.manager.batches(run.loader)))


def test_in_a_forked_child_every_call_is_refused_and_close_does_nothing(run: Run) -> None:
    manager = run.manager
    manager.resume()
    owner = manager.session.saver.owner
    owner.is_here = False  # as after a fork
    calls: dict[str, Callable[[], object]] = {
        "epochs() or batches()": lambda: next(iter(manager.epochs(1))),
        "step()": manager.step,
        "save_state()": manager.save_state,
        "save_state('a')": lambda: manager.save_state("a"),
        "load_state()": manager.load_state,
        "fingerprint()": manager.fingerprint,
        "push_to_hub()": lambda: manager.push_to_hub("user/repo"),
    }
    for name, call in calls.items():
        with pytest.raises(ConfigError, match=rf"^{re.escape(name)}: this StateManager belongs to process"):
            call()
    with pytest.raises(ConfigError, match="a fork of it"):
        next(iter(manager.batches(run.loader)))
    manager.close()
    owner.is_here = True
    run.step()  # it is open


def test_snapshots_in_memory_are_left_for_a_restart_where_a_run_fails(tmp_path: Path) -> None:
    def fails() -> None:
        raise StorageError("no room")

    for number, (error, wait, keeps) in enumerate(
        ((None, None, False), (ZeroDivisionError(), None, True), (Preempted(143), None, False), (None, fails, True))
    ):
        kept: list[bool] = []
        manager = Run(tmp_path / str(number)).manager
        session: Any = manager.session
        memory, session.memory = session.memory, SimpleNamespace(close=lambda keep, kept=kept: kept.append(keep))
        assert memory is None
        if wait is not None:
            session.wait = wait
        with suppress(ZeroDivisionError, Preempted, StorageError), manager:
            if error is not None:
                raise error
        assert kept == [keeps], error


# -- small calls ------------------------------------------------------------------------------------------------------


def test_every_so_many_steps_is_true_of_steps_that_were_made(run: Run) -> None:
    run.manager.resume()
    assert not run.manager.every(1)
    found = []
    for _ in range(4):
        run.step()
        found.append((run.manager.every(1), run.manager.every(2), run.manager.every(3)))
    assert found == [(True, False, False), (True, True, False), (True, False, True), (True, True, False)]
    for wrong in (0, -1, 1.5, None):
        with pytest.raises(ConfigError, match="needs a number of steps, 1 or more"):
            run.manager.every(wrong)  # type: ignore[arg-type]


def test_batches_are_counted_from_where_the_epoch_is(run: Run) -> None:
    assert [number for number, _ in run.manager.enumerate(run.loader)] == [0, 1, 2]
    assert [number for number, _ in run.manager.enumerate(run.loader, 5)] == [5, 6, 7]
    assert len(run.manager.batches(run.loader)) == 3


def test_the_model_is_without_its_wrappers_and_named_where_there_are_several(run: Run, tmp_path: Path) -> None:
    assert run.manager.unwrap() is run.model
    wrapped = nn.DataParallel(nn.Linear(1, 1))
    assert run.manager.unwrap(wrapped) is wrapped.module
    models = {"a": nn.Linear(1, 1), "b": wrapped}
    with ckpt.StateManager(tmp_path / "two", model=models) as manager:
        with pytest.raises(ConfigError, match="this manager has 2 models"):
            manager.unwrap()
        assert manager.unwrap(models["b"]) is wrapped.module


def test_a_manager_shows_what_it_manages(run: Run) -> None:
    run.manager.register(generator=torch.Generator(), best=1.5)
    assert repr(run.manager) == f"StateManager({run.manager.url!r}, parts=['model', 'optimizer', 'generator'])"
    table = run.manager._repr_html_()
    assert "model, optimizer, generator" in table
    assert "best" in table
    assert run.manager.values["best"] == 1.5
    assert run.manager.mirror_error is None
    prints = run.manager.fingerprint()
    assert {"model", "optimizer", "rng", "data"} <= prints.keys()
    assert run.manager.fingerprint() == prints
    run.model.weight.data.add_(1)
    changed = {name for name, value in run.manager.fingerprint().items() if prints.get(name) != value}
    assert changed == {"model"}


def test_generators_go_back_to_the_load_once_more(run: Run) -> None:
    run.manager.save_state("a")
    run.manager.load_state()
    drawn = torch.rand(2)
    run.manager.rewind_rng()
    assert torch.equal(torch.rand(2), drawn)


def test_a_mirror_has_what_was_committed_and_its_own_rule_of_what_to_keep(tmp_path: Path) -> None:
    mirror = ckpt.Mirror(tmp_path / "mirror", keep=ckpt.Keep(last=1))
    run = Run(tmp_path / "run", mirror=mirror, keep=ckpt.Keep(last=2))
    with run.manager as manager:
        for name in "abc":
            manager.save_state(name)
        assert manager.mirror_error is None
    assert (_names(tmp_path / "run"), _names(tmp_path / "mirror")) == (["b", "c"], ["c"])
    plain = Run(tmp_path / "other", mirror=tmp_path / "copy", keep=ckpt.Keep(last=2))
    with plain.manager as manager:
        for name in "abc":
            manager.save_state(name)
    assert _names(tmp_path / "copy") == ["b", "c"]


def test_gradients_are_saved_as_the_options_say(tmp_path: Path) -> None:
    for gradients, there in ((True, True), (False, False), (None, True)):
        run = Run(tmp_path / str(gradients), saving=ckpt.SaveOptions(background=False, gradients=gradients))
        with run.manager as manager:
            manager.resume()
            run.model(torch.ones(1, 1)).sum().backward()
            manager.save_state("a")
            run.optimizer.zero_grad()
            manager.load_state()
            assert (run.model.weight.grad is not None) is there


@pytest.mark.parametrize("due", [set(), {"metrics"}, {"save"}])
def test_a_save_that_was_due_when_a_manager_is_dropped_is_said_to_be_lost(
    due: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[str] = []
    preemption, schedule = (SimpleNamespace(close=lambda name=name: closed.append(name)) for name in ("p", "s"))
    manager._drop(preemption, schedule, due, "runs/x")  # type: ignore[arg-type]
    assert closed == ["p", "s"]
    assert ("could not make the last save to runs/x" in caplog.text) == ("save" in due)


def test_nothing_but_the_log_is_left_of_a_manager_that_was_closed(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="ckpt")
    kind = type(run.loader)
    assert kind is not DataLoader
    run.manager.resume()
    run.step()
    run.manager.save_state()
    run.manager.close()
    assert type(run.loader) is DataLoader
    assert caplog.text.count("WARNING") == caplog.text.count("can't see where this loop's batches")


def test_goodput_tells_of_all_attempts_and_of_this_one_so_far_also_when_it_is_closed(tmp_path: Path) -> None:
    first = Run(tmp_path, save_every=2)
    assert first.manager.goodput() is not None  # that nothing was trained yet
    with first.manager:
        first.train()
    shutil.rmtree(tmp_path / "step-00000003")
    again = Run(tmp_path, save_every=2)
    with again.manager:
        again.manager.resume()
        before = again.manager.goodput()
        again.train()
        running = again.manager.goodput()
    after = again.manager.goodput()
    for found, attempts in ((before, 2), (running, 2), (after, 2)):
        assert found is not None
        assert (found.attempts, found.lost_steps) == (attempts, 1)
        assert 0 < found.share < 1
        assert str(found).startswith("goodput ")
    assert running is not None
    assert after is not None
    assert 0 < running.seconds <= after.seconds
    assert after == again.manager.goodput()  # no time passes any more


def test_goodput_is_not_known_where_the_history_can_not_be_read(tmp_path: Path) -> None:
    text = json.dumps({"format": "ckpt history", "version": 2, "left_out": 0})  # of a newer version
    (tmp_path / HISTORY).write_text(json.dumps([digest(text.encode()), text]))
    assert Run(tmp_path).manager.goodput() is None
