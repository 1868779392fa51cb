"""The saves of a run as bars, one after the other: how long training waited, and how large they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from ckpt.tools.report.facts import Save
from ckpt.tools.report.lineage import Attempt
from ckpt.util.console import format_size
from ckpt.util.svg_plot import (
    THEMED,
    Scale,
    document,
    horizontal_grid,
    linear_scale,
    polyline,
    rectangle,
    round_ticks,
    text,
)

MOST = 400  # saves that are drawn, the newest
_LEFT, _RIGHT, _TOP = 84, 16, 22
_WIDEST, _FULL = 60.0, 860.0  # of a save; of all together
_LANE, _GAP = 110, 44
_PALE = 0.4  # opacity of what was removed


def timeline(attempts: Sequence[Attempt]) -> str:
    """Two lanes over the same saves, oldest on the left; a dashed line where a restart begins."""
    saves = [save for attempt in attempts for save in attempt.saves][-MOST:]
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
