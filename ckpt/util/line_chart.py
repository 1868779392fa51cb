"""A panel with one curve over steps, as SVG: for metrics in model cards and in the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt.util.svg_plot import (
    Colours,
    circle,
    horizontal_grid,
    linear_scale,
    path,
    polyline,
    round_ticks,
    text,
)

Points = Sequence[tuple[int, float]]
WIDTH, HEIGHT = 480, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 34, 28
_MOST_DOTS, _MANY = 60, 300  # points


@dataclass(frozen=True)
class Mark:
    """A point that stands out, and what it is."""

    step: int
    value: float
    label: str


def line_panel(
    title: str, points: Points, colours: Colours, mark: Mark | None = None, *, top: int = 0, width: int = WIDTH
) -> Iterator[str]:
    """Values by step, with round numbers on the left. Values that are not finite are gaps, marked at the bottom."""
    right = width - _RIGHT
    finite = [value for _, value in points if math.isfinite(value)] or [0.0]
    steps = [step for step, _ in points]
    ticks = round_ticks(min(finite), max(finite), 4)
    across = linear_scale(min(steps), max(steps), _LEFT, right)
    bottom = top + HEIGHT - _BOTTOM
    up = linear_scale(min(ticks), max(ticks), bottom, top + _TOP)
    yield text(_LEFT, top + 18, title, font_weight="600")
    if mark is not None:
        yield text(right, top + 18, mark.label, text_anchor="end", fill=colours.muted)
    yield from horizontal_grid(ticks, up, _LEFT, right, colours, lambda value: f"{value:.4g}")
    yield from _steps(steps, right, top + HEIGHT - 8.0, colours)
    stroke = {"stroke": colours.lines[0], "stroke_width": 2 if len(points) <= _MANY else 1, "stroke_linejoin": "round"}
    for curve in _without_gaps(points):
        line = [(across(step), up(value)) for step, value in curve]
        yield polyline(line, fill="none", **stroke)
        if len(points) <= _MOST_DOTS or len(line) == 1:
            yield from (circle(x, y, 2.5, fill=colours.lines[0]) for x, y in line)
    for step, value in points:
        if not math.isfinite(value):
            x = across(step)
            cross = f"M{x - 4:.1f} {bottom - 4}l8 8m0 -8l-8 8"
            yield path(cross, f"step {step:,}: {value}", stroke=colours.bad, stroke_width=2)
    if mark is not None:
        place = across(mark.step), up(mark.value)
        said = f"step {mark.step:,}: {mark.value:.6g}"
        yield circle(*place, 5.5, said, fill=colours.background, stroke=colours.lines[1], stroke_width=3)


def _steps(steps: Sequence[int], right: float, y: float, colours: Colours) -> Iterator[str]:
    first, last = min(steps), max(steps)
    yield text(_LEFT, y, f"step {first:,}", fill=colours.muted)
    if last > first:
        yield text(right, y, f"step {last:,}", text_anchor="end", fill=colours.muted)


def _without_gaps(points: Points) -> Iterator[list[tuple[int, float]]]:
    """The curve in parts between values that are not finite."""
    part: list[tuple[int, float]] = []
    for step, value in points:
        if math.isfinite(value):
            part.append((step, value))
        elif part:
            yield part
            part = []
    if part:
        yield part
