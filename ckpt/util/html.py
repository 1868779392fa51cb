"""Tables in HTML for notebooks. All text is escaped: names and reasons come from files that anybody may write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

from ckpt.shown import shown

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
