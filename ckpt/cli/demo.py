"""`ckpt demo`: train twice, once killed in the middle of a save and resumed, and compare the results bit for bit.

Imports no torch: the training itself (`ckpt.cli.demo_training`) runs in processes of its own, and is killed for real.
"""

from __future__ import annotations

import os
import shutil
import sys
from io import TextIOWrapper

import click

from ckpt.cli.demo_report import show_report, show_wreck
from ckpt.cli.demo_runs import INTERRUPTED, STRAIGHT, Plan, train_on, train_straight, train_until_killed
from ckpt.errors import ConfigError
from ckpt.storage import LocalStorage

MARKER = ".ckpt-demo"
_NOTE = f"by a `ckpt demo`. The next one removes {STRAIGHT}/ and {INTERRUPTED}/ here."


@click.command()
@click.option("--root", default="runs/demo", show_default=True, help="Where its checkpoints go.")
@click.option("--steps", default=240, hidden=True, type=click.IntRange(min=24), help="Fewer, for tests.")
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
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # without UTF-8 only the curve is spoilt
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
