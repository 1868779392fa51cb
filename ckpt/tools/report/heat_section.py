"""The section of the page that tells how much each module changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.tools.report.html_parts import box, section, text

if TYPE_CHECKING:
    from ckpt.tools.report.changes import Changes

_WHAT = (
    "From each checkpoint to the next, for each module: RMS of the difference over RMS of what was before. All cells "
    "are on one logarithmic scale."
)


def changes_section(changes: Changes | None) -> str:
    """Empty without changes; a sentence in place of the picture where there is nothing to compare."""
    if changes is None:
        return ""
    if not changes.modules:
        picture = "<p>There are no two checkpoints with a model that could be compared.</p>"
    else:
        from ckpt.tools.report.heat_map import heat_map

        picture = f'<p class="muted">{text(_WHAT)}</p>{box(heat_map(changes))}{_scale(changes)}'
    return section("Change of each module", picture, *_notes(changes))


def _notes(changes: Changes) -> list[str]:
    """What the picture has no colour or no room for."""
    from ckpt.tools.report.changes import not_compared

    items = "".join(
        f"<li>{text(step.older.name)} to {text(step.newer.name)}: {text(why)}</li>"
        for step, why in not_compared(changes)
    )
    notes = [f"<h3>Not compared</h3><ul>{items}</ul>"] if items else []
    if changes.left_out:
        notes.append(f'<p class="muted">{changes.left_out:,} checkpoints between these were left out.</p>')
    if changes.hidden:
        notes.append(f'<p class="muted">{changes.hidden:,} more modules have no row.</p>')
    return notes


def _scale(changes: Changes) -> str:
    from ckpt.tools.report.heat_map import SHADES, Shades, percent

    low, high = map(percent, Shades(changes).ends)
    ramp = "".join(f'<span class="key" style="background:var(--heat-{shade})"></span>' for shade in range(SHADES))
    frame = '<span class="key" style="border:1px solid var(--grid)"></span>no change'
    stripes = "repeating-linear-gradient(135deg,var(--surface) 0 3px,var(--muted) 3px 4px)"
    hatched = f'<span class="key" style="background:{stripes}"></span>in one of the two only, or not compared'
    cross = '<span class="bad">&times;</span>not finite'
    entries = (f'{text(low)} <span class="ramp">{ramp}</span> {text(high)}', frame, hatched, cross)
    return f'<ul class="legend">{"".join(f"<li>{entry}</li>" for entry in entries)}</ul>'
