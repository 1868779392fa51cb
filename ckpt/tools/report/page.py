"""The report of a run as a page: sections of tables, lists and curves, as Markdown or as one HTML file.

The HTML has no script and loads nothing from the network; curves are SVG inside it. Whatever comes from files passes
through `text` or `markdown`: a name can never be markup or script.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape

from ckpt.shown import markdown, shown
from ckpt.tools.report.facts import (
    Attempt,
    Best,
    RunFacts,
    Save,
    attempts,
    best_of,
    memory_spent,
    restarts,
    waits,
    went_back,
)
from ckpt.util.console import format_duration, format_number, format_size, utc_now
from ckpt.util.svg_plot import HEIGHT, THEMED, Mark, Points, document, line_panel
from ckpt.version import __version__

_UNKNOWN = "-"
_LEVELS = "▁▂▃▄▅▆▇█"
_MAX_POINTS = 60  # of a curve of characters
_PANEL = 380  # as wide as a phone, so that its letters are not shrunk there
_MOST_METRIC_COLUMNS = 6
_METRICS = ("metric", "by step", "first", "last", "lowest", "highest", "best")
_CHECKPOINTS = ("name", "state", "step", "saved (UTC)", "size", "shared", "training waited", "durable after", "ranks")


@dataclass(frozen=True)
class Cell:
    """A cell of a table. `value`: with all its digits, for programs. `kind`: a class of the style sheet."""

    said: str
    value: object = None
    kind: str = ""


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]


@dataclass(frozen=True)
class Lines:
    """A list; what belongs to a line is listed below it."""

    lines: Sequence[tuple[str, Sequence[str]]]

    @classmethod
    def of(cls, *lines: str) -> Lines:
        return cls([(line, ()) for line in lines])


@dataclass(frozen=True)
class Curve:
    """Values by step, drawn in HTML alone: tables have them too."""

    name: str
    points: Points
    best: Best | None = None


Block = Table | Lines | Curve


def page(facts: RunFacts, modes: Mapping[str, str], *, as_html: bool) -> str:
    """The page. `modes`: "min" or "max" by metric."""
    sections = [(title, blocks) for title, blocks in _sections(facts, modes) if blocks]
    return _html(facts.url, sections) if as_html else _markdown(facts.url, sections)


def _sections(facts: RunFacts, modes: Mapping[str, str]) -> Iterator[tuple[str, list[Block]]]:
    best = {name: best_of(name, points, modes) for name, points in facts.curves.items()}
    found = attempts(facts.saves)
    yield "", [Table(("", ""), list(_summary(facts, found)))]
    curves = [Curve(name, points, best[name]) for name, points in facts.curves.items()]
    yield "Metrics", [Table(_METRICS, [_metric_row(curve) for curve in curves]), *curves] if curves else []
    waited = [(save.step, save.waited) for save in facts.saves if save.waited is not None]
    sizes = [(save.step, save.summary.size / 1e6) for save in facts.saves]
    yield "Saves", [Curve("training waited, in s", waited), Curve("size, in MB", sizes)] if waited else []
    yield "Restarts", [Lines([_attempt_lines(attempt, number) for number, attempt in enumerate(found)])]
    yield "Health", _health(facts)
    yield "Checkpoints", [_checkpoints(facts, best)]


def _summary(facts: RunFacts, found: Sequence[Attempt]) -> Iterator[Sequence[Cell | str]]:
    first, last, newest = facts.saves[0].summary, facts.saves[-1].summary, facts.newest
    span = (datetime.fromisoformat(last.created) - datetime.fromisoformat(first.created)).total_seconds()
    waited, durable = (found or [0.0] for found in waits(facts.saves))
    yield "runs", ", ".join(dict.fromkeys(save.summary.run for save in facts.saves))
    gone = f"; {len(facts.removed):,} more were removed" if facts.removed else ""
    size, shared = (sum(sizes) for sizes in zip(*((s.summary.size, s.shared or 0) for s in facts.present), strict=True))
    stored = f", {format_size(size - shared)} without what is shared" if shared else ""
    yield "checkpoints", f"{len(facts.present):,}, {format_size(size)}{stored}{gone}"
    yield "from", f"step {first.step:,}, {first.created}"
    yield "to", f"step {last.step:,}, {last.created}, {format_duration(span)} later"
    yield "training waited", f"{sum(waited):.2f} s for these, at most {max(waited):.2f} s for one"
    yield "durable after", f"{sum(durable) / len(durable):.2f} s on average, at most {max(durable):.2f} s"
    spent = memory_spent(facts.saves)
    if spent.taken or spent.skipped:
        yield "memory", str(spent).removeprefix("memory: ")
    again = restarts(found)
    fallbacks = sum(attempt.is_fallback for attempt in again)
    yield "restarts", f"{len(again)}" + (f", {fallbacks} passed over a checkpoint" if fallbacks else "")
    wrong = len(facts.problems)
    health = f"{wrong:,} with problems" if wrong else "complete"
    yield "health", Cell(f"{health}, by the sizes of files", kind="bad" if wrong else "")
    ranks = f"{newest.world_size} ranks" if newest.world_size > 1 else "one process"
    yield "saved by", ", ".join(filter(None, [ranks, f"{newest.layout} layout", newest.hardware]))
    if newest.origin:
        yield "converted from", newest.origin
    yield "versions", ", ".join(f"{name} {version}" for name, version in newest.versions.items())


def _metric_row(curve: Curve) -> Sequence[Cell | str]:
    values = [value for _, value in curve.points]
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    ends = [_metric(value) for value in (values[0], values[-1], min(finite), max(finite))]
    best = curve.best
    said = f"{format_number(best.value)} at step {best.step:,}" if best else _UNKNOWN
    return curve.name, sparkline(values), *ends, Cell(said, kind="best" if best else "")


def sparkline(values: Sequence[float]) -> str:
    """A curve of block characters. Values that are not finite are gaps."""
    step = max(1, -(-len(values) // _MAX_POINTS))
    some = [*values[::step], *(values[-1:] if (len(values) - 1) % step else ())]
    finite = [value for value in some if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(
        _LEVELS[round((value - low) / span * (len(_LEVELS) - 1)) if span else 0] if math.isfinite(value) else " "
        for value in some
    )


def _attempt_lines(attempt: Attempt, number: int) -> tuple[str, list[str]]:
    """An attempt in a sentence, and what it passed over."""
    saves, load = attempt.saves, attempt.load
    saved = " to ".join(dict.fromkeys(saves[end].name for end in (0, -1)))
    if load is None:
        return f"{'began again' if number else 'began'}: saved {saved}", []
    where = "" if load.found_in == "root" else f", found in the {load.found_in}"
    how = "" if load.is_recorded else " (as its parent says)"
    title = f"restart {number}" if number else "continued"
    more = [f"and {load.more:,} more"] if load.more else []
    skipped = [f"passed over: {why}" for why in load.reasons]
    return f"{title}: from {load.name} (step {load.step:,}{where}){how}, saved {saved}", skipped + more


def _health(facts: RunFacts) -> list[Block]:
    problems = [(name, Cell(state, kind="bad"), why) for name, state, why in facts.problems]
    blocks: list[Block] = [Table(("checkpoint", "state", "problem"), problems)] if problems else []
    remarks = list(_remarks(facts))
    return [*blocks, Lines.of(*remarks)] if remarks else blocks


def _remarks(facts: RunFacts) -> Iterator[str]:
    for save in facts.saves:
        if save.cured:
            yield f"{save.name}: {save.cured}, thanks to snapshots in memory"
    for name, points in facts.curves.items():
        odd = [f"{step:,}" for step, value in points if not math.isfinite(value)]
        if odd:
            few = ", ".join(odd[:8]) + (f" and {len(odd) - 8} more" if len(odd) > 8 else "")
            yield f"{name} is not finite at step {few}"
    for before, save in went_back(facts.saves):
        yield f"{save.name} came after {before.name}: the steps between were trained twice"
    if facts.forgotten:
        yield f"{facts.forgotten:,} older saves are no longer known"


def _checkpoints(facts: RunFacts, best: Mapping[str, Best | None]) -> Table:
    names = list(facts.curves)
    split = names if len(names) <= _MOST_METRIC_COLUMNS else []
    columns = [*_CHECKPOINTS, *(split or (["metrics"] if names else []))]
    rows = [_row(save, split, bool(names), best) for save in reversed(facts.saves)]
    blank = [_UNKNOWN] * (len(columns) - 2)
    rows += [[one.name, Cell(one.state, kind="bad"), *blank] for one in facts.unread]
    return Table(columns, rows)


def _row(save: Save, split: Sequence[str], has_metrics: bool, best: Mapping[str, Best | None]) -> list[Cell | str]:
    summary = save.summary
    measured: list[Cell | str] = [_measured(save, name, best[name]) for name in split]
    if has_metrics and not split:
        measured = [", ".join(f"{name} {format_number(value)}" for name, value in summary.metrics.items())]
    kind = "gone" if not save.is_here else "" if save.is_sound else "bad"
    return [
        save.name,
        Cell(save.state, kind=kind),
        Cell(f"{save.step:,}", save.step),
        Cell(_minute(summary.created), summary.created),
        *(Cell(_UNKNOWN if count is None else format_size(count), count) for count in (summary.size, save.shared)),
        *(Cell(_UNKNOWN if found is None else f"{found:.2f} s", found) for found in (save.waited, save.durable)),
        Cell(str(summary.world_size), summary.world_size),
        *measured,
    ]


def _minute(created: str) -> str:
    try:
        return f"{datetime.fromisoformat(created).astimezone(timezone.utc):%Y-%m-%d %H:%M}"
    except OverflowError:  # of the year 1 or 9999, as a file may claim
        return created


def _measured(save: Save, name: str, best: Best | None) -> Cell:
    value = save.summary.metrics.get(name)
    if value is None:
        return Cell(_UNKNOWN)
    is_best = best is not None and value == best.value and save.step == best.step
    return Cell(format_number(value), repr(value), "best" if is_best else _metric(value).kind)


def _metric(value: float) -> Cell:
    return Cell(format_number(value), repr(value), "" if math.isfinite(value) else "bad")


# -- Markdown ---------------------------------------------------------------------------------------------------------


def _markdown(url: str, sections: Iterable[tuple[str, list[Block]]]) -> str:
    parts = [f"# {markdown(url)}"]
    for title, blocks in sections:
        said = [_markdown_block(block) for block in blocks if not isinstance(block, Curve)]
        parts += [f"## {title}" if title and said else "", *said]
    return "\n\n".join(filter(None, parts)) + "\n"


def _markdown_block(block: Table | Lines) -> str:
    if isinstance(block, Lines):
        lines = ((f"- {markdown(line)}", *(f"  - {markdown(more)}" for more in below)) for line, below in block.lines)
        return "\n".join(line for some in lines for line in some)
    rows = [" | ".join(markdown(_cell(cell).said) for cell in row) for row in block.rows]
    head = [" | ".join(map(markdown, block.columns)), "---|" * len(block.columns)]
    return "\n".join([f"| {head[0]} |", f"|{head[1]}", *(f"| {row} |" for row in rows)])


def _cell(cell: Cell | str) -> Cell:
    return cell if isinstance(cell, Cell) else Cell(cell)


# -- HTML -------------------------------------------------------------------------------------------------------------

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root{color-scheme:light dark;--page:#f5f6f8;--surface:#fff;--ink:#1b2230;--muted:#5a6473;--grid:#e2e6eb;
--line:#2a5fae;--second:#b4490f;--third:#79b39c;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--page:#11141a;--surface:#191e26;--ink:#e5e8ed;--muted:#9ca6b4;
--grid:#2d3540;--line:#79a8ee;--second:#ef9a5b;--third:#3d8069;--bad:#ff9089}}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:66rem;margin:0 auto;padding:1.5rem 1rem 3rem}
h1,td,li{overflow-wrap:anywhere}h1{font-size:1.5rem}h2{font-size:1.1rem}footer,.gone{color:var(--muted)}
section{background:var(--surface);border:1px solid var(--grid);border-radius:10px;padding:1rem;margin:1rem 0}
.box{overflow:auto;max-width:100%;max-height:34rem}svg{max-width:100%;height:auto}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .7rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid);min-width:4rem}
th{color:var(--muted);background:var(--surface);position:sticky;top:0}
.bad{color:var(--bad);font-weight:600}.best{color:var(--second);font-weight:600}

@media print{.box{overflow:visible;max-height:none}section{border:none;padding:0}}
"""


