"""The plot of a model card: one panel below the other, each with the curve of a metric, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ckpt.util.line_chart import HEIGHT, WIDTH, Points, line_panel
from ckpt.util.svg_plot import PLAIN, document


def draw(curves: Mapping[str, Points]) -> str | None:
    """One panel for each metric that has two finite points or more; none if there is no such metric."""
    metrics = [(name, points) for name, points in curves.items() if _finite(points) > 1]
    if not metrics:
        return None
    panels = [line for index, metric in enumerate(metrics) for line in line_panel(*metric, PLAIN, top=index * HEIGHT)]
    return document(panels, WIDTH, HEIGHT * len(metrics), title="metrics by step")


def _finite(points: Points) -> int:
    return sum(math.isfinite(value) for _, value in points)
