"""The report as one HTML page: no script, nothing from the network, pictures inside as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from ckpt.root.condition import COMPLETE
from ckpt.tools.report.best import Best, best_of
from ckpt.tools.report.facts import RunFacts, Save, memory_spent, waits
from ckpt.tools.report.heat_section import changes_section
from ckpt.tools.report.html_parts import (
    UNKNOWN,
    Cell,
    box,
    cell,
    data,
    legend,
    metric,
    moment,
    number,
    seconds,
    section,
    size,
    table,
    text,
    tile,
)
from ckpt.tools.report.lineage import Attempt, attempts, restarts, went_back
from ckpt.tools.report.lineage_chart import MOST as MOST_ATTEMPTS
from ckpt.tools.report.lineage_chart import lineage, title_of
from ckpt.tools.report.style import STYLE
from ckpt.tools.report.timeline_chart import MOST as MOST_SAVES
from ckpt.tools.report.timeline_chart import timeline
from ckpt.util.clock import utc_now
from ckpt.util.console import format_duration, format_number, format_size
from ckpt.util.line_chart import HEIGHT, Mark, line_panel
from ckpt.util.svg_plot import THEMED, document
from ckpt.version import __version__

if TYPE_CHECKING:
    from ckpt.tools.report.changes import Changes

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MOST_METRIC_COLUMNS = 6
_PANEL = 380  # of a metric: as wide as a phone, so that its letters are not shrunk there
_COLUMNS = ("name", "state", "step", "saved (UTC)", "size", "shared", "training waited", "durable after")


def render_html(facts: RunFacts, changes: Changes | None = None, modes: Mapping[str, str] | None = None) -> str:
    """The page. `changes`: as `measure_changes` returns them, or none. `modes`: "min" or "max" by metric."""
    facts = facts.with_damage(changes.damage if changes is not None else {})
    found = attempts(facts.saves)
    best = {name: best_of(name, points, modes or {}) for name, points in facts.curves.items()}
    title = facts.url.rstrip("/").rpartition("/")[2] or facts.url
    body = [
        f"<h1>{text(title)}</h1>",
        f'<p class="where">{text(facts.url)}</p>',
        f'<div class="tiles">{"".join(_tiles(facts, found, changes))}</div>',
        _metrics(facts, best),
        _saves(facts, found),
        _lineage(found),
        _health(facts, changes),
        changes_section(changes),
        _checkpoints(facts, best),
        _about(facts),
    ]
    return _page(title, body)


def _page(title: str, body: Sequence[str]) -> str:
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{text(title)}: report of a run</title>",
            f"<style>{STYLE}</style></head><body><main>",
            *filter(None, body),
            f"<footer>Made by ckpt {text(__version__)}, {text(utc_now())}</footer>",
            "</main></body></html>",
            "",
        ]
    )


def _tiles(facts: RunFacts, found: Sequence[Attempt], changes: Changes | None) -> Iterator[str]:
    here, newest = facts.present, facts.saves[-1]
    gone = f"{len(facts.removed):,} more were removed" if facts.removed else "none was removed"
    yield tile("checkpoints", data(len(here), f"{len(here):,}"), text(gone))
    first, last = (datetime.fromisoformat(save.summary.created) for save in (facts.saves[0], newest))
    span = format_duration((last - first).total_seconds())
    yield tile("newest step", data(newest.step, f"{newest.step:,}"), text(f"{span} after the first save"))
    total = sum(save.summary.size for save in here)
    shared = sum(save.shared or 0 for save in here)
    stored = f"{format_size(total - shared)} without what is shared" if shared else "nothing is shared"
    yield tile("size", data(total, format_size(total)), text(stored))
    waited, _ = waits(facts.saves)
    if waited:
        unknown = len(facts.saves) - len(waited)
        less = f"; not known of {unknown:,}" if unknown else ""
        yield tile("training waited", f"{sum(waited):.2f} s", text(f"at most {max(waited):.2f} s for one save{less}"))
    again = restarts(found)
    fallbacks = sum(attempt.is_fallback for attempt in again)
    said = f"{fallbacks} passed over a checkpoint" if fallbacks else "none passed a checkpoint over"
    yield tile("restarts", data(len(again), f"{len(again)}"), text(said if again else ""))
    wrong = len(facts.problems)
    yield tile(
        "health", f"{wrong:,} with problems" if wrong else COMPLETE, text(_how_read(changes)), "bad" if wrong else ""
    )


def _metrics(facts: RunFacts, best: Mapping[str, Best | None]) -> str:
    panels = [_panel(name, points, best[name]) for name, points in facts.curves.items()]
    if not panels:
        return ""
    said = "Of every checkpoint that was saved, also of those that were removed since."
    if any(best.values()):
        said += " The ring marks the best value."
    return section("Metrics", f'<p class="muted">{said}</p>', f'<div class="panels">{"".join(panels)}</div>')


def _panel(name: str, points: Sequence[tuple[int, float]], best: Best | None) -> str:
    mark = Mark(best.step, best.value, f"best (the {best.how}): {format_number(best.value)}") if best else None
    drawn = line_panel(name, points, THEMED, mark, width=_PANEL)
    return document(drawn, _PANEL, HEIGHT, THEMED, f"{name} by step")


def _saves(facts: RunFacts, found: Sequence[Attempt]) -> str:
    entries = [("var(--line)", "bytes of its own"), ("var(--third)", "shared: the same files as the checkpoint before")]
    if facts.removed:
        entries.append(("color-mix(in srgb,var(--line) 40%,var(--surface))", "removed since"))
    if any(not save.is_sound for save in facts.present):
        entries.append(("var(--bad)", "damaged"))
    if len(found) > 1:
        entries.append(("var(--second)", "a restart (dashed)"))
    more = len(facts.saves) - MOST_SAVES
    cut = f'<p class="muted">The newest {MOST_SAVES} saves; {more:,} older ones are left out.</p>' if more > 0 else ""
    return section("Saves", cut, box(timeline(found)), legend(entries))


def _lineage(found: Sequence[Attempt]) -> str:
    items = "".join(f"<li>{said_of(attempt, number)}</li>" for number, attempt in enumerate(found) if number)
    if not items and found[0].load is None:
        return section("Restarts", "<p>None that saved something.</p>")
    first = f"<p>{said_of(found[0], 0)}</p>"
    more = len(found) - MOST_ATTEMPTS
    cut = f'<p class="muted">The picture has the newest {MOST_ATTEMPTS} of {len(found)}.</p>' if more > 0 else ""
    entries = [
        ("var(--line)", "a checkpoint (a ring: removed since)"),
        ("var(--bad)", "passed over or damaged (a cross)"),
        ("var(--second)", "continued from (dashed)"),
    ]
    note = '<p class="muted">A restart that saved nothing has left no trace here.</p>'
    return section("Restarts", cut, box(lineage(found)), legend(entries), first, f"<ol>{items}</ol>", note)


def said_of(attempt: Attempt, number: int) -> str:
    """An attempt in a sentence, as HTML."""
    saves, load = attempt.saves, attempt.load
    saved = f"saved {text(saves[0].name)}" + (f" to {text(saves[-1].name)}" if len(saves) > 1 else "")
    if load is None:
        return f"{text(title_of(attempt, number).capitalize())}: {saved}."
    where = "" if load.found_in == "root" else f", found in the {text(load.found_in)}"
    how = "" if load.is_recorded else " (as its parent says; why is not recorded)"
    skipped = "".join(f'<br><span class="bad">Passed over:</span> {text(why)}' for why in load.reasons)
    more = f"<br>and {load.more:,} more" if load.more else ""
    return f"Continued from <b>{text(load.name)}</b> (step {load.step:,}{where}){how}, {saved}.{skipped}{more}"


def _how_read(changes: Changes | None) -> str:
    return "by the sizes of files" + (", and by the models that were read" if changes is not None else "")


def _health(facts: RunFacts, changes: Changes | None) -> str:
    problems = [("", (cell(name), cell(state, "bad"), cell(why, "long"))) for name, state, why in facts.problems]
    count = f"{len(facts.present):,}"
    fine = f"<p>Complete: nothing is wrong with any of the {count} checkpoints, {_how_read(changes)}.</p>"
    found = table(("checkpoint", "state", "problem"), problems) if problems else fine
    remarks = [f"<li>{text(remark)}</li>" for remark in _remarks(facts)]
    return section(
        "Health",
        found,
        f"<ul>{''.join(remarks)}</ul>" if remarks else "",
        '<p class="muted"><code>ckpt verify</code> reads every byte.</p>',
    )


def _remarks(facts: RunFacts) -> Iterator[str]:
    for save in facts.saves:
        if save.cured:
            yield f"{save.name}: {save.cured}, thanks to snapshots in memory."
    memory = memory_spent(facts.saves)
    if memory.taken or memory.skipped:
        yield f"{memory}."
    for name, points in facts.curves.items():
        odd = [f"{step:,}" for step, value in points if not math.isfinite(value)]
        if odd:
            few = ", ".join(odd[:8]) + (f" and {len(odd) - 8} more" if len(odd) > 8 else "")
            yield f"{name} is not finite at step {few}."
    for before, save in went_back(facts.saves):
        yield f"{save.name} came after {before.name}: the steps between were trained twice."
    if facts.forgotten:
        yield f"{facts.forgotten:,} older saves are not known any more."


def _checkpoints(facts: RunFacts, best: Mapping[str, Best | None]) -> str:
    names = list(facts.curves)
    split = names if len(names) <= _MOST_METRIC_COLUMNS else []
    columns = [*_COLUMNS, *(split or (["metrics"] if names else [])), "ranks"]
    rows = [_row(save, split, bool(names), best) for save in reversed(facts.saves)]
    blank = [Cell(UNKNOWN, "right")] * (len(columns) - 2)
    rows += [("", [cell(one.name), cell(one.state, "bad"), *blank]) for one in facts.unread]
    right = {*_COLUMNS, *split, "ranks"} - {"name", "state", "saved (UTC)"}
    return section("Checkpoints", table(columns, rows, right))


def _row(
    save: Save, split: Sequence[str], has_metrics: bool, best: Mapping[str, Best | None]
) -> tuple[str, Sequence[Cell]]:
    summary = save.summary
    measured = [_measured(save, name, best[name]) for name in split]
    if has_metrics and not split:
        said = ", ".join(f"{name} {format_number(value)}" for name, value in summary.metrics.items())
        measured = [cell(said, "long")]
    state = "bad" if save.is_here and not save.is_sound else ""
    return "" if save.is_here else "gone", [
        cell(save.name),
        cell(save.state, state),
        number(save.step, f"{save.step:,}"),
        moment(summary.created),
        size(summary.size),
        size(save.shared),
        seconds(save.waited),
        seconds(save.durable),
        *measured,
        number(summary.world_size, str(summary.world_size)),
    ]


def _measured(save: Save, name: str, best: Best | None) -> Cell:
    value = save.summary.metrics.get(name)
    plain = metric(value)
    is_best = best is not None and value == best.value and save.step == best.step
    return Cell(f'<span class="best">best</span> {plain.html}', plain.kind) if is_best else plain


def _about(facts: RunFacts) -> str:
    newest = facts.newest
    ranks = f"{newest.world_size} ranks" if newest.world_size > 1 else "one process"
    runs = dict.fromkeys(save.summary.run for save in facts.saves)
    rows = {
        "saved by": ", ".join(filter(None, [ranks, f"{newest.layout} layout", newest.hardware])),
        "converted from": newest.origin,
        "versions": ", ".join(f"{name} {version}" for name, version in newest.versions.items()),
        "run" if len(runs) == 1 else "runs": ", ".join(runs),
    }
    listed = [("", (cell(name), cell(value, "long"))) for name, value in rows.items() if value]
    return section("The newest checkpoint", table(("", ""), listed))
