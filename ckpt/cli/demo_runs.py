"""The processes of `ckpt demo`: the training straight through, killed in the middle of a save, and resumed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO

import click

from ckpt.errors import CkptError
from ckpt.root.catalog import name_of_step
from ckpt.util.console import progress_bar, say

STRAIGHT = "straight"
INTERRUPTED = "interrupted"
_SAVES = 8
_FATAL_SAVE = 5

Losses = dict[int, float]  # by step


@dataclass(frozen=True)
class Plan:
    """What to run and where: `steps` of training with eight saves, killed in the fifth."""

    root: str
    steps: int

    @property
    def save_every(self) -> int:
        return self.steps // _SAVES

    @property
    def killed_at(self) -> int:
        return _FATAL_SAVE * self.save_every

    @property
    def cut_off(self) -> str:
        return name_of_step(self.killed_at)

    def folder(self, name: str) -> str:
        return f"{self.root}/{name}"


@dataclass
class Run:
    """A training process: its losses by step, what it printed to stderr, and its exit status."""

    losses: Losses = field(default_factory=dict)
    said: str = ""
    status: int = 0
    seconds: float = 0.0

    @property
    def began(self) -> int:
        """The step after which it started."""
        return min(self.losses) - 1


def train_straight(plan: Plan) -> Run:
    straight = _train(plan, STRAIGHT, "1  straight through", plan.steps)
    expect(straight, 0)
    _show_done("1  straight through", f"{len(straight.losses)} steps in {straight.seconds:.0f} s")
    return straight


def train_until_killed(plan: Plan) -> Run:
    victim = f"{plan.cut_off}/optimizer.safetensors"
    doomed = _train(plan, INTERRUPTED, "2  once more", plan.killed_at, "--die-writing", victim)
    expect(doomed, -signal.SIGKILL)
    _show_done("2  once more", f"killed by SIGKILL, halfway through saving {plan.cut_off}", color="red")
    return doomed


def train_on(plan: Plan) -> Run:
    resumed = _train(plan, INTERRUPTED, "3  in a new process", plan.steps - plan.killed_at + plan.save_every)
    expect(resumed, 0)
    _show_done("3  in a new process", f"continued after step {resumed.began}, to step {max(resumed.losses)}")
    _show_quoted("What it said:", resumed.said)
    return resumed


def _train(plan: Plan, folder: str, label: str, steps: int, *more: str) -> Run:
    """Run the training in a new process, and show its progress."""
    options = ["--steps", str(plan.steps), "--save-every", str(plan.save_every), *more]
    command = [sys.executable, "-m", "ckpt.cli.demo_training", plan.folder(folder), *options]
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as said, progress_bar(label, steps) as advance:
        done = _follow(command, said, advance)
        said.seek(0)
        done.said = said.read()
    done.seconds = time.monotonic() - started
    return done


def _follow(command: Sequence[str], said: IO[str], advance: Callable[[float], None]) -> Run:
    done = Run()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        try:
            for line in process.stdout:
                step, loss = line.split()
                done.losses[int(step)] = float(loss)
                advance(1)
        except BaseException:
            process.kill()  # also on Ctrl-C: no training process is left running
            raise
    done.status = process.returncode
    return done


def expect(done: Run, status: int) -> None:
    if done.status != status:
        say(done.said)
        raise CkptError(f"the demo's training ended with status {done.status}, not {status}; its output is above.")


def _show_done(label: str, text: str, color: str = "green") -> None:
    click.echo(f"{click.style(f'{label:<21}', bold=True)}{click.style(text, fg=color)}")


def _show_quoted(title: str, text: str) -> None:
    click.echo(f"\n{title}\n")
    width = shutil.get_terminal_size().columns
    for line in text.splitlines():
        wrapped = textwrap.wrap(f"  {line}", width, subsequent_indent=" " * 18, break_on_hyphens=False)
        click.secho("\n".join(wrapped), dim=True)
