"""A small picture of how metrics went, as plain SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Points = Sequence[tuple[int, float]]

_WIDTH, _HEIGHT = 480, 120  # of one panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 24, 22
_TEXT = 'font-family="sans-serif" font-size="11" fill="#666"'


def draw(curves: Mapping[str, Points]) -> str | None:
    """One panel for each metric that has two points or more; none if there is no such metric."""
    finite = {name: [point for point in points if math.isfinite(point[1])] for name, points in curves.items()}
    panels = [(name, points) for name, points in finite.items() if len(points) > 1]
    if not panels:
        return None
    inside = "\n".join(_panel(name, points, index * _HEIGHT) for index, (name, points) in enumerate(panels))
    size = f'width="{_WIDTH}" height="{_HEIGHT * len(panels)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{inside}\n</svg>\n'


def _panel(name: str, points: Points, top: int) -> str:
    steps, values = [step for step, _ in points], [value for _, value in points]
    across = _scale(min(steps), max(steps), _LEFT, _WIDTH - _RIGHT)
    up = _scale(min(values), max(values), top + _HEIGHT - _BOTTOM, top + _TOP)
    line = " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in points)
    bottom = top + _HEIGHT - 6
    return "\n".join(
        (
            f'<text x="{_LEFT}" y="{top + 14}" {_TEXT} font-weight="bold">{escape(name)}</text>',
            f'<polyline points="{line}" fill="none" stroke="#2a78d6" stroke-width="1.5"/>',
            _label(_LEFT - 6, up(max(values)) + 4, f"{max(values):.4g}", "end"),
            _label(_LEFT - 6, up(min(values)) + 4, f"{min(values):.4g}", "end"),
            _label(_LEFT, bottom, f"step {min(steps)}", "start"),
            _label(_WIDTH - _RIGHT, bottom, f"step {max(steps)}", "end"),
        )
    )


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {_TEXT}>{text}</text>'


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    """From a range of values to a range of places; all values alike are in the middle."""
    span = high - low

    def place(value: float) -> float:
        return start + ((value - low) / span if span else 0.5) * (stop - start)

    return place
