"""`ckpt memory`: what runs hold in the memory of this machine, and how to remove it."""

from __future__ import annotations

import click

from ckpt.cli.output import echo, echo_json
from ckpt.errors import LockedError
from ckpt.memory.held_memory import HeldMemory, list_memory, memory_of
from ckpt.util.console import format_age, format_duration, format_size, format_table, one_line

_COLUMNS = ("root", "step", "size", "age", "run", "keeper", "last said")


@click.group()
def memory() -> None:
    """List or remove the snapshots that runs keep in this machine's memory.

    \b
    ckpt memory ls
    ckpt memory clear runs/mrpc
    """


@memory.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs to read.")
def ls(as_json: bool) -> None:
    """List the snapshots of your runs in this machine's memory, newest first."""
    found = list_memory()
    if as_json:
        echo_json([held.to_json() for held in found])
    elif not found:
        echo("Nothing is held in memory on this machine.")
    else:
        for line in format_table(_COLUMNS, [_row(held) for held in found], ("step", "size", "age")):
            echo(line)


@memory.command()
@click.argument("root", required=False)
@click.option("--all", "everything", is_flag=True, help="Remove the snapshots of all roots.")
def clear(root: str | None, everything: bool) -> None:
    """Remove the snapshots of ROOT (a URL or path) from this machine's memory, and end its keeper process.

    If a run still uses the snapshots, the command names the run's processes and removes nothing.
    """
    if (root is None) != everything:
        raise click.UsageError("name the ROOT whose snapshots ckpt should remove, or give --all.")
    found = list_memory() if root is None else memory_of(root)
    if not found:
        echo("Nothing is held in memory on this machine" + (f" for {root}." if root else "."))
    refused = [why for held in found if (why := _clear(held))]
    if refused:
        raise LockedError(" ".join(refused))


def _clear(held: HeldMemory) -> str:
    """Remove it and say so, or return why not."""
    try:
        held.clear()
    except LockedError as error:
        return str(error)
    echo(f"removed {format_size(held.size)} from memory: {held.root}, {_steps(held)}")
    return ""


def _row(held: HeldMemory) -> list[str]:
    return [
        held.root,
        str(held.snapshots[0].step) if held.snapshots else "-",
        format_size(held.size),
        format_age(held.snapshots[0].created) if held.snapshots and held.snapshots[0].created else "-",
        _life(held),
        f"process {held.keeper.process}" if held.keeper else "none",
        one_line(held.log) or "-",
    ]


def _life(held: HeldMemory) -> str:
    if held.is_deserted:
        return f"deserted, {format_duration(held.place.idle_seconds)}"
    return f"lives: process {', '.join(map(str, held.processes))}" if held.processes else "lives"


def _steps(held: HeldMemory) -> str:
    steps = ", ".join(f"{found.step:,}" for found in held.snapshots)
    return f"step {steps}" if steps else "no snapshot"
