"""The selftest with the program in this process: what is recorded of it, and what is said of its mistakes."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import ckpt
from ckpt.data.loop import Loop
from ckpt.manager import StateManager
from ckpt.options import ManagerOptions
from ckpt.selftest import child, recorder
from ckpt.selftest.check import Program, ProgramError, Report, Run, check, last_lines
from ckpt.selftest.compare import Difference
from ckpt.selftest.trace import Resumed
from ckpt.session import Saves, Session

PROGRAM = """
from __future__ import annotations

import dataclasses
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

import ckpt


@dataclasses.dataclass
class Sizes:
    batch: int = 2


def train(root):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    noise = torch.Generator().manual_seed(1)
    loader = DataLoader(torch.arange(32.0).view(16, 2), batch_size=Sizes().batch, shuffle=True)
    saving = ckpt.SaveOptions(background=False)
    with ckpt.StateManager(root, model=model, optimizer=optimizer, saving=saving, {options}) as manager:
        {before}
        for batch in {batches}:
            loss = model(batch {noise}).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            {inside}
            manager.step()
            {after}
    print("ended")
"""
SCRIPT = "\n\nif __name__ == '__main__':\n    train(*sys.argv[1:])\n"
EXACT = {
    "options": "save_every=2, scheduler=scheduler",
    "before": "",
    "batches": "manager.batches(loader)",
    "noise": "",
    "inside": "scheduler.step()",
    "after": "",
}


class Killed(BaseException):
    """In place of SIGKILL."""


def in_this_process(program: Program, plan: Path, log: Path) -> tuple[int | None, str]:
    """Run a plan here, and leave nothing of the recorder behind."""
    handles: list[Any] = []
    logger = logging.getLogger("ckpt")

    def kill(process: int, number: int) -> None:
        assert (process, number) == (os.getpid(), signal.SIGKILL)
        raise Killed

    def kept(register: Callable[[Any], Any]) -> Callable[[Any], None]:
        return lambda hook: handles.append(register(hook))

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (StateManager, "__init__"), (Saves, "to_root"), (Session, "load"), (ManagerOptions, "open_tiers"),
            (Loop, "_through"), (torch.Tensor, "backward"), (DataLoader, "__iter__"),
        ):  # fmt: skip
            patch.setattr(owner, name, getattr(owner, name))
        patch.setattr(sys, "argv", sys.argv)
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(logger, "handlers", [*logger.handlers])
        for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"):
            patch.setattr(recorder, name, kept(getattr(recorder, name)))
        patch.setattr(os, "kill", kill)
        try:
            child.main(str(plan))
        except Killed:
            return -9, ""
        except BaseException:
            log.write_text(traceback.format_exc())
            return 1, last_lines(log)
        finally:
            for handle in handles:
                handle.remove()
            sys.modules.pop("selftest_program", None)
    return 0, ""


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Folders of the selftest lie in memory, and none is left."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(tmp_path)
    yield
    assert list(folder.glob("*selftest*")) == []


def program(folder: Path, function: str = "train", **changes: Any) -> Program:
    options = {name: changes.pop(name) for name in list(changes) if name not in EXACT}
    path = folder / "selftest_program.py"
    path.write_text(PROGRAM.format(**{**EXACT, **changes}) + SCRIPT)
    return Program(**{"target": str(path), "function": function, "kills": 2, "start": in_this_process, **options})


def test_a_program_that_resumes_exactly_is_said_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    found = check(program(tmp_path, say=said.append))
    assert found.exact
    assert str(found).splitlines()[0] == "straight run: 8 optimizer steps, 4 saves"
    assert str(found).splitlines()[-1] == (
        "exact: every batch, loss, gradient, learning rate, parameter and buffer is the same"
    )
    assert len(found.resumed) == 2
    assert all(resumed < killed <= resumed + 2 for killed, resumed in found.resumed)
    first, second = said
    killed = ", ".join(str(killed) for killed, _ in found.resumed)
    assert (first, second) == (
        "running it straight ...",
        f"8 optimizer steps, 4 saves; killing it after step {killed} ...",
    )
    assert capsys.readouterr().out == "ended\n" * 2  # twice of four times


@pytest.mark.parametrize("argument", ["{root}", "somewhere"])
def test_a_script_gets_its_arguments_and_a_root_of_the_test(tmp_path: Path, argument: str) -> None:
    found = check(program(tmp_path, "", arguments=(argument,), save_every=3, kills=1))
    assert found.exact, found
    assert found.saves == 2  # at 3 and 6
    assert not Path("somewhere").exists()


MISTAKES: dict[str, tuple[dict[str, str], str, str]] = {
    "a scheduler that no manager has": ({"options": "save_every=2"}, "rates", "LambdaLR is not managed"),
    "a generator that is not registered": (
        {"noise": "+ torch.randn(2, 2, generator=noise)"}, "inputs", "A generator that noise is drawn from"
    ),
    "data that ckpt does not know of": (
        {"batches": "torch.randn(8, 2, 2)", "before": "manager.resume()"}, "inputs", "The straight run never had it"
    ),
    "an optimizer that no manager has": (
        {"before": "optimizer = torch.optim.Adam(model.parameters())", "inside": ""}, "parameters", "is not managed"
    ),
    "a change after the save": (
        {"after": "torch.nn.init.constant_(model[1].bias, manager.progress.step)", "before": "manager.resume()",
         "batches": "torch.arange(32.0).view(8, 2, 2)[manager.progress.step :]"},
        "losses", "Code after manager.step() changes models",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_and_its_cause_named(tmp_path: Path, mistake: str) -> None:
    changes, what, likely = MISTAKES[mistake]
    found = check(program(tmp_path, **changes))
    assert not found.exact
    assert found.difference is not None
    assert (found.difference.what, found.difference.rank) == (what, 0)
    assert likely in found.cause
    assert found.difference.resumed is not None
    assert found.difference.step > found.difference.resumed.number


def test_a_program_that_fails_is_shown_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"run straight, without a kill, ended with status 1:(.|\n)*Error: mine"):
        check(program(tmp_path, inside="raise ValueError('mine')"))
    found = check(program(tmp_path, before="manager.resume() and 1 / 0"))
    assert "NOT exact: the program, resumed after kill 1, ended with status 1:" in found.failure
    assert "ZeroDivisionError" in str(found)
    assert not found.exact


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": "[]", "before": "manager.resume()"}, r"no optimizer\.step\(\) was seen"),
        ({"options": "scheduler=scheduler"}, "no save between the first and the last of its 8 optimizer steps"),
    ],
)
def test_what_cannot_be_tested_is_refused(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ckpt.ConfigError, match=message):
        check(program(tmp_path, **changes))


def test_every_step_save_and_resume_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = Run(program(tmp_path), tmp_path / "run")
    run.killed([5])
    killed, resumed = (traces[0] for traces in run.traces)
    assert [step.number for step in killed.steps] == [1, 2, 3, 4, 5]
    assert [(save.number, save.progress["step"]) for save in killed.saves] == [(2, 2), (4, 4)]
    assert killed.end is None
    assert killed.resumed is None
    assert resumed.resumed is not None
    assert (resumed.resumed.number, resumed.resumed.tensors) == (4, killed.saves[-1].tensors)
    assert [step.number for step in resumed.steps] == [5, 6, 7, 8]
    assert resumed.end is not None
    assert (resumed.end.number, resumed.end.loaders) == (8, True)
    assert resumed.steps[0] == killed.steps[4]
    for step in (*killed.steps, *resumed.steps):
        assert (step.optimizer, step.managed, step.named) == ("optimizer", True, [])
        assert [len(found) for found in (step.batches, step.inputs, step.losses)] == [1, 1, 1]
        assert step.inputs[0].split()[0] == "model"
        names = {f"model.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")}
        assert step.gradients.keys() == step.parameters.keys() == names
        assert step.buffers.keys() == {
            f"model.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
        }
        assert step.rates == pytest.approx([0.1 / step.number])
        assert step.start.keys() == {"random numbers", "models", "learning rates"}
        assert step.start["learning rates"] == str(step.rates)
        assert float(step.losses[0]) > 0
    for values in ("parameters", "gradients", "batches", "inputs", "losses", "buffers"):
        seen = [str(getattr(step, values)) for step in killed.steps]
        assert len(set(seen)) == 5, values
    for save in killed.saves:
        assert (save.batches, save.inputs, save.losses) == ([], [], [])
        assert (save.forgotten, save.schedulers) == ([], True)
        assert save.tensors.keys() == {
            *killed.steps[0].parameters, *killed.steps[0].buffers, "learning rates of optimizer 0",
            *(f"optimizer 0 of {name}" for name in names),
        }  # fmt: skip


def test_what_ckpt_warns_of_and_what_no_manager_has_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    before = (
        "other = nn.Linear(1, 1); second = torch.optim.SGD(other.parameters(), lr=0.0); "
        "import logging; logging.getLogger('ckpt').warning('odd'); manager.resume()"
    )
    inside = (
        "model.eval()(batch); other(batch[:, :1]).sum().backward(); second.step(); "
        "torch.nn.init.constant_(other.bias, float(manager.progress.step)); scheduler.step()"
    )
    run = Run(
        program(tmp_path, before=before, inside=f"{inside}; model.train()", options="save_every=2"), tmp_path / "run"
    )
    run.straight()
    trace = run.traces[0][0]
    assert [step.number for step in trace.steps] == list(range(1, 17))
    ours, others = trace.steps[::2], trace.steps[1::2]
    assert {step.optimizer for step in ours} == {"optimizer"}
    assert {(step.optimizer, step.managed, tuple(step.rates)) for step in others} == {("SGD 0", False, (0.0,))}
    assert all(len(step.inputs) == 1 and step.losses for step in ours)  # not of an evaluation
    assert all(step.inputs == [] and len(step.losses) == 1 for step in others)
    assert all("odd" in step.named for step in trace.steps)
    assert others[0].gradients.keys() == {"parameter 0 of SGD", "parameter 1 of SGD"}
    assert trace.saves[0].forgotten == ["LambdaLR"]
    assert not trace.saves[0].schedulers
    assert trace.end is not None
    assert "Linear" in trace.end.changed
    assert "Linear" in trace.end.others


def test_a_report_says_first_what_differs_and_why() -> None:
    long = " ".join(["word"] * 40)
    found = Difference("losses", 1, 1, 7, long, Resumed(4, "step-4", {}), (), ("a", "b", "c", "d", "e"))
    report = Report(8, 3, ((5, 4),), found, "cause", named=found.named)
    lines = str(report).splitlines()
    assert lines[:3] == [
        "straight run: 8 optimizer steps, 3 saves",
        "killed after step 5, resumed from step 4",
        "NOT exact: first differs at step 7, 3 after the resume, on rank 1, in its losses",
    ]
    assert lines[3].startswith("  what:   word word")
    assert lines[4].startswith(" " * 10 + "word")  # below the text of the line before
    assert all(len(line) <= 110 for line in lines)
    assert lines[5:] == ["  likely: cause", *(f"  ckpt says: {text}" for text in "abcd")]
    assert not report.exact
    assert "after the resume" not in str(Report(8, 3, (), Difference("losses", 0, 0, 7, "x"), "y"))
