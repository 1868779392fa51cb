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
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
_BAR_AFTER = 1.0  # seconds: a bar for less would only flicker


def say(text: str) -> None:
    """Say a line to the user."""
    _log.info("%s", text)


def say_how_to_see_more() -> None:
    """On our own console only: a script that has set up logging, or a level, knows how."""
    if _log.level == logging.INFO:
        for console in (handler for handler in _log.handlers if isinstance(handler, ConsoleHandler)):
            console.handle(logging.makeLogRecord({"msg": _SEE_MORE, "levelno": logging.INFO}))


@contextmanager
def progress_bar(
    label: str, total: float | None, *, in_bytes: bool = False, show: bool | Callable[[], bool] = True
) -> Iterator[Callable[[float], None]]:
    """Yield the function that advances a progress bar, which appears on a terminal if the work takes over a second.

    Without a total, the bar shows that something goes on, and for how long. `show` may be a function, for work that
    somebody may begin to wait for later.
    """
    if show is False or not _is_terminal():
        yield lambda amount: None
        return
    bar = _Bar(shown(label), total, in_bytes, show if callable(show) else lambda: True)
    try:
        yield bar.advance
    finally:
        bar.close()


_STEP = 16 << 20  # bytes: a whole file may be one piece


def counted(pieces: Iterable[memoryview], advance: Callable[[int], None]) -> Iterator[memoryview]:
    """The pieces, the large ones in several, and how many bytes of them were taken."""
    for piece in pieces:
        for start in range(0, len(piece), _STEP):
            yield piece[start : start + _STEP]
            advance(min(_STEP, len(piece) - start))


class _Bar:
    """A bar of rich, drawn by a timer or by what advances it. Both may be in any thread."""

    def __init__(self, label: str, total: float | None, in_bytes: bool, show: Callable[[], bool]) -> None:
        self._label, self._total, self._in_bytes, self._show = label, total, in_bytes, show
        self._done = 0.0
        self._due = time.monotonic() + _BAR_AFTER
        self._lock = threading.Lock()
        self._drawn = ExitStack()
        self._update: Callable[[float], None] | None = None
        self._is_closed = False
        self._timer = threading.Timer(_BAR_AFTER, self._draw)
        if show():
            self._timer.daemon = True
            self._timer.start()

    def advance(self, amount: float) -> None:
        with self._lock:
            done = self._done + amount
            self._done = done if self._total is None else min(self._total, done)  # it may be sent again, and counted
            if self._update is not None:
                self._update(self._done)
        if self._update is None and time.monotonic() > self._due:
            self._draw()

    def close(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_closed = True
            self._drawn.close()

    def _draw(self) -> None:
        with self._lock:
            if self._update is not None or self._is_closed or not self._show():
                return
            self._drawn.enter_context(_without_bars_of_tqdm())
            self._update = self._drawn.enter_context(self._of_rich())

    @contextmanager
    def _of_rich(self) -> Iterator[Callable[[float], None]]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        console = Console(stderr=True)
        # one row, as those of a wrapped bar would stay: of 80 columns, 48 are for the bar, the count and the time
        column = Column(no_wrap=True, overflow="ellipsis", max_width=max(8, console.width - 48))
        label = TextColumn("{task.description}", markup=False, table_column=column)
        bar = BarColumn(24 if console.width >= 80 else 6)
        count = DownloadColumn() if self._in_bytes else MofNCompleteColumn()
        how_far = (TimeElapsedColumn(),) if self._total is None else (count, TimeRemainingColumn())
        to_terminal = sys.stdout is not None and sys.stdout.isatty()  # or what is printed to a file would miss it
        with Progress(label, bar, *how_far, console=console, transient=True, redirect_stdout=to_terminal) as progress:
            task = progress.add_task(self._label, total=self._total, completed=int(self._done))
            yield lambda done: progress.update(task, completed=done)


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # none, or closed
        return False


@contextmanager
def _without_bars_of_tqdm() -> Iterator[None]:
    """Clear the bars of tqdm, and draw them again afterwards: what is written meanwhile would stand in their lines."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with ExitStack() as cleared:
        if tqdm is not None:
            with suppress(Exception):  # another thread may begin a bar now
                cleared.enter_context(tqdm.external_write_mode(file=sys.stderr, nolock=True))
        yield


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
_SEE_MORE = f"{_VARIABLE}=debug shows more, {_VARIABLE}=warning less."
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
        with suppress(Exception), _without_bars_of_tqdm():
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
