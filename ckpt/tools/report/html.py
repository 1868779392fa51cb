"""The report as one HTML page: no script, nothing from the network, pictures inside as SVG, light and dark, print too.

Whatever comes from files passes through `text`: a name can never be markup or script.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from typing import TYPE_CHECKING

from ckpt.root.verify import COMPLETE
from ckpt.shown import shown
from ckpt.tools.report.attempts import (
    MOST_ATTEMPTS,
    MOST_SAVES,
    Attempt,
    attempts,
    lineage,
    restarts,
    timeline,
    title_of,
    went_back,
)
from ckpt.tools.report.facts import Best, RunFacts, Save, best_of, memory_spent, waits
from ckpt.util.console import format_duration, format_number, format_size, utc_now
from ckpt.util.svg_plot import HEIGHT, THEMED, Mark, document, line_panel
from ckpt.version import __version__

_LIGHT = """
--page:#f5f6f8;--surface:#ffffff;--ink:#1b2230;--muted:#5a6473;--grid:#e2e6eb;
--line:#2a5fae;--second:#b4490f;--third:#79b39c;--bad:#b3261e;--good:#1d7047;
--heat-0:#e3ecf8;--heat-1:#c9dbf1;--heat-2:#aac6e8;--heat-3:#87addd;
--heat-4:#6491cd;--heat-5:#4374b7;--heat-6:#2a589a;--heat-7:#153a70;
"""
_DARK = """
--page:#11141a;--surface:#191e26;--ink:#e5e8ed;--muted:#9ca6b4;--grid:#2d3540;
--line:#79a8ee;--second:#ef9a5b;--third:#3d8069;--bad:#ff9089;--good:#72cc9b;
--heat-0:#1f2d44;--heat-1:#27405f;--heat-2:#31547e;--heat-3:#3e6a9f;
--heat-4:#5283c0;--heat-5:#6f9fda;--heat-6:#94bdef;--heat-7:#c6defd;
"""

STYLE = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
@media print{{:root{{color-scheme:light;{_LIGHT}--page:#ffffff}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
-webkit-text-size-adjust:100%}}
main{{max-width:66rem;margin:0 auto;padding:1.5rem 1rem 3rem}}
h1{{font-size:1.5rem;line-height:1.25;margin:0;overflow-wrap:anywhere}}
h2{{font-size:1.1rem;margin:0 0 .25rem}}
h3{{font-size:.95rem;margin:1.1rem 0 .25rem}}
p{{margin:.25rem 0 .75rem}}
.muted{{color:var(--muted)}}
.where{{color:var(--muted);overflow-wrap:anywhere;margin:.2rem 0 1.25rem}}
section{{background:var(--surface);border:1px solid var(--grid);border-radius:10px;padding:1rem 1.1rem;margin:1rem 0}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.6rem,1fr));gap:.75rem}}
.tile{{margin:0;background:var(--surface);border:1px solid var(--grid);border-radius:10px;padding:.7rem .9rem}}
.tile dt{{color:var(--muted);font-size:.82rem}}
.tile dd{{margin:0;font-size:1.3rem;font-weight:600;line-height:1.3;font-variant-numeric:tabular-nums}}
.tile dd.note{{font-size:.82rem;font-weight:400;color:var(--muted)}}
.box{{overflow-x:auto;max-width:100%}}
.box.tall{{max-height:34rem;overflow-y:auto}}
.box>svg{{display:block}}
.panels{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,19rem),1fr));gap:.75rem}}
.panels svg{{display:block;width:100%;height:auto;max-width:34rem}}
table{{border-collapse:collapse;width:100%;font-size:.88rem}}
th,td{{padding:.38rem .7rem .38rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid)}}
th{{color:var(--muted);font-weight:600;vertical-align:bottom;background:var(--surface);position:sticky;top:0}}
td{{white-space:nowrap;font-variant-numeric:tabular-nums}}
td.long{{white-space:normal;min-width:14rem;overflow-wrap:anywhere}}
.right{{text-align:right}}
.gone td{{color:var(--muted)}}
.good{{color:var(--good);font-weight:600}}
.bad{{color:var(--bad);font-weight:600}}
.best{{color:var(--second);font-weight:600;white-space:nowrap}}
ol,ul{{margin:.4rem 0;padding-left:1.3rem}}
li{{margin:.3rem 0;overflow-wrap:anywhere}}
.legend{{display:flex;flex-wrap:wrap;gap:.35rem 1.1rem;margin:.6rem 0 .8rem;padding:0;list-style:none;
color:var(--muted);font-size:.85rem}}
.legend li{{margin:0;display:flex;align-items:center;gap:.4rem}}
.key{{display:inline-block;width:.85rem;height:.85rem;border-radius:2px;flex:none}}
.ramp{{display:inline-flex;border-radius:2px;overflow:hidden}}
.ramp .key{{border-radius:0;width:1.1rem}}
footer{{color:var(--muted);font-size:.85rem;margin-top:1.5rem}}
@media (max-width:34rem){{main{{padding:1rem .6rem 2rem}}section{{padding:.8rem .7rem}}
.tiles{{grid-template-columns:repeat(2,minmax(0,1fr))}}}}
@media print{{body{{font-size:10pt}}main{{max-width:none;padding:0}}section{{border:none;padding:0;margin:1.2rem 0}}
.box,.box.tall{{overflow:visible;max-height:none}}.box>svg{{max-width:100%;height:auto}}th{{position:static}}
h2,h3,svg,tr,.tile{{break-inside:avoid}}h2,h3{{break-after:avoid}}table{{font-size:7.5pt}}
.tiles{{grid-template-columns:repeat(6,minmax(0,1fr))}}.tile{{padding:.4rem .5rem}}
*{{-webkit-print-color-adjust:exact;print-color-adjust:exact}}}}
"""


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


