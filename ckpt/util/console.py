"""What people see: progress bars on a terminal, and plain lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone

_UNITS = (("d", 172_800, 86_400), ("h", 3600, 3600), ("min", 60, 60), ("s", 0, 1))  # name, from, seconds
PROGRESS_MIN_BYTES = 256_000_000  # bytes: what takes long enough to be shown


def say(text: str) -> None:
    """A line for the person who runs this, on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(
    label: str, total: float, *, in_bytes: bool = False, show: bool = True
) -> Iterator[Callable[[float], None]]:
    """A progress bar; yields what moves it on. On anything but a terminal it is quiet."""
    if not show or not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda amount: progress.advance(task, amount)


def format_size(count: float) -> str:
    """`1.5 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def format_age(created: str) -> str:
    """How long ago that was: `3 min`."""
    return format_duration((datetime.now(timezone.utc) - datetime.fromisoformat(created)).total_seconds())


def format_duration(seconds: float) -> str:
    seconds = max(0.0, seconds)  # the clock of the machine that wrote it may be ahead
    name, _, unit = next(one for one in _UNITS if seconds >= one[1])
    return f"{seconds // unit:.0f} {name}"


def format_number(value: float) -> str:
    return f"{value:.4g}"


def one_line(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines())


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> Iterator[str]:
    """A table as text, a line a row however long, for grep and awk. What is in the columns `right` ends alike."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = zip(columns, row, widths, strict=True)
        yield "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width) for name, cell, width in cells
        ).rstrip()