def text(content: object) -> str:
    """A text as HTML: escaped, without control characters and secrets."""
    return escape(shown(str(content)))


def _html(url: str, sections: Iterable[tuple[str, list[Block]]]) -> str:
    title = url.rstrip("/").rpartition("/")[2] or url
    body = (
        "\n".join(["<section>", f"<h2>{text(title)}</h2>" if title else "", *map(_html_block, blocks), "</section>"])
        for title, blocks in sections
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{text(title)}: report of a run</title>",
            f"<style>{_STYLE}</style></head><body><main>",
            f"<h1>{text(title)}</h1>",
            f'<p class="gone">{text(url)}</p>',
            *body,
            f"<footer>Made by ckpt {text(__version__)}, {text(utc_now())}</footer>",
            "</main></body></html>",
            "",
        ]
    )


def _html_block(block: Block) -> str:
    if isinstance(block, Curve):
        best = block.best
        mark = Mark(best.step, best.value, f"best (the {best.how}): {format_number(best.value)}") if best else None
        drawn = line_panel(block.name, block.points, THEMED, mark, width=_PANEL)
        return document(drawn, _PANEL, HEIGHT, THEMED, f"{block.name} by step")
    if isinstance(block, Lines):
        items = (
            f"<li>{text(line)}{''.join(f'<br>{text(more)}' for more in below)}</li>" for line, below in block.lines
        )
        return f"<ul>{''.join(items)}</ul>"
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in block.columns)
    rows = (f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in block.rows)
    return f'<div class="box"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _html_cell(cell: Cell | str) -> str:
    cell = _cell(cell)
    said = text(cell.said)
    inside = said if cell.value is None else f'<data value="{text(cell.value)}">{said}</data>'
    return f"<td{f' class={chr(34)}{cell.kind}{chr(34)}' if cell.kind else ''}>{inside}</td>"