if TYPE_CHECKING:
    from ckpt.tools.report.changes import Changes

_WHAT = (
    "From each checkpoint to the next, for each module: RMS of the difference over RMS of what was before. All cells "
    "are on one logarithmic scale."
)


def changes_section(changes: Changes | None) -> str:
    """Empty without changes; a sentence in place of the picture where there is nothing to compare."""
    if changes is None:
        return ""
    if not changes.modules:
        picture = "<p>There are no two checkpoints with a model that could be compared.</p>"
    else:
        from ckpt.tools.report.changes import heat_map

        picture = f'<p class="muted">{text(_WHAT)}</p>{box(heat_map(changes))}{_scale(changes)}'
    return section("Change of each module", picture, *_notes(changes))


def _notes(changes: Changes) -> list[str]:
    """What the picture has no colour or no room for."""
    from ckpt.tools.report.changes import not_compared

    items = "".join(
        f"<li>{text(step.older.name)} to {text(step.newer.name)}: {text(why)}</li>"
        for step, why in not_compared(changes)
    )
    notes = [f"<h3>Not compared</h3><ul>{items}</ul>"] if items else []
    if changes.left_out:
        notes.append(f'<p class="muted">{changes.left_out:,} checkpoints between these were left out.</p>')
    if changes.hidden:
        notes.append(f'<p class="muted">{changes.hidden:,} more modules have no row.</p>')
    return notes


def _scale(changes: Changes) -> str:
    from ckpt.tools.report.changes import SHADES, Shades, percent

    low, high = map(percent, Shades(changes).ends)
    ramp = "".join(f'<span class="key" style="background:var(--heat-{shade})"></span>' for shade in range(SHADES))
    frame = '<span class="key" style="border:1px solid var(--grid)"></span>no change'
    stripes = "repeating-linear-gradient(135deg,var(--surface) 0 3px,var(--muted) 3px 4px)"
    hatched = f'<span class="key" style="background:{stripes}"></span>in one of the two only, or not compared'
    cross = '<span class="bad">&times;</span>not finite'
    entries = (f'{text(low)} <span class="ramp">{ramp}</span> {text(high)}', frame, hatched, cross)
    return f'<ul class="legend">{"".join(f"<li>{entry}</li>" for entry in entries)}</ul>'


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
