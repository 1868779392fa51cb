"""Bar charts of figures, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt.util.svg_plot import document, linear_scale, rectangle, text

_LABELS, _BARS, _LINE = 330, 420, 20  # widths of labels and of the longest bar, height of a line


def bars(title: str, groups: Mapping[str, Mapping[str, float]], unit: str = "s") -> str:
    """For each group a chart with its name above, one below the other."""
    body = ['<rect width="100%" height="100%" fill="white"/>', text(10, 22, title, font_size=15)]
    top = 40
    for group, values in groups.items():
        body.append(text(10, top + 15, group, font_weight="bold"))
        body += _chart(values, top + _LINE + 4, unit)
        top += _LINE * (len(values) + 1) + 20
    return document(body, _LABELS + _BARS + 110, top, font_family="sans-serif", font_size=12)


def _chart(values: Mapping[str, float], top: int, unit: str) -> Iterator[str]:
    length = linear_scale(0, max([*values.values(), 1e-9]), 0, _BARS)
    for number, (label, value) in enumerate(values.items()):
        line, width = top + number * _LINE, max(1.0, length(max(value, 0.0)))
        yield text(_LABELS - 8, line + 14, label, text_anchor="end")
        yield rectangle(_LABELS, line + 2, width, _LINE - 5, fill=_colour(label))
        yield text(_LABELS + width + 6, line + 14, f"{value:.3g} {unit}")


def _colour(label: str) -> str:
    return "#d1495b" if label.startswith("ckpt") else "#8d99ae"
