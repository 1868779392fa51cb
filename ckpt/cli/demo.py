"""`ckpt demo`: the same training twice, once killed in the middle of a save and resumed, and whether they end the same.

Imports no torch: the training itself (`ckpt.cli.demo_training`) runs in processes of its own, and is killed for real.
"""

from __future__ import annotations

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
from io import TextIOWrapper
from itertools import pairwise
from typing import IO

import click

from ckpt.cli.ls import show_checkpoints
from ckpt.errors import CkptError, ConfigError
from ckpt.formats.native.manifest import FILE_NAME
from ckpt.root import catalog
from ckpt.root.catalog import Checkpoint
from ckpt.storage import LocalStorage
from ckpt.util.console import format_size, progress_bar, say

MARKER = ".ckpt-demo"
STRAIGHT = "straight"
INTERRUPTED = "interrupted"
_NOTE = f"by a `ckpt demo`. The next one removes {STRAIGHT}/ and {INTERRUPTED}/ here."
_SAVES = 8
_FATAL_SAVE = 5
_SIGNS = "▁▂▃▄▅▆▇█"
_PLOT_WIDTH = 48
_CONTENTS = {
    "model.safetensors": "weights, as any tool reads them",
    "optimizer.safetensors": "moments, by parameter name",
    "state.json": "scheduler, optimizer settings",
    "rank-00000.json": "random generators, place in data",
    FILE_NAME: "hashes; written last: the commit",
}

Losses = dict[int, float]  # by step


@dataclass(frozen=True)
class Plan:
    """What to run and where: `steps` of training, eight saves on the way, killed in the fifth."""

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
        return f"step-{self.killed_at:08d}"

    def folder(self, name: str) -> str:
        return f"{self.root}/{name}"


@dataclass
class Run:
    """One process that trained: its losses by step, what it said, and how it ended."""

    losses: Losses = field(default_factory=dict)
    said: str = ""
    status: int = 0
    seconds: float = 0.0

    @property
    def began(self) -> int:
        """The step after which it began."""
        return min(self.losses) - 1


def run(root: str, steps: int) -> bool:
    """Train, kill, resume, compare, and print it all. Returns whether both ways ended the same, bit for bit."""
    _check_root(root)
    plan = Plan(os.path.normpath(root), steps)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where there is no UTF-8, the curve is spoilt but nothing else
    with LocalStorage(plan.root).lock(MARKER, note=_NOTE):
        _clear(plan)
        click.echo(f"A small transformer learns the text of a short story on the CPU: {steps} steps.\n")
        straight = _train_straight(plan)
        doomed = _train_until_killed(plan)
        _show_wreck(plan)
        resumed = _train_on(plan)
        return _report(plan, straight, doomed, resumed)


def _check_root(root: str) -> None:
    """Refuse a place that is not surely ours: what an earlier demo left there will be removed."""
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


def _train_straight(plan: Plan) -> Run:
    straight = _train(plan, STRAIGHT, "1  straight through", plan.steps)
    _expect(straight, 0)
    _show_done("1  straight through", f"{len(straight.losses)} steps in {straight.seconds:.0f} s")
    return straight


def _train_until_killed(plan: Plan) -> Run:
    victim = f"{plan.cut_off}/optimizer.safetensors"
    doomed = _train(plan, INTERRUPTED, "2  once more", plan.killed_at, "--die-writing", victim)
    _expect(doomed, -signal.SIGKILL)
    _show_done("2  once more", f"killed by SIGKILL, halfway through saving {plan.cut_off}", color="red")
    return doomed


def _train_on(plan: Plan) -> Run:
    resumed = _train(plan, INTERRUPTED, "3  in a new process", plan.steps - plan.killed_at + plan.save_every)
    _expect(resumed, 0)
    _show_done("3  in a new process", f"went on after step {resumed.began}, to step {max(resumed.losses)}")
    _show_quoted("What it said:", resumed.said)
    return resumed


def _train(plan: Plan, folder: str, label: str, steps: int, *more: str) -> Run:
    """Run the training in a process of its own, and follow it step by step."""
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
            process.kill()  # also on Ctrl-C: nothing trains on behind our back
            raise
    done.status = process.returncode
    return done


def _expect(done: Run, status: int) -> None:
    if done.status != status:
        say(done.said)
        raise CkptError(f"the demo's training ended with status {done.status}, not {status}; it said what is above.")


