"""How much each module changed, as a map: a row for each module, a column for each pair of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ckpt.tools.report.changes import Cell, Changes, Step
from ckpt.util.svg_plot import THEMED, document, path, rectangle, text

SHADES = 8  # of one colour, in the style sheet: --heat-0 is the palest
_LOWEST = 1e-8
_TOP, _RIGHT, _LETTER = 12, 12, 6.7
_WIDTH = 920.0  # if the cells are not too narrow then
_LONGEST_LABEL = 42  # characters


class Shades:
    """The scale of all cells: the logarithm of the change, in steps of equal length."""

    def __init__(self, changes: Changes) -> None:
        found = [max(value, _LOWEST) for value in changes.relatives] or [0.01]
        self.low, self.high = math.log10(min(found)), math.log10(max(found))

    def of(self, relative: float) -> int:
        span = self.high - self.low
        place = (math.log10(max(relative, _LOWEST)) - self.low) / span if span else 1.0
        return min(SHADES - 1, max(0, int(place * SHADES)))

    @property
    def ends(self) -> tuple[float, float]:
        return 10.0**self.low, 10.0**self.high


def heat_map(changes: Changes) -> str:
    """The map. Cells that cannot be compared are hatched; those without any change have only a frame."""
    shades = Shades(changes)
    labels = [_short(module) for module in changes.modules]
    left = max(90.0, 16 + _LETTER * max(map(len, labels)))
    width = min(64.0, max(20.0, (_WIDTH - left) / len(changes.steps)))
    height = 20.0 if len(labels) <= 50 else 15.0
    bottom = _TOP + height * len(labels)
    body = [_hatching()]
    for row, (module, label) in enumerate(zip(changes.modules, labels, strict=True)):
        y = _TOP + row * height
        body.append(text(left - 8, y + height / 2 + 4, label, text_anchor="end"))
        for column, step in enumerate(changes.steps):
            place = left + column * width + 1, y + 1, width - 2, height - 2
            body.append(_cell(place, module, step, shades))
    body += _columns(changes, left, width, bottom)
    right = left + width * len(changes.steps)
    return document(body, max(right, left + 180) + _RIGHT, bottom + 40, THEMED, "change of each module")


def _cell(place: tuple[float, float, float, float], module: str, step: Step, shades: Shades) -> str:
    cell = step.cells.get(module, Cell())
    title = f"{module}, {step.older.name} to {step.newer.name}: {described(cell, step)}"
    relative = cell.relative
    if relative is None:
        return rectangle(*place, title, fill="url(#hatched)", stroke=THEMED.grid)
    if math.isnan(relative):
        x, y, width, height = place
        cross = f"M{x + width / 2 - 5:.1f} {y + height / 2 - 5:.1f}l10 10m0 -10l-10 10"
        return path(cross, title, stroke=THEMED.bad, stroke_width=2.5)
    if relative == 0:
        return rectangle(*place, title, fill=THEMED.background, stroke=THEMED.grid)
    shade = SHADES - 1 if math.isinf(relative) else shades.of(relative)
    return rectangle(*place, title, fill=f"var(--heat-{shade})")


def described(cell: Cell, step: Step) -> str:
    """What a cell says, in words."""
    relative = cell.relative
    if relative is None:
        return "not compared" if step.problem else "no tensor of it is in both"
    some = "" if cell.compared == cell.tensors else f", in {cell.compared} of {cell.tensors} tensors: others are in one"
    if math.isnan(relative):
        return f"not finite{some}"
    return f"{percent(relative)}{some}"


def percent(relative: float) -> str:
    """A relative change as text."""
    if math.isinf(relative):
        return "changed from zero"
    return "no change" if relative == 0 else f"{100 * relative:.3g} %"


def _columns(changes: Changes, left: float, width: float, y: float) -> Iterator[str]:
    """The steps of the later checkpoints, below as many columns as there is room for."""
    widest = max(len(f"{step.newer.step:,}") for step in changes.steps) * 7 + 10
    every = max(1, math.ceil(widest / width))
    for column in range(0, len(changes.steps), every):
        x = left + (column + 0.5) * width
        label = f"{changes.steps[column].newer.step:,}"
        yield text(x, y + 16, label, text_anchor="middle", fill=THEMED.muted)
    yield text(left - 8, y + 16, "up to step", text_anchor="end", fill=THEMED.muted)


def _hatching() -> str:
    line = path("M0 6L6 0", stroke=THEMED.muted, stroke_width=0.8)
    return f'<defs><pattern id="hatched" width="6" height="6" patternUnits="userSpaceOnUse">{line}</pattern></defs>'


def _short(module: str) -> str:
    return module if len(module) <= _LONGEST_LABEL else f"...{module[3 - _LONGEST_LABEL :]}"
