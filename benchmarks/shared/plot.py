"""Charts of figures, as SVG, drawn as those of the report and of model cards: bars, and lines over steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt.util.svg_plot import (
    PLAIN,
    Scale,
    document,
    horizontal_grid,
    linear_scale,
    log_scale,
    polyline,
    rectangle,
    text,
)

_LABELS, _BARS, _LINE = 330, 420, 20  # widths of labels and of the longest bar, height of a line
_LEFT, _WIDTH, _HEIGHT = 70, 760, 260  # of the field that lines are drawn in
_EVERY = [factor * 10**power for power in range(9) for factor in (1, 2, 5)]  # steps from one number to the next
_OURS, *_OTHERS = PLAIN.lines[1], PLAIN.lines[0], *PLAIN.lines[2:], PLAIN.ink
_BAR = "#8d99ae"  # of whatever is not ours


def bars(title: str, groups: Mapping[str, Mapping[str, float]], unit: str = "s") -> str:
    """For each group a chart with its name above, one below the other."""
    body = [text(10, 22, title, font_size=15)]
    top = 40
    for group, values in groups.items():
        body.append(text(10, top + 15, group, font_weight="bold"))
        body += _chart(values, top + _LINE + 4, unit)
        top += _LINE * (len(values) + 1) + 20
    return document(body, _LABELS + _BARS + 110, top, title=title)


def _chart(values: Mapping[str, float], top: int, unit: str) -> Iterator[str]:
    length = linear_scale(0, max([*values.values(), 1e-9]), 0, _BARS)
    for number, (label, value) in enumerate(values.items()):
        line, width = top + number * _LINE, max(1.0, length(max(value, 0.0)))
        yield text(_LABELS - 8, line + 14, label, text_anchor="end")
        yield rectangle(_LABELS, line + 2, width, _LINE - 5, fill=_OURS if label.startswith("ckpt") else _BAR)
        yield text(_LABELS + width + 6, line + 14, f"{value:.3g} {unit}")


@dataclass(frozen=True)
class Line:
    """Seconds of the steps around a save, which belongs to step 0."""

    label: str
    start: int  # the number of the first step
    values: Sequence[float]
    written: int | None = None  # the step in which the save was complete


def steps(title: str, lines: Sequence[Line], usual: float) -> str:
    """All lines on one logarithmic scale; below it the same lines up to twice a usual step, on a linear one."""
    body = [text(10, 22, title, font_size=15)]
    colours = _colours([line.label for line in lines])
    top = 34
    for line in lines:
        body += _legend(line, colours[line.label], top)
        top += _LINE
    across = linear_scale(*_numbers(lines), _LEFT, _LEFT + _WIDTH)
    for heading, low, high, logarithmic in (
        ("Time per step, logarithmic scale", *_powers(lines, usual), True),
        (f"The same, from 0 to twice a step without saves ({2 * usual:.3g} s)", 0.0, 2 * usual, False),
    ):
        body.append(text(10, top + 24, heading, font_weight="bold"))
        up = (log_scale if logarithmic else linear_scale)(low, high, top + 34 + _HEIGHT, top + 34)
        body += _field(lines, colours, across, up, _ticks(low, high, logarithmic), top + 34)
        top += _HEIGHT + 84
    return document(body, _LEFT + _WIDTH + 40, top, title=title)


def _colours(labels: Sequence[str]) -> dict[str, str]:
    others = itertools.cycle(_OTHERS)
    return {label: _OURS if label.startswith("ckpt") else next(others) for label in labels}


def _legend(line: Line, colour: str, top: int) -> Iterator[str]:
    yield polyline([(_LEFT, top + 10), (_LEFT + 30, top + 10)], stroke=colour, stroke_width=2)
    square = "" if line.written is None else f"; written in step {line.written} (square)"
    yield text(_LEFT + 38, top + 14, f"{line.label}: longest step {max(line.values):.3g} s{square}")


def _numbers(lines: Sequence[Line]) -> tuple[float, float]:
    return min(line.start for line in lines), max(line.start + len(line.values) - 1 for line in lines)


def _powers(lines: Sequence[Line], usual: float) -> tuple[float, float]:
    """Powers of ten around all values."""
    values = [usual, *(value for line in lines for value in line.values)]
    low, high = math.floor(math.log10(max(min(values), 1e-6))), math.ceil(math.log10(max(values)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def _ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    if not logarithmic:
        return [low + (high - low) * quarter / 4 for quarter in range(5)]
    first, last = round(math.log10(low)), round(math.log10(high))
    return [factor * 10.0**power for power in range(first, last) for factor in (1, 2, 5)] + [high]


def _field(
    lines: Sequence[Line],
    colours: Mapping[str, str],
    across: Scale,
    up: Scale,
    ticks: Sequence[float],
    top: float,
) -> Iterator[str]:
    bottom, right = top + _HEIGHT, _LEFT + _WIDTH
    yield from horizontal_grid(ticks, up, _LEFT, right, PLAIN, lambda value: f"{value:.3g} s")
    yield from _numbered(lines, across, top, bottom)
    clip = f"field-{top:.0f}"
    yield f'<clipPath id="{clip}">{rectangle(_LEFT, top, _WIDTH, _HEIGHT)}</clipPath>'
    for line in reversed(lines):
        points = [(across(line.start + index), up(value)) for index, value in enumerate(line.values)]
        shared = {"clip_path": f"url(#{clip})"}
        yield polyline(points, fill="none", stroke=colours[line.label], stroke_width=1.5, **shared)
        if line.written is not None:
            x, y = points[line.written - line.start]
            yield rectangle(x - 4, y - 4, 8, 8, fill=colours[line.label], **shared)


def _numbered(lines: Sequence[Line], across: Scale, top: float, bottom: float) -> Iterator[str]:
    first, last = map(int, _numbers(lines))
    every = next(number for number in _EVERY if last - first <= 15 * number)
    for number in range(-(-first // every) * every, last + 1, every):
        yield text(across(number), bottom + 16, f"{number}", text_anchor="middle")
    yield polyline([(across(0), top), (across(0), bottom)], stroke=PLAIN.muted, stroke_dasharray="4 3")
    below = "step, counted from the save: step 0 begins with it"
    yield text(_LEFT + _WIDTH / 2, bottom + 32, below, text_anchor="middle")
