"""`ckpt diff`: the differences of two checkpoints in 80 columns, tensors as a tree of modules, and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from ckpt.cli.output import checkpoint_or_path, echo, echo_error, echo_json
from ckpt.cli.show import Module
from ckpt.errors import CkptError
from ckpt.shown import shown

if TYPE_CHECKING:
    from ckpt.tools.diff import Difference


@click.command()
@click.argument("first", shell_complete=checkpoint_or_path)
@click.argument("second", shell_complete=checkpoint_or_path)
@click.option("--part", help="Only this part: model, optimizer, ...")
@click.option("--format", help="Where a folder holds saves in several formats, which to compare: deepspeed, hf, ...")
@click.option("--depth", type=click.IntRange(0), default=2, show_default=True, help="Of the tree of modules.")
@click.option("--tensors", is_flag=True, help="List every tensor that differs, by its full name.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for other programs.")
def diff(
    first: str, second: str, part: str | None, format: str | None, depth: int, tensors: bool, as_json: bool
) -> None:
    """Say which tensors and values differ between FIRST and SECOND.

    Each is a checkpoint of ckpt or whatever else 'ckpt merge' reads, at a path or URL. Modules are shown as a tree;
    those of a row that are numbered and differ alike are one line. `at most by` is the largest difference of an
    element, `relative` the RMS of the difference over the RMS of what FIRST has. Exits with status 0 if they are the
    same, 1 if they differ, 2 if they cannot be compared.

    \b
    ckpt diff runs/a/step-00000500 runs/b/step-00000500
    ckpt diff runs/a/step-00000500 s3://bucket/model --part model --tensors
    """
    from ckpt.tools.diff import diff

    try:
        found = diff(first, second, part=part, format=format)
    except CkptError as error:
        echo_error(error)
        raise click.exceptions.Exit(2) from None
    if as_json:
        echo_json(found.to_json())
    elif not found:
        echo("There is no difference.")
    else:
        echo(f"first   {first}")
        echo(f"second  {second}")
        for line in difference_lines(found.differences, None if tensors else depth):
            echo(line)
    if found:
        raise click.exceptions.Exit(1)


WIDTH = 80
_SHORTEST_NAME = 24  # columns, however wide the others are
_CHANGED = ("tensors", "elements", "at most by", "relative")
_OTHER_SHAPE, _FIRST_ONLY, _SECOND_ONLY = "another shape", "only in the first", "only in the second"


@dataclass(frozen=True)
class _Leaf:
    """A tensor that differs. Numbered modules are folded where these are equal: one with a NaN stands alone."""

    first: str
    second: str
    is_finite: bool
    found: Difference = field(repr=False)


class _Row:
    """A line of a table: a name, numbers as text, and a note."""

    def __init__(self, name: str, *numbers: str, note: str = "") -> None:
        self.name, self.numbers, self.note = shown(name), numbers, shown(note)


_Line = Callable[[str, Sequence[_Leaf]], _Row]


def difference_lines(found: Sequence[Difference], depth: int | None) -> Iterator[str]:
    """The tables. `depth`: of modules, those that are numbered and equal folded; None lists every tensor."""
    tensors = [difference for difference in found if difference.is_tensor]
    for title in ("", _OTHER_SHAPE, _FIRST_ONLY, _SECOND_ONLY):
        leaves = {leaf.name: _leaf(leaf) for leaf in tensors if _title(leaf) == title}
        if leaves:
            line: _Line = _outline_row if title else _change_row
            flat = [line(name, [leaf]) for name, leaf in leaves.items()] if depth is None else None
            rows = flat or list(_rows([Module.of(leaves)], (depth or 0) + 1, 0, line))
            yield ""
            yield from _table((title, "tensors") if title else ("tensors that differ", *_CHANGED), rows)
    values = [difference for difference in found if not difference.is_tensor]
    if values:
        yield ""
        yield from _values(values)


def _leaf(found: Difference) -> _Leaf:
    return _Leaf(found.first, found.second, found.most is None or math.isfinite(found.most), found)


def _title(difference: Difference) -> str:
    """The table that a tensor is in; empty for those whose elements were compared."""
    from ckpt.tools.diff import ABSENT

    if difference.elements is not None:
        return ""
    lacking = {difference.first: _SECOND_ONLY, difference.second: _FIRST_ONLY}
    return lacking.get(ABSENT, _OTHER_SHAPE)


def _rows(modules: Sequence[Module[_Leaf]], depth: int, level: int, line: _Line) -> Iterator[_Row]:
    """The rows of modules that are equal, in one."""
    indent, first = "  " * level, modules[0]
    for name in first.tensors:
        yield line(f"{indent}{name}", [module.tensors[name] for module in modules])
    for label, names in first.folded():
        inside = [module.modules[name] for module in modules for name in names]
        count = f"  ({len(names)} alike)" if len(names) > 1 else ""
        yield line(f"{indent}{label}{count}", [leaf for module in inside for leaf in module.all_tensors])
        if level + 1 < depth:
            yield from _rows(inside, depth, level + 1, line)


def _change_row(name: str, leaves: Sequence[_Leaf]) -> _Row:
    """Of several tensors: the largest difference of all, and the relative one of all together."""
    from ckpt.tools.diff import Squares

    found = [leaf.found for leaf in leaves]
    most = [one.most for one in found if one.most is not None]
    known = [one.squares for one in found if one.squares is not None]
    relative = sum(known, Squares()).relative if len(known) == len(found) else math.nan
    elements = sum(one.elements or 0 for one in found)
    largest = math.nan if any(map(math.isnan, most)) else max(most)
    return _Row(name, str(len(found)), f"{elements:,}", f"{largest:.3g}", _percent(relative))


def _percent(relative: float) -> str:
    return f"{100 * relative:.3g} %" if math.isfinite(relative) else "from 0" if relative > 0 else "nan"


def _outline_row(name: str, leaves: Sequence[_Leaf]) -> _Row:
    """With dtype and shape, if all have the same."""
    from ckpt.tools.diff import ABSENT

    sides = {(leaf.first, leaf.second) for leaf in leaves}
    first, second = sides.pop()
    note = second if first == ABSENT else first if second == ABSENT else f"{first} -> {second}"
    return _Row(name, str(len(leaves)), note="" if sides else note)


def _table(columns: Sequence[str], rows: Sequence[_Row]) -> Iterator[str]:
    """Names, right-aligned numbers, and notes. What has no room in its line is in one of its own."""
    lines = [_Row(*columns), *rows]
    widths = [max(map(len, column)) for column in zip(*(line.numbers for line in lines), strict=True)]
    others = sum(widths) + 2 * len(widths)
    room = min(max(_SHORTEST_NAME, WIDTH - others), max(len(line.name) for line in lines))
    for line in lines:
        name, numbers = line.name, [number.rjust(width) for number, width in zip(line.numbers, widths, strict=True)]
        if len(name) > room:
            yield _short(name)
            name = ""
        fits = not line.note or room + others + 2 + len(line.note) <= WIDTH
        yield "  ".join([name.ljust(room), *numbers, *([line.note] if fits else [])]).rstrip()
        if not fits:
            yield _short(f"{' ' * (len(line.name) - len(line.name.lstrip()) + 4)}{line.note}")


def _values(found: Sequence[Difference]) -> Iterator[str]:
    """Each on a line, or, where one of them is too long for that, on two."""
    lines = [("values that differ", "first", "second"), *((one.name, one.first, one.second) for one in found)]
    lines = [(shown(name), shown(first), shown(second)) for name, first, second in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if sum(widths) + 4 <= WIDTH:
        yield from (f"{line[0]:<{widths[0]}}  {line[1]:<{widths[1]}}  {line[2]}".rstrip() for line in lines)
        return
    for number, (name, first, second) in enumerate(lines):
        yield _short(name)
        if number:
            together = f"    {first} -> {second}"
            yield from [together] if len(together) <= WIDTH else [_short(f"    {first}"), _short(f"    -> {second}")]


def _short(text: str) -> str:
    """A text of at most 80 columns: of a longer one, its middle is left out."""
    half = (WIDTH - 3) // 2
    return text if len(text) <= WIDTH else f"{text[:half]}...{text[-half:]}"
