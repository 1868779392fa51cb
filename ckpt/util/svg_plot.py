"""Plots as plain SVG text: elements, colours, scales, and a panel with a curve. No plotting library is needed.

The report, model cards and benchmarks are drawn with this. A file of its own has `PLAIN` colours on a white background,
because it is read on dark pages too; what is part of a page has those of the page's style sheet (`THEMED`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ckpt.shown import shown

Scale = Callable[[float], float]
FONT = {"font_family": "system-ui, sans-serif", "font_size": 12}


@dataclass(frozen=True)
class Colours:
    """The colours of a plot. `lines`: of curves and bars, the first of what matters most."""

    background: str
    ink: str
    muted: str
    grid: str
    bad: str
    lines: tuple[str, ...]


PLAIN = Colours(
    background="#ffffff",
    ink="#1f2430",
    muted="#5b6472",
    grid="#dfe3e8",
    bad="#b3261e",
    lines=("#2563a8", "#d1495b", "#b07818", "#5b8c5a", "#7d5ba6", "#1f6f8b"),
)
THEMED = Colours(
    background="var(--surface)",
    ink="var(--ink)",
    muted="var(--muted)",
    grid="var(--grid)",
    bad="var(--bad)",
    lines=("var(--line)", "var(--second)", "var(--third)", "var(--fourth)", "var(--fifth)", "var(--sixth)"),
)


def document(
    elements: Iterable[str],
    width: float,
    height: float,
    colours: Colours = PLAIN,
    title: str = "",
    **attributes: object,
) -> str:
    """A complete SVG file with a background. Attributes of the root element apply to everything in it.

    `title`: what a screen reader says.
    """
    size = {"width": width, "height": height, "viewBox": f"0 0 {_number(width)} {_number(height)}"}
    named = {"role": "img", "aria_label": shown(title)} if title else {}
    space = {} if colours is THEMED else {"xmlns": "http://www.w3.org/2000/svg"}  # a page of HTML needs none
    root = _attributes({**space, **FONT, "fill": colours.ink, **attributes, **size, **named})
    background = f'<rect width="100%" height="100%" fill="{colours.background}"/>'
    return "\n".join([f"<svg{root}>", background, *elements, "</svg>", ""])


def text(x: float, y: float, content: str, **attributes: object) -> str:
    """Text that begins at a position, or ends there with `text_anchor="end"`."""
    return f"<text{_attributes({'x': x, 'y': y, **attributes})}>{escape(shown(content))}</text>"


def rectangle(x: float, y: float, width: float, height: float, title: str = "", **attributes: object) -> str:
    """`title`: shown where the pointer rests on it."""
    return _element("rect", title, {"x": x, "y": y, "width": width, "height": height, **attributes})


def circle(x: float, y: float, radius: float, title: str = "", **attributes: object) -> str:
    return _element("circle", title, {"cx": x, "cy": y, "r": radius, **attributes})


def path(commands: str, title: str = "", **attributes: object) -> str:
    return _element("path", title, {"d": commands, "fill": "none", **attributes})


def polyline(points: Iterable[tuple[float, float]], title: str = "", **attributes: object) -> str:
    """An open line through all points."""
    listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return _element("polyline", title, {"points": listed, **attributes})


def stacked_bar(parts: Iterable[tuple[str, float]], colours: Colours, width: float, height: float) -> Iterator[str]:
    """The parts of a whole, side by side, each in its colour."""
    parts = list(parts)
    whole, left = sum(value for _, value in parts) or 1.0, 0.0
    for colour, (label, value) in zip(colours.lines, parts, strict=False):
        part = width * value / whole
        yield rectangle(left, 0, part, height, f"{label}: {value / whole:.1%}", fill=colour)
        left += part


def horizontal_grid(
    ticks: Sequence[float], up: Scale, left: float, right: float, colours: Colours, label: Callable[[float], str]
) -> Iterator[str]:
    """A line for each tick of a vertical scale, and its value on the left."""
    for value in ticks:
        yield polyline([(left, up(value)), (right, up(value))], stroke=colours.grid)
        yield text(left - 8, up(value) + 4, label(value), text_anchor="end", fill=colours.muted)


def linear_scale(low: float, high: float, start: float, stop: float) -> Scale:
    """Maps values between `low` and `high` to coordinates; where both are equal, to the middle."""
    span = high / 2 - low / 2  # halves: the difference of the largest numbers has no place in a float

    def coordinate(value: float) -> float:
        return start + ((value / 2 - low / 2) / span if span else 0.5) * (stop - start)

    return coordinate


def log_scale(low: float, high: float, start: float, stop: float) -> Scale:
    """The same for logarithms. Lower values than `low` are where that is."""
    scale = linear_scale(math.log10(low), math.log10(high), start, stop)
    return lambda value: scale(math.log10(max(value, low)))


def round_ticks(low: float, high: float) -> list[float]:
    """Round numbers from below `low` to above `high`, in steps of 1, 2 or 5 times a power of ten; four or fewer."""
    span = high - low
    if not math.isfinite(span) or span < 0 or 0 < span < 1e-290:
        return [low, high]
    if span == 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / 4))
    for factor in (2, 5, 10, 20):  # the last always fits: it is more than half of the span
        step = factor * power
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first < 4:
            break
    return [number * step for number in range(first, last + 1)]


def _element(name: str, title: str, attributes: dict[str, object]) -> str:
    inside = f"><title>{escape(shown(title))}</title></{name}>" if title else "/>"
    return f"<{name}{_attributes(attributes)}{inside}"


def _attributes(values: dict[str, object]) -> str:
    """As they are written in a tag; the names have hyphens where Python's have underscores."""
    return "".join(f' {name.replace("_", "-")}="{_value(value)}"' for name, value in values.items())


def _value(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


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
    title: str,
    curves: Mapping[str, Points],
    colours: Colours,
    mark: Mark | None = None,
    *,
    top: int = 0,
    width: int = WIDTH,
) -> Iterator[str]:
    """Values by step, a curve for each label, with round numbers on the left.

    Values that are not finite are gaps, marked at the bottom.
    """
    right = width - _RIGHT
    points = [point for curve in curves.values() for point in curve]
    finite = [value for _, value in points if math.isfinite(value)] or [0.0]
    steps = [step for step, _ in points]
    ticks = round_ticks(min(finite), max(finite))
    across = linear_scale(min(steps), max(steps), _LEFT, right)
    bottom = top + HEIGHT - _BOTTOM
    up = linear_scale(min(ticks), max(ticks), bottom, top + _TOP)
    yield text(_LEFT, top + 18, title, font_weight="600")
    if mark is not None:
        yield text(right, top + 18, mark.label, text_anchor="end", fill=colours.muted)
    yield from horizontal_grid(ticks, up, _LEFT, right, colours, lambda value: f"{value:.4g}")
    yield from _steps(steps, right, top + HEIGHT - 8.0, colours)
    for colour, (label, curve) in zip(colours.lines, curves.items(), strict=False):
        stroke = {"stroke": colour, "stroke_width": 2 if len(curve) <= _MANY else 1, "stroke_linejoin": "round"}
        for part in _without_gaps(curve):
            line = [(across(step), up(value)) for step, value in part]
            yield polyline(line, label, fill="none", **stroke)
            if len(curve) <= _MOST_DOTS or len(line) == 1:
                yield from (circle(x, y, 2.5, fill=colour) for x, y in line)
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
