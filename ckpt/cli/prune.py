"""`ckpt prune`: remove old checkpoints and the leftovers of crashed saves."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import click

from ckpt.cli.output import checkpoint_or_path, echo
from ckpt.root.deletion import FAILED
from ckpt.root.retention import Keep
from ckpt.storage import HubStorage, open_storage
from ckpt.tools.prune import Plan, Pruned
from ckpt.util.console import format_size, format_table, one_line

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)?")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}


def _seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    match = _SPAN.fullmatch(value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a duration: write 90s, 30min, 24h or 2d.", ctx, param)
    return float(match.group(1)) * _SECONDS[match.group(2) or "s"]


@click.command()
@click.argument("root", shell_complete=checkpoint_or_path)
@click.option(
    "--keep-last", "last", type=int, metavar="N", help="Keep the N newest checkpoints, and remove older ones."
)
@click.option("--keep-best", "best", type=int, metavar="N", help="Also keep the N best checkpoints by --metric.")
@click.option("--metric", help="The metric's name, as in step(metrics=...).")
@click.option(
    "--mode",
    type=click.Choice(["min", "max"]),
    default="min",
    show_default=True,
    help="Choose whether low (min) or high (max) values are best.",
)
@click.option(
    "--keep-every", "every", type=int, metavar="STEPS", help="Also keep checkpoints whose step is a multiple of STEPS."
)
@click.option(
    "--grace",
    callback=_seconds,
    default="24h",
    show_default=True,
    help="Keep leftovers younger than this: 90s, 30min, 24h, 2d, ...",
)
@click.option(
    "--verify/--no-verify",
    default=True,
    show_default=True,
    help="Before removing anything, verify every byte of the newest checkpoint.",
)
@click.option("--squash", is_flag=True, help="On the Hub, also remove old commits, whose files take up space.")
@click.option("--dry-run", is_flag=True, help="Only show what prune would remove.")
@click.option("-y", "--yes", is_flag=True, help="Don't ask.")
def prune(
    root: str, mode: str, grace: float, verify: bool, squash: bool, dry_run: bool, yes: bool, **rules: int | str | None
) -> None:
    """Remove old checkpoints and the leftovers of crashed saves from ROOT.

    Without a --keep option, prune keeps all checkpoints, and removes only leftovers: files and uploads of saves that a
    crash interrupted more than --grace ago. Prune never removes the newest intact checkpoint, or one that a process is
    reading.

    Prune shows you what it would remove, and asks before it removes anything. In a script or a cron job, where nobody
    can answer, give --yes: otherwise prune exits with status 2 and removes nothing.

    \b
    ckpt prune runs/mrpc --keep-last 3 --dry-run
    ckpt prune runs/mrpc --keep-last 1 --keep-best 2 --metric loss --yes
    """
    keep = _rules(mode, **rules)
    storage = open_storage(root)
    if squash and not isinstance(storage, HubStorage):
        raise click.UsageError(f"--squash works only on the Hub: {root} has no old commits")
    plan = Plan.of(storage, keep, grace, verify=verify)
    for line in _lines(plan.outcome):
        echo(line)
    if dry_run or not (plan.outcome.removed or plan.outcome.swept or squash):
        return
    if not yes and not sys.stdin.isatty():
        raise click.UsageError(
            "nothing was removed, because prune can't ask you: standard input is not a terminal. To remove "
            f"{_total(plan.outcome)}, add --yes. To see what would be removed, add --dry-run."
        )
    if not yes:
        forgotten = ", and forget the history of the branch" if squash else ""
        click.confirm(f"Remove {_total(plan.outcome)}{forgotten}?", abort=True, err=True)
    done = plan.carry_out()
    failed = {name for name, why in done.spared.items() if why.startswith(FAILED)}  # a warning has named them
    for name in (*plan.outcome.removed, *plan.outcome.swept):
        if name in done.spared and name not in failed:
            echo(f"{name} is kept: {one_line(done.spared[name])}")
    echo(f"removed {_total(done)}")
    if isinstance(storage, HubStorage) and squash:
        storage.squash_history()
        echo(f"{storage.url} has one commit now: older ones, and what only they had, are forgotten")
    if failed:
        raise SystemExit(1)


def _rules(mode: str, **given: int | str | None) -> Keep | None:
    """The rules of retention that the options give; None, to keep all checkpoints, if there are none."""
    chosen = {name: value for name, value in given.items() if value is not None}
    return Keep(mode=mode, **chosen) if chosen else None  # type: ignore[arg-type]


def _lines(found: Pruned) -> Iterator[str]:
    rows = [(*row, one_line(why)) for *row, why in found.rows()]
    yield from format_table(("", "in " + found.url, "size", ""), rows, ("size",))
    if not found.removed and not found.swept:
        yield "There is nothing to remove."


def _total(found: Pruned) -> str:
    parts = []
    for count, noun in ((len(found.removed), "checkpoint"), (len(found.swept), "leftover")):
        if count:
            parts.append(f"{count} {noun}" if count == 1 else f"{count} {noun}s")
    return f"{' and '.join(parts) or 'nothing'}, {format_size(found.size)}"