def _show_done(label: str, text: str, color: str = "green") -> None:
    click.echo(f"{click.style(f'{label:<21}', bold=True)}{click.style(text, fg=color)}")


def _show_wreck(plan: Plan) -> None:
    """What the kill has left, before the new process clears it away."""
    folder = f"{plan.folder(INTERRUPTED)}/{plan.cut_off}"
    click.echo(f"\nWhat the kill left, as `ckpt ls {plan.folder(INTERRUPTED)}` sees it:\n")
    show_checkpoints(plan.folder(INTERRUPTED))
    click.echo(f"\nand in {folder}:\n")
    for name in sorted(os.listdir(folder)):
        click.echo(f"  {format_size(os.path.getsize(f'{folder}/{name}')):>9}  {name}")
    click.echo()


def _show_quoted(title: str, text: str) -> None:
    click.echo(f"\n{title}\n")
    width = shutil.get_terminal_size().columns
    for line in text.splitlines():
        wrapped = textwrap.wrap(f"  {line}", width, subsequent_indent=" " * 18, break_on_hyphens=False)
        click.secho("\n".join(wrapped), dim=True)


def _report(plan: Plan, straight: Run, doomed: Run, resumed: Run) -> bool:
    joined = doomed.losses | resumed.losses
    _show_losses(plan, straight.losses, joined, resumed.began)
    _show_curves(plan, straight.losses, joined, resumed.began)
    same = _show_last(plan) and straight.losses == joined
    _show_verdict(len(joined), same)
    click.echo(f"{plan.cut_off} was cut off; the new process resumed from step-{resumed.began:08d}.")
    _show_next(plan)
    return same


def _show_losses(plan: Plan, straight: Losses, joined: Losses, began: int) -> None:
    marks = {began: "<- resumed from here", plan.killed_at: "<- killed while saving this"}
    click.echo(f"\n{'step':>6}  {'straight through':>16}  {'killed, resumed':>16}")
    for step in [1, *range(plan.save_every, len(straight) + 1, plan.save_every)]:
        color = "green" if straight[step] == joined[step] else "red"
        other = click.style(f"{joined[step]:>16.8f}", fg=color)
        click.echo(f"{step:>6}  {straight[step]:>16.8f}  {other}  {marks.get(step, '')}".rstrip())


def _show_curves(plan: Plan, straight: Losses, joined: Losses, began: int) -> None:
    resumed, killed = (step * _PLOT_WIDTH // len(straight) for step in (began, plan.killed_at))
    pointers = f"{'resumed from ^':>{resumed}}{'^ killed':>{killed - resumed + 7}}"
    click.echo(f"\n  straight through  {_curve(straight)}\n  killed, resumed   {_curve(joined)}")
    click.echo(f"{'':<20}{pointers}")


def _curve(losses: Losses) -> str:
    """The losses in one line, falling: each sign is the mean of some steps."""
    values = [losses[step] for step in sorted(losses)]
    edges = [len(values) * i // _PLOT_WIDTH for i in range(_PLOT_WIDTH + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges) if b > a]
    low, high = min(means), max(means)
    return "".join(_SIGNS[round((mean - low) / (high - low) * (len(_SIGNS) - 1))] for mean in means)


def _show_last(plan: Plan) -> bool:
    """The files of the last checkpoint, what each holds, and whether the other run has the very same bytes."""
    one, other = (_last(plan.folder(name)) for name in (STRAIGHT, INTERRUPTED))
    click.echo(f"\nThe last checkpoint, {one.name}, in both runs:\n")
    names = sorted(_files(one).keys() | _files(other).keys())
    same = [_show_file(name, _read(one, name), _read(other, name)) for name in names]
    _show_line(FILE_NAME, os.path.getsize(f"{other.url}/{FILE_NAME}"), "")
    return all(same)


def _last(folder: str) -> Checkpoint:
    return catalog.list_checkpoints(folder)[0]


def _files(checkpoint: Checkpoint) -> dict[str, str]:
    """The paths of a checkpoint's files by what they hold."""
    assert checkpoint.manifest is not None
    return {file.name: f"{checkpoint.url}/{file.path}" for file in checkpoint.manifest.files}


def _read(checkpoint: Checkpoint, name: str) -> bytes | None:
    path = _files(checkpoint).get(name)
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read()


def _show_file(name: str, one: bytes | None, other: bytes | None) -> bool:
    same = one == other
    _show_line(
        name, len(other or b""), click.style("identical", fg="green") if same else click.style("DIFFERENT", fg="red")
    )
    return same


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
