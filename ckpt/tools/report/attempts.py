"""A run as its attempts, each begun by a load: which checkpoint continued from which, as lanes over steps. And saves
as bars, one after the other: how long training waited, and how large they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ckpt.tools.report.facts import Save
from ckpt.util.console import format_size
from ckpt.util.svg_plot import (
    THEMED,
    Scale,
    circle,
    document,
    horizontal_grid,
    linear_scale,
    path,
    polyline,
    rectangle,
    round_ticks,
    text,
)


@dataclass(frozen=True)
class Load:
    """What an attempt began with, and the newer checkpoints that it passed over, with the reasons.

    `is_recorded`: the manifest says so. Otherwise it was concluded from the checkpoint's parent alone.
    """

    name: str
    step: int
    found_in: str = "root"
    passed_over: Mapping[str, str] = field(default_factory=dict)
    more: int = 0  # that were passed over, and are not named
    is_recorded: bool = True
    id: str = ""

    @property
    def reasons(self) -> list[str]:
        """What was passed over and why, each as a sentence that begins with the name."""
        return [why if why.startswith(name) else f"{name}: {why}" for name, why in self.passed_over.items()]


@dataclass
class Attempt:
    """Saves of one process after the other, from a load to the next. Without a load it began afresh."""

    load: Load | None
    saves: list[Save]

    @property
    def is_fallback(self) -> bool:
        return self.load is not None and bool(self.load.passed_over)


def attempts(saves: Sequence[Save]) -> list[Attempt]:
    """The attempts of all runs in a root, oldest first. One that saved nothing has left no trace."""
    by_id = {save.summary.id: save for save in saves}
    found: list[Attempt] = []
    for before, save in pairwise([None, *saves]):
        assert save is not None
        load = _load(before, save, by_id)
        if before is None or load is not None or before.summary.run != save.summary.run:
            found.append(Attempt(load, []))
        found[-1].saves.append(save)
    return found


def _load(before: Save | None, save: Save, by_id: Mapping[str, Save]) -> Load | None:
    if save.resumed:
        said = save.resumed
        skipped, more = said["passed_over"], said.get("more", 0)
        return Load(said["name"], said["step"], said["found_in"], skipped, more, id=said["id"])
    parent = by_id.get(save.summary.parent or "")
    if before is None or parent is None or parent is before or parent.summary.sequence > before.summary.sequence:
        return None
    return Load(parent.name, parent.step, is_recorded=False, id=parent.summary.id)


def passed_over(found: Sequence[Attempt]) -> set[str]:
    """The ids of checkpoints that a later attempt could not use: of a name, the last one that was saved before it."""
    skipped: set[str] = set()
    latest: dict[str, str] = {}
    for attempt in found:
        names = attempt.load.passed_over if attempt.load is not None else ()
        skipped |= {latest[name] for name in names if name in latest}
        latest |= {save.name: save.summary.id for save in attempt.saves}
    return skipped


def restarts(found: Sequence[Attempt]) -> list[Attempt]:
    """The attempts that continued from a checkpoint."""
    return [attempt for attempt in found if attempt.load is not None]


def went_back(saves: Sequence[Save]) -> list[tuple[Save, Save]]:
    """Pairs of present saves in which the later has the lower step: the steps between were trained twice."""
    here = [save for save in saves if save.is_here]
    return [(before, save) for before, save in pairwise(here) if save.step < before.step]


MOST_ATTEMPTS = 30  # attempts that are drawn, the newest
_LEFT, _RIGHT, _TOP = 96, 36, 22
_ATTEMPT = 44
_WIDTH = 900
_FEW = 150  # dots of a lane; of more, only the first and the last


def lineage(attempts: Sequence[Attempt]) -> str:
    """One lane below the other; a curve leads from the checkpoint that was loaded to the lane that it began."""
    shown = attempts[-MOST_ATTEMPTS:]
    saves = [save for attempt in shown for save in attempt.saves]
    steps = [save.step for save in saves] + [attempt.load.step for attempt in shown if attempt.load]
    ticks = [tick for tick in round_ticks(min(steps), max(steps), 7) if tick == int(tick)]
    across = linear_scale(min(ticks), max(ticks), _LEFT, _WIDTH - _RIGHT)
    skipped = passed_over(attempts)
    bottom = _TOP + _ATTEMPT * len(shown)
    body = list(_axis(ticks, across, bottom))
    places: dict[str, tuple[float, float]] = {}
    for number, attempt in enumerate(shown):
        y = _TOP + _ATTEMPT * number + _ATTEMPT / 2
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


MOST_SAVES = 400  # saves that are drawn, the newest
_WIDEST, _FULL = 60.0, 860.0  # of a save; of all together
_LANE, _GAP = 110, 44
_PALE = 0.4  # opacity of what was removed


def timeline(attempts: Sequence[Attempt]) -> str:
    """Two lanes over the same saves, oldest on the left; a dashed line where a restart begins."""
    saves = [save for attempt in attempts for save in attempt.saves][-MOST_SAVES:]
    begins = {id(attempt.saves[0]) for attempt in attempts[1:]}
    slot = min(_WIDEST, _FULL / len(saves))
    right = _LEFT + max(slot * len(saves), 260.0)
    sizes = _Lane("size", [float(save.summary.size) for save in saves], format_size, _TOP + _LANE + _GAP)
    waits = _Lane("training waited", [save.waited or 0.0 for save in saves], _seconds, _TOP)
    body = [*waits.frame(right), *sizes.frame(right)]
    for index, save in enumerate(saves):
        x, title = _LEFT + index * slot, _title(save)
        pale = {} if save.is_here else {"opacity": str(_PALE)}
        width = slot * 0.72
        if id(save) in begins:
            body.append(_restart(x - slot * 0.14, sizes.bottom))
        if save.waited is not None:
            body.append(waits.bar(x, width, 0.0, save.waited, title, fill=THEMED.lines[0], **pale))
        shared = float(save.shared or 0)
        is_sound = save.is_sound or not save.is_here
        own, same = (THEMED.lines[0], THEMED.lines[2]) if is_sound else (THEMED.bad, THEMED.bad)
        body.append(sizes.bar(x, width, shared, float(save.summary.size), title, fill=own, **pale))
        if shared:
            body.append(sizes.bar(x, width, 0.0, shared, title, fill=same, **pale))
    body += _labels(saves, slot, sizes.bottom + 18)
    return document(body, right + _RIGHT, sizes.bottom + 30, THEMED, "training waited and size of every save")


class _Lane:
    """Bars on one scale, from zero."""

    def __init__(self, title: str, values: Sequence[float], label: Callable[[float], str], top: float) -> None:
        self.title, self.top, self.bottom, self._label = title, top, top + _LANE, label
        self.ticks = round_ticks(0.0, max(*values, 1e-9, 0.0), 4)
        self._up: Scale = linear_scale(0.0, max(self.ticks), self.bottom, top)

    def frame(self, right: float) -> Iterator[str]:
        yield text(_LEFT, self.top - 9, self.title, font_weight="600")
        yield from horizontal_grid(self.ticks, self._up, _LEFT, right, THEMED, self._label)

    def bar(self, x: float, width: float, low: float, high: float, title: str, **attributes: object) -> str:
        top = self._up(high)
        height = max(self._up(low) - top, 1.0 if high > low else 0.0)
        return rectangle(x, min(top, self.bottom - height), width, height, title, **attributes)


def _restart(x: float, bottom: float) -> str:
    return polyline([(x, _TOP - 4), (x, bottom)], stroke=THEMED.lines[1], stroke_width=1.5, stroke_dasharray="4 3")


def _labels(saves: Sequence[Save], slot: float, y: float) -> Iterator[str]:
    """Steps below as many bars as there is room for."""
    widest = max(len(f"{save.step:,}") for save in saves) * 7 + 14
    every = max(1, math.ceil(widest / slot))
    yield text(8, y, "step", fill=THEMED.muted)
    for index in range(0, len(saves), every):
        middle = _LEFT + index * slot + slot * 0.36
        yield text(middle, y, f"{saves[index].step:,}", text_anchor="middle", fill=THEMED.muted)


def _title(save: Save) -> str:
    waited = "not known how long training waited" if save.waited is None else f"training waited {_seconds(save.waited)}"
    shared = f", {format_size(save.shared)} of it shared" if save.shared else ""
    state = "" if save.is_sound else f", {save.state}"
    return f"{save.name}: {waited}, {format_size(save.summary.size)}{shared}{state}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s"
