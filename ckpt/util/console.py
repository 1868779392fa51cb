"""Console output: lines on standard error, progress bars, and numbers and tables as text."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone

from ckpt.shown import shown

_UNITS = (
    ("d", 172_800, 86_400),
    ("h", 3600, 3600),
    ("min", 60, 60),
    ("s", 0, 1),
)  # name, used from so many seconds, seconds of the unit
_log = logging.getLogger("ckpt")
PROGRESS_MIN_BYTES = 256_000_000  # less is done before a bar could be read


def say(text: str) -> None:
    """Say a line to the user, as a record of the logger `ckpt`: see `ckpt.util.console_log`."""
    _log.info("%s", text)


@contextmanager
def progress_bar(
    label: str, total: float, *, in_bytes: bool = False, show: bool = True
) -> Iterator[Callable[[float], None]]:
    """Show a progress bar and yield the function that advances it. Without a terminal nothing is shown."""
    if not show or not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(shown(label), total=total)
        yield lambda amount: progress.advance(task, amount)


def format_size(count: float) -> str:
    """A number of bytes: `1.5 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def format_age(created: str) -> str:
    """Time since an ISO timestamp: `3 min`."""
    return format_duration((datetime.now(timezone.utc) - datetime.fromisoformat(created)).total_seconds())


def format_duration(seconds: float) -> str:
    """`3 min`, in the largest unit that fits."""
    seconds = max(0.0, seconds)  # a timestamp of a machine whose clock is ahead
    name, _, unit = next(unit for unit in _UNITS if seconds >= unit[1])
    return f"{seconds // unit:.0f} {name}"


def format_number(value: float) -> str:
    return f"{value:.4g}"


def one_line(text: str) -> str:
    """A text with its lines joined by spaces."""
    return " ".join(line.strip() for line in text.splitlines())


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> Iterator[str]:
    """A table as text, one line per row, for grep and awk. The columns named in `right` are right-aligned."""
    lines = [[shown(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(columns, line, widths, strict=True)
        yield "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width) for name, cell, width in cells
        ).rstrip()
