"""Plots as plain SVG text: elements, a document around them, linear scales. No plotting library is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from ckpt.shown import shown


def document(elements: Iterable[str], width: float, height: float, **attributes: object) -> str:
    """A complete SVG file. Attributes of the root element, such as the font, apply to everything in it."""
    root = _attributes({"xmlns": "http://www.w3.org/2000/svg", **attributes, "width": width, "height": height})
    return "\n".join([f"<svg{root}>", *elements, "</svg>", ""])


def text(x: float, y: float, content: str, **attributes: object) -> str:
    """Text that begins at a position, or ends there with `text_anchor="end"`."""
    return f"<text{_attributes({'x': x, 'y': y, **attributes})}>{escape(shown(content))}</text>"


def rectangle(x: float, y: float, width: float, height: float, **attributes: object) -> str:
    return f"<rect{_attributes({'x': x, 'y': y, 'width': width, 'height': height, **attributes})}/>"


def polyline(points: Iterable[tuple[float, float]], **attributes: object) -> str:
    """An open line through all points."""
    listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f"<polyline{_attributes({'points': listed, **attributes})}/>"


def linear_scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    """Maps values between `low` and `high` to coordinates; where both are equal, to the middle."""
    span = high - low

    def coordinate(value: float) -> float:
        return start + ((value - low) / span if span else 0.5) * (stop - start)

    return coordinate


def _attributes(values: dict[str, object]) -> str:
    """As they are written in a tag; the names have hyphens where Python's have underscores."""
    return "".join(f' {name.replace("_", "-")}="{_value(value)}"' for name, value in values.items())


def _value(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))
