"""What people see: lines through the logger `ckpt`, progress bars, and numbers, moments and tables as text and HTML.

The logger is the only channel, and each record is shown once. INFO is progress (saved, resumed). WARNING is what the
user should change or know; ERROR, what failed.

    logging.getLogger("ckpt").setLevel("WARNING")   # no line per save and resume; or "DEBUG", for more of them
    logging.basicConfig(...)                        # in the format of the script's own lines
    CKPT_LOG=warning python train.py                # the same without a change of the script; "quiet" for nothing

Without a handler of the script that shows records to a person, `ConsoleHandler` prints them on standard error.
Imports no torch: the command `ckpt` starts without it.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from html import escape

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
    """Say a line to the user."""
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


_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "quiet": logging.CRITICAL + 1,
}
_VARIABLE = "CKPT_LOG"
_STANDARD_STREAMS = (1, 2)


class ConsoleHandler(logging.Handler):
    """Prints the text of a record on what is standard error now, unless another handler shows it already."""

    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or any(map(self._shows, self._others())):
            return
        label = f"ckpt {record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        # a closed standard error is no error of the training; logging's own `handleError` would write there again
        with suppress(Exception):
            print(f"{label}{record.getMessage()}", file=sys.stderr, flush=True)

    def _others(self) -> list[logging.Handler]:
        logger = logging.getLogger("ckpt")
        further = logging.getLogger().handlers if logger.propagate else []
        return [other for other in (*logger.handlers, *further) if other is not self]

    def _shows(self, handler: logging.Handler) -> bool:
        """Whether a person sees what a handler gets. If in doubt, no: twice is better than never.

        Rich's handler has a console. pytest prints what its handlers collect, but not what a child it forked collects.
        """
        if hasattr(handler, "console"):
            return True
        if not isinstance(handler, logging.StreamHandler) or isinstance(handler, logging.FileHandler):
            return False
        if any(handler.stream is stream for stream in (sys.stdout, sys.stderr)):
            return True
        try:
            return handler.stream.fileno() in _STANDARD_STREAMS
        except (AttributeError, io.UnsupportedOperation):  # no file: a notebook's stream or a tee, or memory
            of_pytest = type(handler).__module__ == "_pytest.logging" and self.pid == os.getpid()
            return of_pytest or not isinstance(handler.stream, io.StringIO)
        except (OSError, ValueError):  # closed
            return False


def install_console() -> None:
    """Let the logger `ckpt` be heard. A level that somebody has set already stays."""
    logger = logging.getLogger("ckpt")
    chosen = os.environ.get(_VARIABLE, "info").lower()
    if logger.level == logging.NOTSET:
        logger.setLevel(_LEVELS.get(chosen, logging.INFO))
    if not any(isinstance(handler, ConsoleHandler) for handler in logger.handlers):
        logger.addHandler(ConsoleHandler())
    if chosen not in _LEVELS:
        logger.warning("%s=%s is not known. Choose one of: %s.", _VARIABLE, chosen, ", ".join(_LEVELS))


_CELL = "padding:2px 10px 2px 0;vertical-align:top;text-align:"


def html_table(
    title: str, rows: Iterable[Sequence[str]], columns: Sequence[str] = (), right: Collection[str] = ()
) -> str:
    """A table below a title. The columns named in `right` are right-aligned."""
    sides = ["right" if name in right else "left" for name in columns]
    head = "".join(f'<th style="{_CELL}{side}">{_text(name)}</th>' for name, side in zip(columns, sides, strict=True))
    lines = [f"<tr>{head}</tr>"] if head else []
    for row in rows:
        cells = (
            f'<td style="{_CELL}{side}">{_text(cell)}</td>' for cell, side in zip(row, sides or _left(row), strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<div><b>{_text(title)}</b><table>{''.join(lines)}</table></div>"


def _left(row: Sequence[str]) -> list[str]:
    return ["left"] * len(row)


def _text(text: str) -> str:
    return escape(shown(text))


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
