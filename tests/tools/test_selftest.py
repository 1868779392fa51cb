"""`ckpt selftest` and `ckpt.testing`: programs that resume exactly pass; of others, the step and part that differ."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.selftest import Program, Report, check, in_a_process, kill_steps, last_lines
from ckpt.testing import InexactResumeError, assert_exact_resume
from tests.helpers.processes import Script
from tests.helpers.variations import cells
from tests.selftest_scripts.causes import SCRIPTS as SCRIPTS_BY_CAUSE
from tests.selftest_scripts.habits import HABITS

SCRIPTS = Path(__file__).resolve().parent.parent / "selftest_scripts"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _sums_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}.items():
        monkeypatch.setenv(name, value)


def forked(program: Program, plan: Path, log: Path) -> tuple[int | None, str]:
    """As processes of their own, but forked from one that has imported torch: the same in a tenth of the time."""
    with Script("-m", "ckpt.selftest", plan, log=log, ranks=program.processes) as running:
        with suppress(subprocess.TimeoutExpired):
            running.wait(program.timeout)
        return running.poll(), last_lines(log)


def killed_under_torchrun(program: Program, plan: Path, log: Path) -> tuple[int | None, str]:
    return (forked if json.loads(plan.read_text())["kill_at"] is None else in_a_process)(program, plan, log)


def run_script(script: str, *arguments: str, kills: int = 1) -> Report:
    return check(Program(target=str(SCRIPTS / script), arguments=arguments, kills=kills, seed=1, start=forked))


@pytest.mark.parametrize(
    ("script", "arguments"),
    cells(
        [("nanogpt_like.py", ()), ("dcgan_like.py", ()), ("diffusers_like.py", ("--output_dir", "{root}"))],
        often=[("dcgan_like.py", ())],
    ),
)
def test_a_loop_that_resumes_exactly_passes(script: str, arguments: tuple[str, ...]) -> None:
    report = run_script(script, *arguments)
    assert report.exact, str(report)
    assert "exact: every batch" in str(report)
    ((killed, resumed),) = report.resumed
    assert 0 < resumed < killed <= report.steps


MISTAKES = [
    ("nanogpt_like.py", "rate", "learning rates"),
    ("nanogpt_like.py", "generator", "losses"),
    ("nanogpt_like.py", "optimizer", "parameters"),
    ("nanogpt_like.py", "accumulation", "gradients"),
    ("nanogpt_like.py", "text", "losses"),
    ("nanogpt_like.py", "average", "losses"),
    ("dcgan_like.py", "enumerate", "optimizer"),
    ("dcgan_like.py", "epochs", "extra steps"),
    ("dcgan_like.py", "noise", "nondeterministic"),
    ("dcgan_like.py", "generator", "losses"),
    ("diffusers_like.py", "average", "losses"),
]


@pytest.mark.parametrize(("script", "trap", "what"), cells(MISTAKES, often=MISTAKES[3:9:2]))
def test_a_planted_mistake_is_found_where_it_shows_first(script: str, trap: str, what: str) -> None:
    arguments = ("--output_dir", "{root}") if script.startswith("diffusers") else ()
    report = run_script(script, "--trap", trap, *arguments, kills=4 if trap == "epochs" else 1)
    assert report.difference is not None, str(report)
    assert report.difference.what == what, str(report)


@pytest.mark.parametrize(
    "script", cells(SCRIPTS_BY_CAUSE, often=list(SCRIPTS_BY_CAUSE)[::3]), ids=lambda script: script.__name__
)
def test_the_verdict_is_right_and_the_part_that_differs_is_named(script: Callable[[], None]) -> None:
    report = run_script("causes.py", script.__name__)
    assert not report.failure, str(report)
    assert (report.difference.what if report.difference else "") == SCRIPTS_BY_CAUSE[script], str(report)


def test_a_script_that_trains_on_batches_again_after_accelerates_own_load_is_told_so() -> None:
    report = run_script("diffusers_like.py", "--trap", "repeat", "--output_dir", "{root}")
    assert report.difference is not None, str(report)
    assert any("training repeats batch" in text for text in report.difference.said), str(report)


def test_a_count_by_enumerate_is_found_to_begin_at_0_again() -> None:
    """ckpt cannot see who counts: the report of the resume names manager.enumerate, and the selftest finds it."""
    assert not run_script("habits.py", "enumerated").exact


@pytest.mark.parametrize(
    "habit", cells((habit for habit in HABITS if habit != "enumerated"), often=["plain", "accumulated", "streamed"])
)
def test_a_habit_of_users_resumes_exactly_or_ckpt_itself_says_that_it_does_not(habit: str) -> None:
    report = run_script("habits.py", habit)
    assert not report.failure, str(report)
    assert report.difference is None or report.difference.said, str(report)


TWO_RANKS = """
import sys, torch, torch.distributed as dist, ckpt
dist.init_process_group("gloo")
torch.manual_seed(7)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
counts = dist.get_rank() == 1 and len(sys.argv) > 1  # from 0 again after a resume: in a loss that changes no gradient
with ckpt.StateManager("out", model=model, optimizer=optimizer, save_every=2) as manager:
    manager.resume()
    count = 0
    while manager.progress.step < 6:
        inputs = torch.full((1, 2), float(count if counts else manager.progress.step))
        outputs = model(inputs)
        (outputs.sum() * (1 - dist.get_rank()) + inputs.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.step()
        count += 1
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("arguments", "different"), [((), None), (("--count",), (1, "losses"))], ids=["both are exact", "one is not"]
)
def test_ranks_are_compared_each_with_itself(
    arguments: tuple[str, ...], different: tuple[int, str] | None, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(TWO_RANKS)
    report = check(Program(target=str(script), arguments=arguments, kills=1, processes=2, start=forked))
    assert not report.failure, str(report)
    found = report.difference
    assert (found and (found.rank, found.what)) == different, str(report)


@pytest.mark.long
@pytest.mark.parametrize("start", [forked, killed_under_torchrun])
def test_shards_are_compared_each_with_itself(start: Callable[..., tuple[int | None, str]]) -> None:
    example = str(EXAMPLES / "train_fsdp.py")
    report = check(Program(target=example, arguments=("--epochs", "1"), kills=1, processes=2, start=start))
    assert report.exact, str(report)


def test_the_command_says_what_it_found_and_its_status_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.selftest.Program", partial(Program, start=forked))
    done = CliRunner().invoke(main, ["selftest", "--kills", "1", str(SCRIPTS / "nanogpt_like.py"), "--trap", "rate"])
    assert done.exit_code == 1
    assert "first differs at step" in done.output
    assert "scheduler=..." in done.output


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.selftest.Program", partial(Program, start=forked))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))  # torch makes it when it is imported
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    done = CliRunner().invoke(main, ["selftest", "--kills", "1", str(SCRIPTS / "nanogpt_like.py")])
    assert done.exit_code == 0, done.output
    left = {path.name for path in tmp_path.iterdir()}
    assert {name for name in left if not name.startswith("pymp-")} == {"here"}  # that is of this test's fork server
    assert os.listdir(here) == []


def train(root: str) -> None:
    """Found by its name in this file, in a process of its own."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckpt.StateManager(root, model=model, optimizer=optimizer, save_every=2) as manager:
        for _ in manager.epochs(1):
            for batch in manager.batches(torch.arange(12.0).view(6, 1, 2)):
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                manager.step()


def train_with_a_count_of_its_own(root: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.resume()
        for step in range(6):
            model(torch.full((1, 2), float(step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.step()
            manager.save_state(f"at-{manager.progress.step}")


class TestFunctions:
    def test_one_that_resumes_exactly_passes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckpt.testing.Program", partial(Program, start=forked))
        assert assert_exact_resume(train, kills=1).exact

    def test_one_that_does_not_raises_with_the_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckpt.testing.Program", partial(Program, start=forked))
        with pytest.raises(InexactResumeError, match="first differs at step") as caught:
            assert_exact_resume(train_with_a_count_of_its_own, kills=1)
        assert caught.value.report.difference is not None
        assert caught.value.report.difference.what == "losses"

    def test_one_inside_another_is_refused(self) -> None:
        def inner(root: str) -> None: ...

        with pytest.raises(ckpt.ConfigError, match="top level"):
            assert_exact_resume(inner)

    def test_arguments_are_for_scripts(self) -> None:
        with pytest.raises(ckpt.ConfigError, match="Only scripts"):
            assert_exact_resume(train, "--epochs", "2")


class TestNothingToCompare:
    @pytest.fixture(autouse=True)
    def _forked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckpt.selftest.Program", partial(Program, start=forked))

    def refused(self, tmp_path: Path, text: str) -> str:
        script = tmp_path / "script.py"
        script.write_text(text)
        done = CliRunner().invoke(main, ["selftest", str(script)])
        assert done.exit_code == 2
        return done.output

    def test_a_program_without_an_optimizer(self, tmp_path: Path) -> None:
        assert "never called optimizer.step()" in self.refused(tmp_path, "print('done')")

    def test_a_program_that_fails_by_itself_shows_its_own_error(self, tmp_path: Path) -> None:
        output = self.refused(tmp_path, "raise ValueError('no such data')")
        assert "ended with status 1" in output
        assert "no such data" in output

    def test_a_program_that_never_saves(self, tmp_path: Path) -> None:
        text = "import torch\np = torch.nn.Parameter(torch.ones(1))\ntorch.optim.SGD([p], 0.1).step()\n"
        assert "--save-every" in self.refused(tmp_path, text)

    def test_every_wrong_option_is_named_at_once(self) -> None:
        with pytest.raises(ckpt.ConfigError, match=r"is not a file; kills=0: at least 1 is needed; timeout=0"):
            Program(target="no-such.py", kills=0, timeout=0)


def test_it_dies_after_steps_that_follow_different_saves() -> None:
    def kills(number: int, seed: int) -> list[int]:
        return kill_steps(trace, Program(target=__file__, kills=number, seed=seed))

    trace: list[dict[str, Any]] = [{"kind": "step", "number": number} for number in range(1, 21)]
    trace += [{"kind": "saved", "number": number} for number in (4, 8, 12, 16, 20)]
    for seed in range(20):
        chosen = kills(3, seed)
        assert len({(kill - 1) // 4 for kill in chosen}) == 3
        assert all(4 < kill <= 20 for kill in chosen)
    assert kills(9, 0)[-1] > 16  # no more than there are saves in the middle
    assert len(kills(9, 0)) == 4


def test_a_program_is_killed_when_its_time_is_over(tmp_path: Path) -> None:
    program = Program(target=__file__, timeout=0.05)
    assert in_a_process(program, tmp_path / "no plan", tmp_path / "log") == (None, "")  # before it says anything
