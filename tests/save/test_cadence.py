"""How often a run saves with `save_every="auto"`: the rule, what it takes from the past, and runs that are killed."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.root.catalog import History, PastAttempt
from ckpt.save import cadence
from ckpt.save.cadence import DAY, Cadence, Failures, Lost, Past, SlowSteps, best_interval, bounded, spelled
from ckpt.storage import open_storage
from ckpt.util.option_values import parse_duration
from tests.helpers.places import intact
from tests.helpers.processes import run_ranks
from tests.helpers.training import slow_losses

GONE = ("another machine", 1, 1, "1")


@pytest.mark.parametrize("every", [2 * 3600.0, 86_400.0, 20 * 86_400.0])
@pytest.mark.parametrize("save", [0.03, 1.0, 16.0, 120.0])
def test_no_other_interval_loses_less_than_the_best_one(save: float, every: float) -> None:
    best = best_interval(save, every)
    loses = [Lost.of(best * factor, save, 10, 200, every).total for factor in (1, 0.5, 0.9, 1.1, 2)]
    assert loses[0] <= min(loses) * 1.0001


def test_where_a_save_takes_longer_than_the_job_lives_it_saves_once_in_a_life() -> None:
    assert best_interval(300, 100) == 100


def test_what_is_lost_is_waiting_half_an_interval_and_a_restart_for_each_failure() -> None:
    lost = Lost.of(100, 1, 10, 50, 1e6)
    assert lost.waiting == pytest.approx(0.01, rel=0.02)
    assert lost.repeated == pytest.approx((50 + 10) / 1e6, rel=0.02)
    assert lost.restarting == pytest.approx(50 / 1e6, rel=0.02)
    assert Lost.of(1e7, 1, 10, 50, 100).total == 1


@pytest.mark.parametrize(
    ("interval", "save", "durable", "found"),
    [
        (5, 0.01, 1, 60),  # no more often than every minute
        (70, 0.01, 45, 90),  # half of the time, the disk is idle
        (9000, 0.1, 10, 3600),  # no more rarely than every hour
        (9000, 60, 60, 6000),  # unless that costs more than 1 %
        (300, 1, 10, 300),
        (300, 1, 4000, 8000),
    ],
)
def test_the_interval_has_bounds(interval: float, save: float, durable: float, found: float) -> None:
    assert bounded(interval, save, durable) == found


def test_a_time_is_spelled_as_save_every_takes_it() -> None:
    said = {0.25: "0.25s", 59.7: "1min", 316: "5min 16s", 3600: "1h", 5430: "1h 30min", 831_000: "9d 15h"}
    assert {seconds: spelled(seconds) for seconds in said} == said
    assert all(parse_duration(text) == pytest.approx(seconds, rel=0.01) for seconds, text in said.items())


class TestFailures:
    def test_the_published_rate_counts_for_each_node_until_the_run_knows_better(self) -> None:
        every, why = Failures(16).every(Past(seconds=DAY, failures=2))
        assert every == pytest.approx(DAY / (16 * 0.0065))
        assert "published" in why

    def test_after_three_failures_the_run_knows_how_often_it_fails(self) -> None:
        every, why = Failures(1).every(Past(seconds=3000, failures=3), 600)
        assert every == 1200
        assert Failures(1).every(Past(failures=3))[0] == 1, "a history may say anything"
        assert why == "this run has failed 3 times in 1h"

    def test_a_run_that_has_lived_much_longer_than_expected_knows_it_too(self) -> None:
        assert Failures(1000).every(Past(seconds=3 * DAY / 6.5, failures=0))[0] == pytest.approx(3 * DAY / 6.5)

    def test_a_rate_that_is_given_comes_before_that_of_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(cadence.VARIABLE, "0.5")
        assert (Failures.known(2, 0.25).rate, Failures.known(2, None).rate) == (0.25, 0.5)

    @pytest.mark.parametrize("text", ["often", "0", "-1", "nan", "inf"])
    def test_a_rate_in_the_environment_that_is_none_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
    ) -> None:
        monkeypatch.setenv(cadence.VARIABLE, text)
        with pytest.raises(ckpt.ConfigError, match=f"CKPT_FAILURES_PER_NODE_DAY='{text}' must be a number above 0"):
            ckpt.StateManager(tmp_path, model=nn.Linear(1, 1), save_every="auto")


class TestPast:
    def test_attempts_that_were_killed_or_failed_are_failures_and_others_are_not(self) -> None:
        history = History(open_storage("memory://cadence"))
        ends = [("", ""), ("failed", "RuntimeError: x"), ("failed", "KeyboardInterrupt"), ("stopped", "SIGTERM")]
        for number, (ended, reason) in enumerate([*ends, ("finished", "")]):
            took = {"ready": 2.0, "waited": 3.0, "total": 105.0}
            history.note(
                PastAttempt(
                    f"{number}", "run", "x", first=5, last=15, seconds=took, ended=ended, reason=reason, writer=GONE
                )
            )
        history.note(PastAttempt("alive", "run", "x"))  # of this process
        past = Past.of(history)
        assert (past.failures, past.seconds, past.step, past.restart) == (2, 525, 10, 0)


class TestSlowSteps:
    def test_steps_beside_a_save_are_compared_with_the_others(self) -> None:
        steps, now = SlowSteps(), 100.0
        for save in range(3):
            for _ in range(10):
                now += 1
                assert not steps.step(now, busy=False) or save
            for number in range(4):
                now += 9 if number == 2 else 1.5  # one of them also evaluates
                steps.step(now, busy=number < 3)
        assert steps.slowed == pytest.approx(4 * 0.5)

    def test_what_could_be_noise_costs_nothing(self) -> None:
        steps, now = SlowSteps(), 100.0
        for number in range(100):
            now += 1.01 if number % 10 > 5 else 1
            steps.step(now, busy=number % 10 > 5)
        assert steps.slowed == 0


class TestCadence:
    def told(self, **more: Any) -> tuple[Cadence, list[float]]:
        told: list[float] = []
        found = Cadence(Failures(), **more, tell=lambda interval, why: told.append(interval))
        found.begin()
        return found, told

    def test_a_new_run_saves_first_after_a_minute_and_then_at_the_best_interval(self) -> None:
        found, told = self.told()
        assert (found.after_step(), told) == (60, [])
        found.saved(1, 10, 0)
        assert told == [found.interval] == [bounded(best_interval(1, DAY / 0.0065), 1, 10)]

    def test_a_small_change_is_neither_told_nor_followed(self) -> None:
        found, told = self.told()
        for waited in (1, 1.2, 0.9, 1.1):
            found.saved(waited, 1, 0)
        assert len(told) == 1
        for _ in range(20):
            found.saved(0.2, 1, 0)
        assert len(told) > 1

    def test_nothing_is_due_while_a_save_is_under_way(self) -> None:
        assert self.told(busy=lambda: True)[0].after_step() == math.inf

    def test_a_resumed_run_continues_with_the_interval_that_it_had(self) -> None:
        saves = ((0.5, 10.0), (0.7, 12.0), (0.6, 11.0))
        found, _ = self.told()
        for waited, durable in saves:
            found.saved(waited, durable, 0)
        resumed, told = self.told(past=lambda: Past(saves))
        assert told == [resumed.interval]
        assert resumed.interval == pytest.approx(found.interval, rel=0.2)


def test_a_rate_without_auto_is_refused() -> None:
    with pytest.raises(ckpt.ConfigError, match="failures_per_node_day= changes nothing without time='auto'"):
        ckpt.Every(steps=10, failures_per_node_day=0.1)


def _train(rank: int, folder: str, name: str, kill: bool) -> None:
    """A line for each step: its loss, and whether it was saved. The shortest interval is a twentieth of a second."""
    cadence.SHORTEST = cadence.LONGEST = 0.05
    cadence._CHEAP = 1.0
    ckpt.ranks.schedule_and_signals._POLL = 0.0
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 2)) if dist.is_initialized() else nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    record, seen = Path(folder, f"{name}-{rank}"), set()
    with ckpt.StateManager(f"{folder}/{name}", model=model, optimizer=optimizer, save_every="auto") as manager:
        for loss in slow_losses(manager, model, optimizer):
            saved = manager.session.state.saved_at or (0, 0)
            with record.open("a") as file:
                print(manager.progress.step, loss, saved[0], file=file)
            seen.add(saved[0])
            if kill and len(seen) > 4:  # the same on all ranks: none is to wait for one that is dead
                manager.wait()
                os.kill(os.getpid(), signal.SIGKILL)


def _lines(folder: Path, name: str, rank: int = 0) -> list[list[str]]:
    return [line.split() for line in (folder / f"{name}-{rank}").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_killed_resumes_exactly_with_the_interval_that_all_ranks_share(
    tmp_path: Path, ranks: int
) -> None:
    run_ranks(ranks, _train, str(tmp_path), "straight", False)
    assert -signal.SIGKILL in run_ranks(ranks, _train, str(tmp_path), "killed", True, dies=True)
    killed = _lines(tmp_path, "killed")
    run_ranks(ranks, _train, str(tmp_path), "killed", False)
    again = _lines(tmp_path, "killed")
    assert 0 < int(again[len(killed)][0]) - 1 <= int(killed[-1][0]), "it continues from a checkpoint"
    for rank in range(ranks):
        losses = {step: loss for step, loss, _ in _lines(tmp_path, "killed", rank)}
        assert losses == {step: loss for step, loss, _ in _lines(tmp_path, "straight", rank)}
        saved = {name: {line[2] for line in _lines(tmp_path, name, rank)} for name in ("straight", "killed")}
        assert saved["straight"] == {line[2] for line in _lines(tmp_path, "straight")}
        assert len(saved["straight"]) > 2
        assert saved["killed"] - {killed[-1][0]} >= {line[2] for line in killed} - {killed[-1][0]}
    assert intact(tmp_path / "killed")
    past = Past.of(History.of(open_storage(tmp_path / "killed")))
    assert past.failures == 1
    assert len(past.saves) > 3
