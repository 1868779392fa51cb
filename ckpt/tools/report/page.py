"""The report of a run, or of several side by side: tables, lists and curves, as one HTML file, Markdown, or text.

The HTML has no script and loads nothing from the network; curves are SVG inside it. Whatever comes from files passes
through `text`, `markdown` or `shown`: a name can never be markup or script.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape

from ckpt.shown import markdown, shown
from ckpt.tools.report.facts import Best, RunFacts, Save, best_of, memory_spent, verdict, waits
from ckpt.util.console import format_duration, format_number, format_size, format_table, utc_now
from ckpt.util.svg_plot import HEIGHT, THEMED, Mark, Points, document, line_panel, stacked_bar
from ckpt.version import __version__

HTML, MARKDOWN, TEXT = "html", "md", "text"
MOST_RUNS = len(THEMED.lines)  # side by side
_UNKNOWN = "-"
_LEVELS = "▁▂▃▄▅▆▇█"
_MAX_POINTS = 60  # of a curve of characters
_PANEL = 334  # as wide as a phone, so that its letters are not shrunk there
_MOST_METRIC_COLUMNS = 6
_METRICS = ("metric", "by step", "first", "last", "lowest", "highest", "best")
_ATTEMPTS = ("attempt", "began (UTC)", "from", "steps", "lasted", "ended", "cost")
_RUNS = ("run", "step", "attempts", "goodput", "wall time", "checkpoints", "health")
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
    """Values by step, of one run or by the names of several, drawn in HTML alone: tables have them too."""

    name: str
    curves: Mapping[str, Points]
    best: Best | None = None


@dataclass(frozen=True)
class Bar:
    """The parts of a whole, side by side. The table after it has them too, each of the kind of its colour."""

    parts: Sequence[tuple[str, float]]


Block = Cell | Table | Lines | Curve | Bar
Sections = Iterable[tuple[str, Sequence[Block]]]


def page(runs: Sequence[RunFacts], modes: Mapping[str, str], kind: str) -> str:
    """The report of a run, or of several side by side, as HTML or Markdown; or what matters most of it, as text.

    `modes`: "min" or "max" by metric.
    """
    if len(runs) > 1:
        found = _side_by_side(runs, modes)
    else:
        found = _brief(runs[0], modes) if kind == TEXT else _sections(runs[0], modes, kind)
    sections = [(title, blocks) for title, blocks in found if blocks]
    urls = [run.url for run in runs]
    if kind == TEXT:
        return "\n\n".join("\n".join(filter(None, map(_text_block, blocks))) for _, blocks in sections) + "\n"
    return _html(urls, sections) if kind == HTML else _markdown(urls, sections)


def _sections(facts: RunFacts, modes: Mapping[str, str], kind: str) -> Sections:
    yield "", [_health_of(facts), Table(("", ""), list(_summary(facts)))]
    yield "Goodput", _goodput(facts)
    yield "Attempts", _attempts(facts)
    curves = [Curve(name, {"": points}, best_of(name, points, modes)) for name, points in facts.curves.items()]
    yield "Metrics", [*_metrics(facts, modes, drawn=kind == HTML), *curves]
    waited = [(save.step, save.waited) for save in facts.saves if save.waited is not None]
    sizes = [(save.step, save.summary.size / 1e6) for save in facts.saves]
    drawn = [Curve("training waited, in s", {"": waited}), Curve("size, in MB", {"": sizes})]
    yield "Saves", drawn if waited else []
    yield "Health", _problems(facts)
    yield "Checkpoints", [_checkpoints(facts, modes)]


def _brief(facts: RunFacts, modes: Mapping[str, str]) -> Sections:
    yield "", [_health_of(facts), *([Cell(str(facts.goodput))] if facts.goodput else [])]
    yield "", _attempts(facts)
    yield "", _metrics(facts, modes, drawn=False)


def _side_by_side(runs: Sequence[RunFacts], modes: Mapping[str, str]) -> Sections:
    rows: list[Sequence[Cell | str]] = []
    for number, run in enumerate(runs):
        spent = run.goodput
        shares = [f"{spent.share:.1%}", format_duration(spent.seconds)] if spent else [_UNKNOWN] * 2
        counts = [f"{run.told[-1].past.last:,}", f"{len(run.told):,}", *shares, f"{len(run.present):,}"]
        rows.append([Cell(run.url, kind=f"part{number} name"), *counts, _health_of(run)])
    yield "", [Table(_RUNS, rows)]
    curves = [run.curves for run in runs]
    names = list(dict.fromkeys(name for found in curves for name in found))
    values = [[name, *(_last_and_best(name, found.get(name, []), modes) for found in curves)] for name in names]
    heads = [run.url for run in runs]
    drawn = [Curve(name, {url: run.get(name, []) for url, run in zip(heads, curves, strict=True)}) for name in names]
    yield "Metrics", [Table(("metric", *heads), values), *drawn] if names else []


def _last_and_best(name: str, points: Points, modes: Mapping[str, str]) -> str:
    if not points:
        return _UNKNOWN
    best = best_of(name, points, modes)
    return format_number(points[-1][1]) + (f"; best {_best(best)}" if best else "")


def _best(best: Best) -> str:
    return f"{format_number(best.value)} at step {best.step:,}"


def _health_of(facts: RunFacts) -> Cell:
    healthy, why = verdict(facts)
    return Cell(why, kind="good wide" if healthy else "bad wide")


def _goodput(facts: RunFacts) -> list[Block]:
    if (spent := facts.goodput) is None:
        return []
    rows = [
        (Cell(label, kind=f"part{n}"), f"{time / (spent.seconds or 1):.1%}", Cell(format_duration(time), time))
        for n, (label, time) in enumerate(spent.parts)
    ]
    least = "At least " if any(attempt.was_killed for attempt in facts.told) else ""
    said = f"{least}{spent.share:.1%} of {format_duration(spent.seconds)} went to steps that count."
    return [Cell(said), Bar(spent.parts), Table(("time went to", "share", "time"), rows)]


def _attempts(facts: RunFacts) -> list[Block]:
    rows: list[Sequence[Cell | str]] = []
    for number, attempt in enumerate(facts.told, 1):
        past = attempt.past
        lasted = format_duration(past.seconds["total"]) if "total" in past.seconds else _UNKNOWN
        lasted += " or more" if attempt.was_killed else ""
        kind = "bad wide" if attempt.was_killed or past.ended == "failed" else ""
        began, start = Cell(_minute(past.began), past.began, "line"), Cell(attempt.began_from, kind="name")
        steps, end = Cell(f"{past.first:,} to {past.last:,}", kind="line"), Cell(attempt.end, kind=kind)
        rows.append((str(number), began, start, steps, lasted, end, attempt.cost))
    told = enumerate(facts.told, 1)
    skipped = [(f"attempt {number} passed over:", found.passed_over) for number, found in told if found.passed_over]
    return [Table(_ATTEMPTS, rows), *([Lines(skipped)] if skipped else [])]


def _metrics(facts: RunFacts, modes: Mapping[str, str], *, drawn: bool) -> list[Block]:
    """`drawn`: there are curves below, and none are needed in the table."""
    rows = [_metric_row(name, points, best_of(name, points, modes), drawn) for name, points in facts.curves.items()]
    return [Table([name for name in _METRICS if name != "by step" or not drawn], rows)] if rows else []


def _summary(facts: RunFacts) -> Iterator[Sequence[Cell | str]]:
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
    ranks = f"{newest.world_size} ranks" if newest.world_size > 1 else "one process"
    yield "saved by", ", ".join(filter(None, [ranks, f"{newest.layout} layout", newest.hardware]))
    if newest.origin:
        yield "converted from", newest.origin
    yield "versions", ", ".join(f"{name} {version}" for name, version in newest.versions.items())


def _metric_row(name: str, points: Points, best: Best | None, drawn: bool) -> Sequence[Cell | str]:
    values = [value for _, value in points]
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    ends = [_metric(value) for value in (values[0], values[-1], min(finite), max(finite))]
    curve = [] if drawn else [sparkline(values)]
    return name, *curve, *ends, Cell(_best(best) if best else _UNKNOWN, kind="best" if best else "")


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


def _problems(facts: RunFacts) -> list[Block]:
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
    if facts.forgotten:
        yield f"{facts.forgotten:,} older saves are no longer known"


def _checkpoints(facts: RunFacts, modes: Mapping[str, str]) -> Table:
    by_name: dict[str, list[tuple[int, float]]] = {}
    for save in facts.saves:
        for name, value in save.summary.metrics.items():
            by_name.setdefault(name, []).append((save.step, value))
    names, best = list(by_name), {name: best_of(name, points, modes) for name, points in by_name.items()}
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


def _markdown(urls: Sequence[str], sections: Sections) -> str:
    parts = [f"# {markdown(', '.join(urls))}"]
    for title, blocks in sections:
        said = [_markdown_block(block) for block in blocks if not isinstance(block, Curve | Bar)]
        parts += [f"## {title}" if title and said else "", *said]
    return "\n\n".join(filter(None, parts)) + "\n"


def _markdown_block(block: Cell | Table | Lines) -> str:
    if isinstance(block, Cell):
        return markdown(block.said)
    if isinstance(block, Lines):
        lines = ((f"- {markdown(line)}", *(f"  - {markdown(more)}" for more in below)) for line, below in block.lines)
        return "\n".join(line for some in lines for line in some)
    rows = [" | ".join(markdown(_cell(cell).said) for cell in row) for row in block.rows]
    head = [" | ".join(map(markdown, block.columns)), "---|" * len(block.columns)]
    return "\n".join([f"| {head[0]} |", f"|{head[1]}", *(f"| {row} |" for row in rows)])


def _cell(cell: Cell | str) -> Cell:
    return cell if isinstance(cell, Cell) else Cell(cell)


def _text_block(block: Block) -> str:
    """For a terminal: curves and bars are not drawn."""
    if isinstance(block, Cell):
        return shown(block.said)
    if isinstance(block, Lines):
        return "\n".join(shown(" ".join([line, "; ".join(below)]).strip()) for line, below in block.lines)
    if not isinstance(block, Table):
        return ""
    rows = [[_cell(cell).said for cell in row] for row in block.rows]
    return "\n".join(format_table(block.columns, rows))


# -- HTML -------------------------------------------------------------------------------------------------------------

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root{color-scheme:light dark;--page:#f5f6f8;--surface:#fff;--ink:#1b2230;--muted:#5a6473;--grid:#e2e6eb;
--line:#2a5fae;--second:#c4571a;--third:#4c9a78;--fourth:#8a5fb5;--fifth:#a3acb8;--sixth:#a87b00;
--bad:#b3261e;--good:#1d7a46}
@media (prefers-color-scheme:dark){:root{--page:#11141a;--surface:#191e26;--ink:#e5e8ed;--muted:#9ca6b4;
--grid:#2d3540;--line:#79a8ee;--second:#ef9a5b;--third:#58a986;--fourth:#b794e6;--fifth:#5f6976;--sixth:#d8b43c;
--bad:#ff9089;--good:#6fd39b}}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:66rem;margin:0 auto;padding:1.5rem 1rem 3rem}
h1,p,li{overflow-wrap:anywhere}td{overflow-wrap:break-word;max-width:24rem}
td:nth-child(2):last-child{overflow-wrap:anywhere;max-width:none}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin:.2rem 0 .8rem}footer,.gone{color:var(--muted)}
section{background:var(--surface);border:1px solid var(--grid);border-radius:10px;padding:1rem;margin:1rem 0}
.box{overflow:auto;max-width:100%;max-height:34rem}svg{max-width:100%;height:auto;margin-top:.8rem}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .7rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid);min-width:4rem}
th{color:var(--muted);background:var(--surface);position:sticky;top:0}
.bad{color:var(--bad);font-weight:600}.best{color:var(--second);font-weight:600}.good{color:var(--good)}
p{margin:0 0 .8rem}p.good,p.bad{font-size:1.05rem}.bar{width:100%;height:1.5rem;border-radius:5px;margin:0 0 .5rem}
.line{white-space:nowrap}.name{min-width:9rem}.wide{min-width:12rem}
@media print{.box{overflow:visible;max-height:none}section{border:none;padding:0}}
""" + "".join(f'.part{n}::before{{content:"■\xa0";color:{colour}}}' for n, colour in enumerate(THEMED.lines))


def text(content: object) -> str:
    """A text as HTML: escaped, without control characters and secrets."""
    return escape(shown(str(content)))


def _html(urls: Sequence[str], sections: Sections) -> str:
    title = " and ".join(url.rstrip("/").rpartition("/")[2] or url for url in urls)
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
            f'<p class="gone">{text(", ".join(urls))}</p>',
            *body,
            f"<footer>Made by ckpt {text(__version__)}, {text(utc_now())}</footer>",
            "</main></body></html>",
            "",
        ]
    )


def _html_block(block: Block) -> str:
    if isinstance(block, Cell):
        return f'<p class="{block.kind}">{text(block.said)}</p>'
    if isinstance(block, Bar):
        whole = {"class": "bar", "preserveAspectRatio": "none"}
        return document(stacked_bar(block.parts, THEMED, 1000, 20), 1000, 20, THEMED, "where the time went", **whole)
    if isinstance(block, Curve):
        best = block.best
        mark = Mark(best.step, best.value, f"{best.how} {format_number(best.value)}") if best else None
        drawn = line_panel(block.name, block.curves, THEMED, mark, width=_PANEL)
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
