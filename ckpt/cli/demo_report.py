"""What `ckpt demo` prints: what the kill left, both runs' losses, and whether their last checkpoints are identical."""

from __future__ import annotations

import os
import shlex
from itertools import pairwise

import click

from ckpt.cli.demo_runs import INTERRUPTED, STRAIGHT, Losses, Plan, Run
from ckpt.cli.ls import show_checkpoints
from ckpt.formats.native.manifest import FILE_NAME
from ckpt.root import catalog
from ckpt.root.catalog import Checkpoint, name_of_step
from ckpt.util.console import format_size

_LEVELS = "▁▂▃▄▅▆▇█"
_PLOT_WIDTH = 48
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
    _show_curves(plan, straight.losses, joined, resumed.began)
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


def _show_curves(plan: Plan, straight: Losses, joined: Losses, began: int) -> None:
    resumed, killed = (step * _PLOT_WIDTH // len(straight) for step in (began, plan.killed_at))
    pointers = f"{'resumed from ^':>{resumed}}{'^ killed':>{killed - resumed + 7}}"
    click.echo(f"\n  straight through  {_curve(straight)}\n  killed, resumed   {_curve(joined)}")
    click.echo(f"{'':<20}{pointers}")


def _curve(losses: Losses) -> str:
    """The losses as a line of block characters, each the mean of some steps."""
    values = [losses[step] for step in sorted(losses)]
    edges = [len(values) * i // _PLOT_WIDTH for i in range(_PLOT_WIDTH + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges) if b > a]
    low, high = min(means), max(means)
    return "".join(_LEVELS[round((mean - low) / (high - low) * (len(_LEVELS) - 1))] for mean in means)


def show_last(plan: Plan) -> bool:
    """Show the files of the last checkpoint, and return whether both runs have the same bytes."""
    straight, resumed = (_last(plan.folder(name)) for name in (STRAIGHT, INTERRUPTED))
    click.echo(f"\nThe last checkpoint, {straight.name}, in both runs:\n")
    names = sorted(_files(straight).keys() | _files(resumed).keys())
    same = [_show_file(name, _read(straight, name), _read(resumed, name)) for name in names]
    _show_line(FILE_NAME, os.path.getsize(f"{resumed.url}/{FILE_NAME}"), "")
    return all(same)


def _last(folder: str) -> Checkpoint:
    return catalog.list_checkpoints(folder)[0]


def _files(checkpoint: Checkpoint) -> dict[str, str]:
    """The paths of a checkpoint's files by their names."""
    assert checkpoint.manifest is not None
    return {file.name: f"{checkpoint.url}/{file.path}" for file in checkpoint.manifest.files}


def _read(checkpoint: Checkpoint, name: str) -> bytes | None:
    path = _files(checkpoint).get(name)
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read()


def _show_file(name: str, straight: bytes | None, resumed: bytes | None) -> bool:
    same = straight == resumed
    _show_line(
        name, len(resumed or b""), click.style("identical", fg="green") if same else click.style("DIFFERENT", fg="red")
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
