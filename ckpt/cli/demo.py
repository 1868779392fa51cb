"""`ckpt demo`: train twice, once killed in the middle of a save and resumed, and compare the results bit for bit.

Imports no torch: the training itself (`ckpt.cli.demo_training`) runs in processes of its own, and is killed for real.
"""

from __future__ import annotations

import filecmp
import os
import shlex
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

from ckpt.cli.ls import show_checkpoints
from ckpt.errors import CkptError, ConfigError
from ckpt.formats.checkpoint_name import name_of_step
from ckpt.formats.native.manifest import FILE_NAME
from ckpt.root import catalog
from ckpt.storage import LocalStorage
from ckpt.util.console import format_size, progress_bar, say

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


_CONTENTS = {
    "model.safetensors": "weights, as any tool reads them",
    "optimizer.safetensors": "moments, by parameter name",
    "state.json": "scheduler, optimizer settings",
    "rank-00000.json": "random generators, place in data",
    FILE_NAME: "hashes; written last: the commit",
}


def show_wreck(plan: Plan) -> None:
    """Show the files that the kill left, before the new process removes them."""
    folder = f"{plan.folder(INTERRUPTED)}/{plan.cut_off}"
    click.echo(f"\nWhat the kill left, as `ckpt ls {plan.folder(INTERRUPTED)}` sees it:\n")
    show_checkpoints(plan.folder(INTERRUPTED))
    click.echo(f"\nand in {folder}:\n")
    for name in sorted(os.listdir(folder)):
        click.echo(f"  {format_size(os.path.getsize(f'{folder}/{name}')):>9}  {name}")
    click.echo()


def show_report(plan: Plan, straight: Run, doomed: Run, resumed: Run) -> bool:
    """Show both runs side by side, and return whether they ended bit for bit the same."""
    joined = doomed.losses | resumed.losses
    _show_losses(plan, straight.losses, joined, resumed.began)
    same = show_last(plan) and straight.losses == joined
    _show_verdict(len(joined), same)
    click.echo(f"{plan.cut_off} was cut off; the new process resumed from {name_of_step(resumed.began)}.")
    _show_next(plan)
    return same


def _show_losses(plan: Plan, straight: Losses, joined: Losses, began: int) -> None:
    marks = {began: "<- resumed from here", plan.killed_at: "<- killed while saving this"}
    click.echo(f"\n{'step':>6}  {'straight through':>16}  {'killed, resumed':>16}")
    for step in [1, *range(plan.save_every, len(straight) + 1, plan.save_every)]:
        color = "green" if straight[step] == joined[step] else "red"
        other = click.style(f"{joined[step]:>16.8f}", fg=color)
        click.echo(f"{step:>6}  {straight[step]:>16.8f}  {other}  {marks.get(step, '')}".rstrip())


def show_last(plan: Plan) -> bool:
    """Show the files of the last checkpoint, and return whether both runs have the same bytes."""
    last = catalog.list_checkpoints(plan.folder(INTERRUPTED))[0]
    straight, resumed = (_files(plan.folder(name)) for name in (STRAIGHT, INTERRUPTED))
    click.echo(f"\nThe last checkpoint, {last.name}, in both runs:\n")
    same = {name: _is_same(straight.get(name), resumed.get(name)) for name in sorted(straight | resumed)}
    for name, is_same in same.items():
        verdict = click.style("identical", fg="green") if is_same else click.style("DIFFERENT", fg="red")
        _show_line(name, os.path.getsize(resumed.get(name) or straight[name]), verdict)
    _show_line(FILE_NAME, os.path.getsize(f"{last.url}/{FILE_NAME}"), "")
    return all(same.values())


def _files(folder: str) -> dict[str, str]:
    """The paths of the last checkpoint's files by their names."""
    last = catalog.list_checkpoints(folder)[0]
    return {file.name: f"{last.url}/{file.path}" for file in last.manifest.files} if last.manifest else {}


def _is_same(first: str | None, second: str | None) -> bool:
    return first is not None and second is not None and filecmp.cmp(first, second, shallow=False)


def _show_line(name: str, length: int, verdict: str) -> None:
    click.echo(f"  {name:<21}  {format_size(length):>9}  {verdict or ' ' * 9}  {_CONTENTS.get(name, '')}")


def _show_verdict(steps: int, same: bool) -> None:
    if same:
        verdict = f"BIT-IDENTICAL: weights, optimizer, generators and all {steps} losses."
    else:
        verdict = "NOT IDENTICAL: the resumed run did not end as the straight one. A bug in ckpt!"
    click.secho(f"\n{verdict}", bold=True, fg="green" if same else "red")


def _show_next(plan: Plan) -> None:
    folder = shlex.quote(plan.folder(INTERRUPTED))
    click.echo(f"\nThe checkpoints of both runs are in {plan.root}. Look at them:\n")
    click.echo(f"  ckpt ls {folder}\n  ckpt verify {folder}")


MARKER = ".ckpt-demo"
_NOTE = f"by a `ckpt demo`. The next one removes {STRAIGHT}/ and {INTERRUPTED}/ here."


@click.command()
@click.option("--root", default="runs/demo", show_default=True, help="The folder for its checkpoints.")
@click.option("--steps", default=240, hidden=True, type=click.IntRange(min=24), help="How many steps to train.")
def demo(root: str, steps: int) -> None:
    """Train, kill it in the middle of a save, resume, and compare.

    A small model learns on the CPU, once straight through and once killed and resumed. Takes half a minute. Exits with
    status 1 if the two do not end bit for bit the same.
    """
    if not run(root, steps):
        raise click.exceptions.Exit(1)


def run(root: str, steps: int) -> bool:
    """Train, kill, resume, compare, and print all of it. Returns whether both runs ended bit for bit the same."""
    _check_root(root)
    plan = Plan(os.path.normpath(root), steps)
    with LocalStorage(plan.root).lock(MARKER, note=_NOTE):
        _clear(plan)
        click.echo(f"A small transformer learns the text of a short story on the CPU: {steps} steps.\n")
        straight = train_straight(plan)
        doomed = train_until_killed(plan)
        show_wreck(plan)
        resumed = train_on(plan)
        return show_report(plan, straight, doomed, resumed)


def _check_root(root: str) -> None:
    """Refuse a directory that no demo made: what an earlier demo left there will be removed."""
    if "://" in root:
        raise ConfigError(f"the demo needs a plain directory, not {root}: it shows what lies in the files.")
    if os.path.isdir(root) and os.listdir(root) and not os.path.isfile(f"{root}/{MARKER}"):
        raise ConfigError(f"{root} is not empty and not from an earlier demo. Nothing was touched: use another --root.")


def _clear(plan: Plan) -> None:
    for name in (STRAIGHT, INTERRUPTED):
        try:
            if os.path.lexists(plan.folder(name)):
                shutil.rmtree(plan.folder(name))
        except OSError as error:
            raise ConfigError(f"{plan.folder(name)} cannot be removed: {error}. Use another --root.") from error
