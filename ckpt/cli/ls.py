"""`ckpt ls`: the checkpoints below a root, and in which state they are; of a folder of several runs, the roots."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from ckpt.cli.output import Styled, checkpoint_or_path, echo, echo_json
from ckpt.errors import MissingError, StorageError
from ckpt.formats.native.manifest import FILE_NAME
from ckpt.formats.registry import foreign_hint
from ckpt.root import catalog
from ckpt.root.catalog import Checkpoint, History, Overview, Summary
from ckpt.root.verify import COMPLETE, INTACT, REMOVED, Condition, condition
from ckpt.shown import shown
from ckpt.storage import open_storage
from ckpt.util.console import format_age, format_number, format_size, format_table, one_line

_ROOT_COLUMNS = ("root", "checkpoints", "newest", "age", "size")
_ROOTS_RIGHT = ("checkpoints", "age", "size")
_MOST_ROOTS = 200  # roots that are shown


def roots_below(found: Overview) -> list[str]:
    """The folders in a listing that hold checkpoints, at any depth, by their paths."""
    below = set()
    for folder, inside in found.files.items():
        for path in inside:
            above, _, last = f"{folder}/{path}".rpartition("/")
            if last == FILE_NAME and "/" in above:
                below.add(above.rpartition("/")[0])
    return sorted(below)


def show_roots(top: str, roots: Sequence[str]) -> None:
    """Print a line for each root."""
    echo(f"There are no checkpoints in {top} itself, but in these roots below it:")
    for line in format_table(
        _ROOT_COLUMNS, [_root_row(top.rstrip("/"), root) for root in roots[:_MOST_ROOTS]], _ROOTS_RIGHT
    ):
        echo(line)
    if len(roots) > _MOST_ROOTS:
        echo(f"... and {len(roots) - _MOST_ROOTS:,} more")


def _root_row(top: str, root: str) -> list[str]:
    try:
        committed = Overview.of(open_storage(f"{top}/{root}")).committed
    except StorageError as error:
        return [root, "-", one_line(str(error)), "-", "-"]
    if not committed:
        return [root, "0", "-", "-", "-"]
    size = sum(summary.size for summary in committed)
    return [root, str(len(committed)), committed[0].name, format_age(committed[0].created), format_size(size)]


_COLUMNS = ("name", "step", "age", "size", "metrics", "world", "state")
_RIGHT_ALIGNED = ("step", "age", "size", "world")


@click.command()
@click.argument("root", shell_complete=checkpoint_or_path)
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="Also list checkpoints that retention removed, or that a newer save of the same name replaced.",
)
@click.option("--verify", is_flag=True, help="Read every file completely, and verify its hashes.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of JSON objects for other programs to read.")
def ls(root: str, every: bool, verify: bool, as_json: bool) -> None:
    """List the checkpoints in ROOT, newest first. If ROOT is a folder that contains several roots, list these roots
    instead.

    \b
    ckpt ls runs/mrpc
    ckpt ls s3://bucket/runs --json
    """
    show_checkpoints(root, every=every, verify=verify, as_json=as_json)


def show_checkpoints(root: str, *, every: bool = False, verify: bool = False, as_json: bool = False) -> None:
    """Print what `ckpt ls` does."""
    found = _overview(root)
    history = History.of(found.storage) if every else History(found.storage)
    removed = history.without(found.committed)
    if as_json:
        records = [_record(found, checkpoint, verify=verify) for checkpoint in found.checkpoints]
        echo_json([*records, *({**_facts(save.summary), "state": REMOVED} for save in reversed(removed))])
        return
    if not found.checkpoints and not removed:
        catalog.check_exists(found.storage)
        if roots := roots_below(found):
            show_roots(root, roots)
            return
        echo(f"There are no checkpoints in {root}.{foreign_hint([entry.key for entry in found.entries])}")
        return
    rows = [_row(found, checkpoint, verify=verify) for checkpoint in found.checkpoints]
    _show_table([*rows, *([*_fields(save.summary), "removed"] for save in reversed(removed))])
    if history.left_out:
        echo(f"{history.left_out:,} older ones are no longer known")
    echo("every byte checked" if verify else "sizes checked; --verify reads every byte")


def _overview(root: str) -> Overview:
    """The checkpoints below a root, or the one that `root` itself is."""
    storage = open_storage(root)
    if "://" not in storage.url and not os.path.isdir(storage.url):
        raise MissingError(f"{root} does not exist.")
    found = Overview.of(storage, storage.list())
    if not found.checkpoints and FILE_NAME in found.files:
        storage, (name,) = catalog.resolve(root)[:2]
        return Overview.of(storage, storage.list(name))
    return found


def _row(found: Overview, checkpoint: Checkpoint, *, verify: bool) -> list[str]:
    summary, is_now = checkpoint.summary, condition(found, checkpoint, verify=verify)
    if summary is None:
        (why,) = is_now.problems
        short = replace(is_now, problems=(why.partition(": ")[0],))  # without the details
        return [checkpoint.name, *"-----", _said(checkpoint.name, short)]
    return [*_fields(summary), _said(checkpoint.name, is_now)]


def _fields(summary: Summary) -> list[str]:
    return [
        summary.name,
        str(summary.step),
        format_age(summary.created),
        format_size(summary.size),
        " ".join(f"{name}={format_number(value)}" for name, value in summary.metrics.items()) or "-",
        str(summary.world_size),
    ]


def _record(found: Overview, checkpoint: Checkpoint, *, verify: bool) -> dict[str, Any]:
    """A checkpoint for other programs."""
    is_now = condition(found, checkpoint, verify=verify)
    facts = _facts(checkpoint.summary) if checkpoint.summary else {"name": checkpoint.name}
    return {**facts, "state": is_now.state.lower(), "problems": list(is_now.problems)}


def _facts(summary: Summary) -> dict[str, Any]:
    metrics = {name: value if math.isfinite(value) else str(value) for name, value in summary.metrics.items()}
    return {
        "name": summary.name,
        "step": summary.step,
        "created": summary.created,
        "bytes": summary.size,
        "metrics": metrics,
        "world_size": summary.world_size,
    }


def _said(name: str, is_now: Condition) -> str:
    """The state of a checkpoint, and what is wrong with it."""
    if not is_now.is_sound:
        return f"{is_now.state}: {without_name('; '.join(is_now.problems), name)}"
    others = is_now.other_hosts
    return f"{is_now.state}, but for the files of {listed_hosts(others)}" if others else is_now.state


def listed_hosts(others: Mapping[str, str]) -> str:
    """The hosts of files that are not here, as text; `others` has the host of each file."""
    return ", ".join(sorted(set(others.values())))


def _show_table(rows: Sequence[Sequence[str]]) -> None:
    """On a terminal, in the colours of states: green says that bytes were read, and not only sizes compared."""
    head, *lines = format_table(_COLUMNS, rows, _RIGHT_ALIGNED)
    echo(head)
    for line, row in zip(lines, rows, strict=True):
        state = shown(row[-1])
        colour = "green" if state.startswith(INTACT) else None if state.startswith((COMPLETE, REMOVED)) else "red"
        echo(line.removesuffix(state), Styled(state, colour))


def without_name(text: str, name: str) -> str:
    """A problem without the checkpoint's name in front, which is printed beside it."""
    return text.removeprefix(name).lstrip(" /").rstrip(".")
