"""Pieces of an HTML page. Whatever comes from files passes through `text`: a name can never be markup or script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape

from ckpt.shown import shown
from ckpt.util.console import format_number, format_size

UNKNOWN = "&ndash;"


def text(content: object) -> str:
    """A text as HTML: escaped, without control characters and secrets."""
    return escape(shown(str(content)))


@dataclass(frozen=True)
class Cell:
    """A cell of a table. `html` is markup already; `kind` a class of the style sheet."""

    html: str
    kind: str = ""


def cell(content: object, kind: str = "") -> Cell:
    return Cell(text(content), kind)


def number(value: float | None, said: str) -> Cell:
    """A number as it is said, with all its digits for programs; a dash if it is not known."""
    return Cell(UNKNOWN if value is None else data(value, said), "right")


def data(value: object, said: str) -> str:
    return f'<data value="{text(value)}">{text(said)}</data>'


def metric(value: float | None) -> Cell:
    if value is None:
        return Cell(UNKNOWN, "right")
    return Cell(data(repr(value), format_number(value)), "right" if math.isfinite(value) else "right bad")


def size(count: int | None) -> Cell:
    return number(count, "" if count is None else format_size(count))


def seconds(value: float | None) -> Cell:
    return number(value, "" if value is None else f"{value:.2f} s")


def moment(created: str) -> Cell:
    """A time in UTC, to the minute."""
    try:
        said = f"{datetime.fromisoformat(created).astimezone(timezone.utc):%Y-%m-%d %H:%M}"
    except OverflowError:  # of the year 1 or 9999, as a file may claim
        said = created
    return Cell(f'<time datetime="{text(created)}">{text(said)}</time>')


def table(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[Cell]]], right: Iterable[str] = ()) -> str:
    """A table in a box of its own, which scrolls where the page is narrow. Each row has a class, or an empty one."""
    aligned = set(right)
    head = "".join(f'<th scope="col"{_class("right" if name in aligned else "")}>{text(name)}</th>' for name in columns)
    body = "\n".join(
        f"<tr{_class(kind)}>{''.join(f'<td{_class(one.kind)}>{one.html}</td>' for one in cells)}</tr>"
        for kind, cells in rows
    )
    return f'<div class="box tall"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def tile(name: str, value: str, note: str = "", kind: str = "") -> str:
    """A figure with its name; `value` and `note` are markup already."""
    said = f'<dd class="note">{note}</dd>' if note else ""
    return f'<dl class="tile"><dt>{text(name)}</dt><dd{_class(kind)}>{value}</dd>{said}</dl>'


def section(title: str, *parts: str) -> str:
    return "\n".join([f"<section><h2>{text(title)}</h2>", *filter(None, parts), "</section>"])


def box(picture: str) -> str:
    return f'<div class="box">{picture}</div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Colours, as CSS writes them, with their meanings."""
    items = (f'<li><span class="key" style="background:{colour}"></span>{text(what)}</li>' for colour, what in entries)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
