"""The report in Markdown: the facts of a run as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from ckpt.shown import markdown
from ckpt.tools.report.attempts import Attempt, attempts, title_of, went_back
from ckpt.tools.report.facts import RunFacts, Save, Unread, best_of, memory_spent, waits
from ckpt.util.console import format_duration, format_number, format_size

if TYPE_CHECKING:
    from ckpt.tools.report.changes import Changes

_LEVELS = "▁▂▃▄▅▆▇█"
_MAX_POINTS = 60  # of a curve
_METRICS = ("metric", "by step", "first", "last", "lowest", "highest", "best")
_CHECKPOINTS = ("name", "step", "saved", "size", "shared", "metrics", "training waited", "durable after", "state")


def render_markdown(facts: RunFacts, changes: Changes | None = None, modes: Mapping[str, str] | None = None) -> str:
    """The page. `changes`: as `measure_changes` returns them, or none. `modes`: "min" or "max" by metric."""
    facts = facts.with_damage(changes.damage if changes is not None else {})
    rows = [*map(_row, reversed(facts.present)), *map(_unread_row, facts.unread), *map(_row, reversed(facts.removed))]
    sections = (
        ("", _table(("", ""), _summary(facts))),
        ("## Metrics", _table(_METRICS, _metrics(facts, modes or {}))),
        ("## Checkpoints", _table(_CHECKPOINTS, rows)),
        ("## Restarts", _restarts(attempts(facts.saves))),
        ("## Change of each module", _changes(changes)),
        ("## Crashes", [f"- {markdown(save.cured)}" for save in facts.saves if save.cured]),
        ("## Went back", [f"- {markdown(b.name)} came after {markdown(a.name)}" for a, b in went_back(facts.saves)]),
    )
    pages = [
        f"# {markdown(facts.url)}",
        *(text for title, lines in sections if lines for text in (title, "\n".join(lines))),
    ]
    return "\n\n".join(filter(None, pages)) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(map(markdown, row))} |" for row in rows]
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *lines] if lines else []


def _summary(facts: RunFacts) -> Iterator[tuple[str, str]]:
    first, last, newest = facts.saves[0].summary, facts.present[-1].summary, facts.newest
    span = (datetime.fromisoformat(last.created) - datetime.fromisoformat(first.created)).total_seconds()
    waited, durable = (found or [0.0] for found in waits(facts.saves))
    yield "runs", ", ".join(dict.fromkeys(save.summary.run for save in facts.saves))
    gone = f"; {len(facts.removed)} more were removed" if facts.removed else ""
    size = format_size(sum(save.summary.size for save in facts.present))
    yield "checkpoints", f"{len(facts.present)}, {size}{gone}"
    yield "from", f"step {first.step:,}, {first.created}"
    yield "to", f"step {last.step:,}, {last.created}, {format_duration(span)} later"
    yield "training waited", f"{sum(waited):.2f} s for these, at most {max(waited):.2f} s for one"
    yield "durable after", f"{sum(durable) / len(durable):.2f} s on average, at most {max(durable):.2f} s"
    yield from _memory(facts.saves)
    ranks = f"{newest.world_size} ranks" if newest.world_size > 1 else "one process"
    yield "saved by", ", ".join(filter(None, [ranks, f"{newest.layout} layout", newest.hardware]))
    yield "versions", ", ".join(f"{name} {version}" for name, version in newest.versions.items())


def _memory(saves: Sequence[Save]) -> Iterator[tuple[str, str]]:
    """What snapshots in memory cost before these checkpoints; nothing if there were none."""
    spent = memory_spent(saves)
    if spent.taken or spent.skipped:
        yield "memory", str(spent).removeprefix("memory: ")


def _metrics(facts: RunFacts, modes: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    for name, points in facts.curves.items():
        values = [value for _, value in points]
        finite = [value for value in values if math.isfinite(value)] or [math.nan]
        ends = (format_number(value) for value in (values[0], values[-1], min(finite), max(finite)))
        best = best_of(name, points, modes)
        yield name, _sparkline(values), *ends, f"{format_number(best.value)} at step {best.step:,}" if best else "-"


def _sparkline(values: Sequence[float]) -> str:
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


def _unread_row(found: Unread) -> tuple[str, ...]:
    return (found.name, *("-",) * 7, f"{found.state}: {found.problem}")


def _row(save: Save) -> tuple[str, ...]:
    summary = save.summary
    state = f"{save.state}: {'; '.join(save.problems)}" if save.is_here and not save.is_sound else save.state
    return (
        summary.name,
        f"{summary.step:,}",
        summary.created,
        format_size(summary.size),
        "-" if save.shared is None else format_size(save.shared),
        ", ".join(f"{name} {format_number(value)}" for name, value in summary.metrics.items()) or "-",
        *("-" if seconds is None else f"{seconds:.2f} s" for seconds in (save.waited, save.durable)),
        state,
    )


def _restarts(found: Sequence[Attempt]) -> list[str]:
    """Every attempt after the first: what it continued from, and what it passed over."""
    lines = []
    for number, attempt in enumerate(found):
        load = attempt.load
        if load is not None:
            how = "" if load.is_recorded else " (as its parent says)"
            saved = " to ".join(dict.fromkeys(markdown(attempt.saves[end].name) for end in (0, -1)))
            lines.append(f"- {title_of(attempt, number)}: from {markdown(load.name)}{how}, saved {saved}")
            lines += [f"  - passed over: {markdown(why)}" for why in load.reasons]
            lines += [f"  - and {load.more:,} more"] if load.more else []
        elif number:
            lines.append(f"- began anew with {markdown(attempt.saves[0].name)}")
    return lines


def _changes(changes: Changes | None) -> list[str]:
    """A row for each module, a column for each pair of checkpoints; what was not compared is said below."""
    if changes is None:
        return []
    from ckpt.tools.report.changes import not_compared

    columns = ("module", *(f"to step {step.newer.step:,}" for step in changes.steps))
    table = _table(columns, (_change_row(module, changes) for module in changes.modules))
    notes = [
        f"- {markdown(step.older.name)} to {markdown(step.newer.name)}: {markdown(why)}"
        for step, why in not_compared(changes)
    ]
    left_out = [f"- {changes.left_out:,} checkpoints between these were left out"] if changes.left_out else []
    hidden = [f"- {changes.hidden:,} more modules have no row"] if changes.hidden else []
    notes += [*left_out, *hidden]
    return [*table, *([""] if table and notes else []), *notes]


def _change_row(module: str, changes: Changes) -> tuple[str, ...]:
    from ckpt.tools.report.changes import Cell, described

    cells = [(step, step.cells.get(module, Cell())) for step in changes.steps]
    return module, *("-" if cell.relative is None else described(cell, step) for step, cell in cells)
