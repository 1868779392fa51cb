"""Attempts as lanes over steps: where each began, which checkpoints it saved, and which ones it had to pass over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpt.tools.report.facts import Save
from ckpt.tools.report.lineage import Attempt, passed_over
from ckpt.util.svg_plot import THEMED, Scale, circle, document, linear_scale, path, polyline, round_ticks, text

MOST = 30  # attempts that are drawn, the newest
_LEFT, _RIGHT, _TOP, _LANE = 96, 36, 20, 44
_WIDTH = 900
_FEW = 150  # dots of a lane; of more, only the first and the last


def lineage(attempts: Sequence[Attempt]) -> str:
    """One lane below the other; a curve leads from the checkpoint that was loaded to the lane that it began."""
    shown = attempts[-MOST:]
    saves = [save for attempt in shown for save in attempt.saves]
    steps = [save.step for save in saves] + [attempt.load.step for attempt in shown if attempt.load]
    ticks = [tick for tick in round_ticks(min(steps), max(steps), 7) if tick == int(tick)]
    across = linear_scale(min(ticks), max(ticks), _LEFT, _WIDTH - _RIGHT)
    skipped = passed_over(attempts)
    bottom = _TOP + _LANE * len(shown)
    body = list(_axis(ticks, across, bottom))
    places: dict[str, tuple[float, float]] = {}
    for number, attempt in enumerate(shown):
        y = _TOP + _LANE * number + _LANE / 2
        body += _lane(attempt, len(attempts) - len(shown) + number, y, across, places)
        body += _dots(attempt.saves, y, across, skipped)
        places |= {save.summary.id: (across(save.step), y) for save in attempt.saves}
    return document(body, _WIDTH, bottom + 30, THEMED, "attempts of the run, over steps")


def _axis(ticks: Sequence[float], across: Scale, bottom: float) -> Iterator[str]:
    for tick in ticks:
        yield polyline([(across(tick), _TOP), (across(tick), bottom)], stroke=THEMED.grid)
        yield text(across(tick), bottom + 18, f"{tick:,.0f}", text_anchor="middle", fill=THEMED.muted)
    yield text(_LEFT - 20, bottom + 18, "step", text_anchor="end", fill=THEMED.muted)


def _lane(
    attempt: Attempt, number: int, y: float, across: Scale, places: Mapping[str, tuple[float, float]]
) -> Iterator[str]:
    yield text(8, y + 4, title_of(attempt, number), font_weight="600")
    first, last = across(attempt.saves[0].step), across(max(save.step for save in attempt.saves))
    begin = across(attempt.load.step) if attempt.load else first
    yield polyline([(min(begin, first), y), (last, y)], stroke=THEMED.lines[0], stroke_width=3, stroke_opacity="0.45")
    if attempt.load is not None and attempt.load.id in places:
        x, above = places[attempt.load.id]
        bend = (y - above) / 2
        curve = f"M{x:.1f} {above:.1f}C{x:.1f} {above + bend:.1f} {begin:.1f} {y - bend:.1f} {begin:.1f} {y:.1f}"
        yield path(curve, stroke=THEMED.lines[1], stroke_width=2, stroke_dasharray="4 3")


def title_of(attempt: Attempt, number: int) -> str:
    """What an attempt is called; `number` is how many there were before it."""
    if attempt.load is None:
        return "began anew" if number else "began"
    return f"restart {number}" if number else "continued"


def _dots(saves: Sequence[Save], y: float, across: Scale, skipped: set[str]) -> Iterator[str]:
    for save in saves if len(saves) <= _FEW else (saves[0], saves[-1]):
        x = across(save.step)
        if save.summary.id in skipped or (save.is_here and not save.is_sound):
            why = "passed over by a later attempt" if save.summary.id in skipped else save.state
            cross = f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"
            yield path(cross, f"{save.name}: {why}", stroke=THEMED.bad, stroke_width=2.5)
        elif save.is_here:
            yield circle(x, y, 5, f"{save.name}: {save.state}", fill=THEMED.lines[0])
        else:
            ring = {"fill": THEMED.background, "stroke": THEMED.lines[0], "stroke_width": 2}
            yield circle(x, y, 4, f"{save.name}: removed", **ring)
