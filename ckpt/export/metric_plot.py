"""The plot of a model card: one panel with a line for each metric, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ckpt.util.svg_plot import document, linear_scale, polyline, text

Points = Sequence[tuple[int, float]]

_WIDTH, _HEIGHT = 480, 120  # of one panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 24, 22
_FONT = {"font_family": "sans-serif", "font_size": 11, "fill": "#666"}


def draw(curves: Mapping[str, Points]) -> str | None:
    """One panel for each metric that has two finite points or more; none if there is no such metric."""
    finite = {name: [point for point in points if math.isfinite(point[1])] for name, points in curves.items()}
    metrics = [(name, points) for name, points in finite.items() if len(points) > 1]
    if not metrics:
        return None
    panels = [_panel(name, points, index * _HEIGHT) for index, (name, points) in enumerate(metrics)]
    return document(panels, _WIDTH, _HEIGHT * len(panels))


def _panel(name: str, points: Points, top: int) -> str:
    steps, values = [step for step, _ in points], [value for _, value in points]
    across = linear_scale(min(steps), max(steps), _LEFT, _WIDTH - _RIGHT)
    up = linear_scale(min(values), max(values), top + _HEIGHT - _BOTTOM, top + _TOP)
    line = [(across(step), up(value)) for step, value in points]
    bottom = float(top + _HEIGHT - 6)
    return "\n".join(
        (
            text(_LEFT, top + 14, name, **_FONT, font_weight="bold"),
            polyline(line, fill="none", stroke="#2a78d6", stroke_width=1.5),
            _label(_LEFT - 6.0, up(max(values)) + 4, f"{max(values):.4g}", "end"),
            _label(_LEFT - 6.0, up(min(values)) + 4, f"{min(values):.4g}", "end"),
            _label(float(_LEFT), bottom, f"step {min(steps)}", "start"),
            _label(float(_WIDTH - _RIGHT), bottom, f"step {max(steps)}", "end"),
        )
    )


def _label(x: float, y: float, content: str, anchor: str) -> str:
    return text(x, y, content, text_anchor=anchor, **_FONT)
