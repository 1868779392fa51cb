"""`ckpt plan`: what saving costs a run at different intervals, in waiting and in lost work, and what loses least."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import click

from ckpt.cli.output import checkpoint_or_path, echo
from ckpt.errors import MissingError
from ckpt.root.catalog import History, check_exists
from ckpt.save.cadence import DAY, Failures, Lost, Past, best_interval, bounded, spelled
from ckpt.storage import open_storage
from ckpt.util.console import format_size, format_table
from ckpt.util.option_values import parse_size

_TRIED = (60.0, 300.0, 900.0, 3600.0, 4 * 3600.0)  # seconds
_RARE = 1e-3  # share of failures that take two neighbours at once, or all machines
_STEPS = 10  # between snapshots in memory, at least
_COPY = 0.05  # seconds that a background save of 15 GB costs training on an H200, at most
_RESTART = 180.0  # until a job that failed makes its next step, where nobody has measured it
_BAR = 16
_COLUMNS = ("save_every", "waiting", "repeated", "restarts", "lost", "node-hours a day", "")


@dataclass(frozen=True)
class Job:
    """What a plan reckons with. Seconds: what a save costs and takes, a restart, a step (0: not known), and how often
    the job fails. `lost_machines`: the share of failures that take a machine, and what is in its memory."""

    save: float
    durable: float
    restart: float
    step: float
    every: float
    nodes: int
    lost_machines: float

    @property
    def best(self) -> float:
        return bounded(best_interval(self.save, self.every), self.save, self.durable)

    def lost(self, interval: float) -> Lost:
        return Lost.of(interval, self.save, self.durable, self.restart, self.every)

    def with_memory(self, replicas: int) -> tuple[str, Lost]:
        """With snapshots in memory every few steps, which survive a process; with replicas, a machine too. The root
        then saves as is best for the failures that are left."""
        share = min(max(0.0 if replicas else self.lost_machines, _RARE), 1 - _RARE)
        every, rest = self.every / (1 - share), self.every / share
        steps = max(_STEPS, round(best_interval(self.save, every) / self.step))
        taken = Lost.of(steps * self.step, self.save, self.save, 0.0, every)
        root = bounded(best_interval(self.save, rest), self.save, self.durable)
        saved = Lost.of(root, self.save, self.durable, 0.0, rest)
        restarting = self.lost(root).restarting
        named = f"memory=ckpt.Memory(every={steps}, replicas=1)" if replicas else f"memory={steps}"
        both = Lost(saved.waiting + taken.waiting, saved.repeated + taken.repeated, restarting)
        return f"{spelled(root)}, {named}", both

    def rows(self) -> Iterator[tuple[str, Lost]]:
        best = self.best
        for interval in sorted({*(one for one in _TRIED if one > self.durable), best}):
            yield spelled(interval) + (", the best" if interval == best else ""), self.lost(interval)
        if self.step:
            yield from (self.with_memory(replicas) for replicas in (0, 1))


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    size = None if value is None else parse_size(value.removesuffix("/s"))
    if value is not None and size is None:
        raise click.BadParameter(f"{value!r} is not a size: write 15GB, or 1.5GB/s.", ctx, param)
    return size


_POSITIVE = click.FloatRange(min=0, min_open=True, max=1e9)


@click.command()
@click.argument("root", required=False, shell_complete=checkpoint_or_path)
@click.option("--state", callback=_size, metavar="SIZE", help="The size of a checkpoint, such as 15GB.")
@click.option("--disk", callback=_size, metavar="RATE", help="The write speed of all nodes together, such as 1.5GB/s.")
@click.option("--save", type=_POSITIVE, metavar="SECONDS", help="The training time lost to each save. [default: 0.05]")
@click.option(
    "--step",
    type=_POSITIVE,
    metavar="SECONDS",
    help="The duration of a training step, needed to plan snapshots in memory.",
)
@click.option(
    "--restart", type=_POSITIVE, metavar="SECONDS",
    help="The time from a failure to the next training step. [default: 180]",
)  # fmt: skip
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="The number of nodes.")
@click.option(
    "--failures", type=_POSITIVE, metavar="R",
    help="The number of failures per node per day. By default, plan uses the failure rate of the run in ROOT if its "
    "history is long enough, otherwise CKPT_FAILURES_PER_NODE_DAY if set, otherwise 0.0065, a published rate.",
)  # fmt: skip
@click.option(
    "--lost-machines", type=click.FloatRange(0, 1), default=0.5, show_default=True,
    help="The share of failures in which a machine and its memory are lost.",
)  # fmt: skip
def plan(
    root: str | None, state: int | None, disk: int | None, save: float | None, step: float | None,
    restart: float | None, nodes: int, failures: float | None, lost_machines: float,
) -> None:  # fmt: skip
    """Show what saving costs at different intervals, and which interval loses the least time.

    If you give ROOT, plan uses the measurements of the run in ROOT: what its saves cost, how long they take, and how
    often the run failed. Options override these measurements. Without ROOT, give --state and --disk.

    \b
    ckpt plan runs/mrpc --nodes 4
    ckpt plan --state 15GB --disk 1.5GB/s --nodes 16 --step 0.4
    """
    past, size = (Past(), 0) if root is None else _measured(root)
    if not past.saves and (state is None or disk is None):
        where = "without ROOT" if root is None else f"{root} has no saves in its history"
        raise click.UsageError(f"{where}: give --state and --disk.")
    cost, durable = past.save if past.saves else (_COPY, 0.0)
    if state is not None and disk is not None:
        durable = state / disk
    known = Failures.known(nodes, failures)
    every, source = known.every(past if failures is None else Past())
    cost = cost if save is None else save
    restart = restart or max(past.restart, _RESTART)
    job = Job(cost, max(cost, durable), restart, step or past.step, every, nodes, lost_machines)
    _show(job, state or size, source)


def _measured(root: str) -> tuple[Past, int]:
    """What the history of a root says, and the size of its newest checkpoint."""
    storage = open_storage(root)
    if "://" not in storage.url and not os.path.isdir(storage.url):
        raise MissingError(f"{root} does not exist.")
    check_exists(storage)
    history = History.of(storage)
    saves = history.saves
    return Past.of(history), saves[-1].summary.size if saves else 0


def _show(job: Job, size: int, source: str) -> None:
    step = f", a step {spelled(job.step)}" if job.step else ""
    save = f"A save of {format_size(size)} costs training {spelled(job.save)}"
    echo(f"{save} and is durable after {spelled(job.durable)}. A restart takes {spelled(job.restart)}{step}.")
    nodes = "One node fails" if job.nodes == 1 else f"One of {job.nodes:,} nodes fails"
    echo(f"{nodes} about every {spelled(job.every)} ({source}).")
    found = list(job.rows())
    most = max(lost.total for _, lost in found) or 1.0
    rows = [
        [name, *(f"{share:.3%}" for share in (lost.waiting, lost.repeated, lost.restarting, lost.total)),
         f"{job.nodes * 24 * lost.total:,.2f}", "#" * max(1, round(_BAR * lost.total / most))]
        for name, lost in found
    ]  # fmt: skip
    for line in format_table(_COLUMNS, rows, _COLUMNS[1:-1]):
        echo(line)
    if job.every < DAY and not job.step:
        echo("At this rate, the job fails every day: give --step to see what snapshots in memory would change.")
