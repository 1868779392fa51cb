"""What people see: progress bars on a terminal, and plain lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONG = 256_000_000  # bytes: what takes long enough to be shown


def say(text: str) -> None:
    """A line for the person who runs this, on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def bar(label: str, total: float, *, in_bytes: bool = False, show: bool = True) -> Iterator[Callable[[float], None]]:
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


def size(count: float) -> str:
    """`1.5 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
