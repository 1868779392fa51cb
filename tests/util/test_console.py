"""What people see: the console of the logger, progress bars, and numbers and tables as text."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from _pytest.logging import LogCaptureHandler
from tqdm import tqdm

from ckpt.util import console
from ckpt.util.console import (
    ConsoleHandler,
    counted,
    format_age,
    format_duration,
    format_number,
    format_size,
    format_table,
    html_table,
    install_console,
    one_line,
    progress_bar,
    utc_now,
)


def test_sizes_ages_and_durations_are_in_the_largest_unit_that_fits() -> None:
    sizes = {
        0: "0 bytes", 999: "999 bytes", 1000: "1.0 kB", 999_900: "999.9 kB", 10**6: "1.0 MB", 999_900_000: "999.9 MB",
        10**9: "1.0 GB", 1_540_000_000: "1.5 GB", 999_900_000_000: "999.9 GB", 10**13: "10000.0 GB",
    }  # fmt: skip
    assert {size: format_size(size) for size in sizes} == sizes
    durations = {
        -5: "0 s", 0.9: "0 s", 59.9: "59 s", 60: "1 min", 3599: "59 min", 3600: "1 h", 172_799: "47 h", 172_800: "2 d",
        10 * 86_400: "10 d",
    }  # fmt: skip
    assert {seconds: format_duration(seconds) for seconds in durations} == durations
    assert format_age((datetime.now(timezone.utc) - timedelta(minutes=90)).isoformat()) == "1 h"
    assert format_age((datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()) == "0 s"
    assert [format_number(value) for value in (0.123456, 12345.6)] == ["0.1235", "1.235e+04"]
    assert one_line("  a\nb \n c") == "a b c"
    now = datetime.fromisoformat(utc_now())
    assert now.utcoffset() == timedelta(0)
    assert abs(datetime.now(timezone.utc) - now) < timedelta(hours=1)


def test_a_table_is_as_wide_as_its_cells_and_numbers_are_on_the_right() -> None:
    rows = [("step-1", "9", ""), ("a\x1b", "1000", "x")]
    assert list(format_table(("name", "size", "of"), rows, right=("size",))) == [
        "name    size  of",
        "step-1     9",
        "a\\x1b   1000  x",
    ]
    with pytest.raises(ValueError, match="zip"):
        list(format_table(("a", "b"), [("1",)]))


def test_a_table_in_html_has_its_columns_on_their_sides_and_escapes_its_text() -> None:
    style = "padding:2px 10px 2px 0;vertical-align:top;text-align:"
    assert html_table("<t>", [("a", "1")], ("name", "size"), right=("size",)) == (
        f'<div><b>&lt;t&gt;</b><table><tr><th style="{style}left">name</th><th style="{style}right">size</th></tr>'
        f'<tr><td style="{style}left">a</td><td style="{style}right">1</td></tr></table></div>'
    )
    assert html_table("t", [("a", "<b>")]) == (
        f'<div><b>t</b><table><tr><td style="{style}left">a</td><td style="{style}left">&lt;b&gt;</td></tr></table>'
        "</div>"
    )
    for rows, columns in (([("1",)], ("a", "b")), ([("1", "2")], ("a",))):
        with pytest.raises(ValueError, match="zip"):
            html_table("t", rows, columns)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def closed() -> io.TextIOWrapper:
    with open(os.devnull, "w") as stream:
        return stream


@pytest.fixture
def terminal_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars don't wait for a second."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(console, "_BAR_AFTER", 0.0)


@pytest.mark.usefixtures("terminal_at_once")
def test_a_bar_is_shown_on_a_terminal_and_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for in_bytes, count in ((False, " 4/10"), (True, "4/10 bytes")):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress_bar("[red]copy\x1b", 10, **({"in_bytes": True} if in_bytes else {})) as advance:
            advance(1)
            advance(3)
        assert "[red]copy\\x1b" in terminal.getvalue()
        assert count in terminal.getvalue()
        assert ("bytes" in terminal.getvalue()) == in_bytes
        assert terminal.getvalue().endswith("\x1b[2K")  # the line is erased
        assert capsys.readouterr().out == ""
    for stream, show in ((Terminal(), False), (io.StringIO(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress_bar("copy", 10, show=show) as advance:
            advance(1)
        assert stream.getvalue() == ""


@pytest.mark.usefixtures("terminal_at_once")
def test_a_bar_appears_when_somebody_begins_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, waits = Terminal(), list[bool]()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("save", 10, show=lambda: bool(waits)) as advance:
        advance(4)
        assert terminal.getvalue() == ""
        waits.append(True)
        advance(20)  # what was sent again is not counted
    assert "10/10" in terminal.getvalue()


@pytest.mark.usefixtures("terminal_at_once")
def test_without_a_total_a_bar_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("copying step-1", None) as advance:
        advance(4)
    assert re.search(r"copying step-1 .*0:00:00", terminal.getvalue())


def test_work_of_less_than_a_second_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("save", 10) as advance:
        advance(10)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("stream", [None, closed()], ids=["none", "closed"])
def test_without_standard_error_there_is_no_bar(
    monkeypatch: pytest.MonkeyPatch, stream: io.TextIOWrapper | None
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("save", 10) as advance:
        advance(10)


@pytest.mark.usefixtures("terminal_at_once")
def test_a_bar_is_one_row_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or every update would leave a line behind."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("looking for intact files of a-checkpoint-with-a-name", 4e12, in_bytes=True) as advance:
        advance(4e9)
    frames = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", terminal.getvalue()).splitlines()
    assert any(re.fullmatch(r"looking for intact files of a-c… ━{24} [\d.]+/4.0 TB -:--:--", one) for one in frames)


@pytest.mark.usefixtures("terminal_at_once")
def test_lines_and_bars_leave_the_bars_of_tqdm_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    record = logging.makeLogRecord({"msg": "saved", "levelno": logging.INFO})
    with handlers_of("", *()), handlers_of("ckpt", *()), tqdm(total=3, file=terminal, mininterval=0) as steps:
        steps.update()
        ConsoleHandler().emit(record)
        with progress_bar("save", 10) as advance:
            advance(10)
        steps.update()
    lines = [line.rpartition("\r")[2] for line in terminal.getvalue().split("\n")]
    assert "saved" in lines
    assert not any("it/s" in line and ("saved" in line or "10/10" in line) for line in lines)


def test_what_is_counted_comes_in_small_pieces_and_unchanged() -> None:
    data = memoryview(bytes(range(256)) * (1 << 17))  # 32 MB
    amounts = list[int]()
    taken = counted([data[:5], data[5:]], amounts.append)
    pieces = [next(taken)]
    assert amounts == []  # it may still be in use
    pieces += taken
    assert b"".join(pieces) == data
    assert amounts == [*map(len, pieces)] == [5, 1 << 24, (1 << 24) - 5]


class Tee:
    """As loggers and notebooks have: writes somewhere, and is no file."""

    def write(self, text: str) -> None: ...

    def flush(self) -> None: ...


class Console(logging.Handler):
    console = "as Rich's handler has"


SHOWS: dict[str, tuple[Callable[[Path], logging.Handler], bool]] = {
    "standard error": (lambda _: logging.StreamHandler(sys.stderr), True),
    "standard output": (lambda _: logging.StreamHandler(sys.stdout), True),
    "standard error by its number": (lambda _: logging.StreamHandler(os.fdopen(2, "w", closefd=False)), True),
    "a file": (lambda folder: logging.FileHandler(folder / "log"), False),
    "a file that is opened later": (lambda folder: logging.FileHandler(folder / "log", delay=True), False),
    "another file": (lambda _: logging.StreamHandler(os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")), False),
    "a closed file": (lambda _: logging.StreamHandler(closed()), False),
    "nothing": (lambda _: logging.NullHandler(), False),
    "Rich's": (lambda _: Console(), True),
    "a tee": (lambda _: logging.StreamHandler(Tee()), True),
    "memory": (lambda _: logging.StreamHandler(io.StringIO()), False),
    "pytest's": (lambda _: LogCaptureHandler(), True),
}


@contextmanager
def handlers_of(name: str, *handlers: logging.Handler) -> Iterator[None]:
    """A logger has these handlers alone, until the context is left."""
    logger = logging.getLogger(name)
    before, logger.handlers = logger.handlers, [*handlers]
    try:
        yield
    finally:
        logger.handlers = before
        for handler in handlers:
            handler.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("of", ["", "ckpt"])
@pytest.mark.parametrize("name", SHOWS)
def test_a_record_is_printed_unless_another_handler_shows_it(
    name: str, of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stderr", printed)
    make, shows = SHOWS[name]
    console, other = ConsoleHandler(), make(tmp_path)
    quiet = logging.FileHandler(tmp_path / "other")  # one that shows it is enough
    record = logging.LogRecord("ckpt", logging.INFO, __file__, 1, "%s", ("text",), None)
    both: dict[str, list[logging.Handler]] = {"": [quiet], "ckpt": [console]}
    both[of].append(other)
    with handlers_of("", *both[""]), handlers_of("ckpt", *both["ckpt"]):
        console.emit(record)
        assert printed.getvalue() == ("" if shows else "text\n")
        printed.truncate(0)
        monkeypatch.setattr(logging.getLogger("ckpt"), "propagate", False)
        console.emit(record)
        assert bool(printed.getvalue()) == (of == "" or not shows)
        if name == "pytest's":
            monkeypatch.setattr(console, "pid", -1)  # a forked child's: no report has it
            console.emit(record)
            assert printed.getvalue()


def test_the_console_names_the_level_of_warnings_and_outlives_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    console = ConsoleHandler()
    with handlers_of("", console):
        for level, printed in ((logging.INFO, "x\n"), (logging.WARNING, "ckpt warning: x\n"), (40, "ckpt error: x\n")):
            stream = io.TextIOWrapper(io.BytesIO(), write_through=False)
            monkeypatch.setattr(sys, "stderr", stream)
            record = logging.LogRecord("ckpt", level, __file__, 1, "x", (), None)
            console.emit(record)
            assert stream.buffer.getvalue().decode() == printed
        stream.close()
        console.emit(record)
        monkeypatch.setattr(sys, "stderr", None)
        console.emit(record)


@pytest.mark.parametrize(
    ("chosen", "before", "level"),
    [
        (None, logging.NOTSET, logging.INFO),
        ("Warning", logging.NOTSET, logging.WARNING),
        ("quiet", logging.NOTSET, logging.CRITICAL + 1),
        ("debug", logging.ERROR, logging.ERROR),
        ("loud", logging.NOTSET, logging.INFO),
    ],
)
def test_the_environment_chooses_the_level_unless_the_program_has(
    chosen: str | None, before: int, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, said = logging.getLogger("ckpt"), []
    monkeypatch.delenv("CKPT_LOG", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CKPT_LOG", chosen)
    monkeypatch.setattr(logger, "filters", [lambda record: said.append(record.getMessage())])
    known: Any = logger.level
    with handlers_of("ckpt", logging.NullHandler()):
        logger.setLevel(before)
        try:
            install_console()
            assert logger.level == level
            install_console()
            assert [type(handler) for handler in logger.handlers] == [logging.NullHandler, ConsoleHandler]
        finally:
            logger.setLevel(known)
    unknown = "CKPT_LOG=loud is not known. Choose one of: debug, info, warning, error, quiet."
    assert said == ([unknown] * 2 if chosen == "loud" else [])
