"""`ckpt diff`: the differences of two checkpoints, tensors as a tree of modules, and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from ckpt.cli.output import checkpoint_or_path, echo, echo_error, echo_json, with_trust
from ckpt.cli.show import Module
from ckpt.errors import CkptError
from ckpt.util.console import format_table

if TYPE_CHECKING:
    from ckpt.tools.diff import Difference


@click.command()
@click.argument("first", shell_complete=checkpoint_or_path)
@click.argument("second", shell_complete=checkpoint_or_path)
@click.option("--part", help="Only this part: model, optimizer, ...")
@click.option("--format", help="If a folder holds saves in several formats, the one to compare: deepspeed, hf, ...")
@click.option("--depth", type=click.IntRange(0), default=2, show_default=True, help="Depth of the tree of modules.")
@click.option("--tensors", is_flag=True, help="List every tensor that differs, by its full name.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for other programs.")
@with_trust
def diff(
    first: str,
    second: str,
    part: str | None,
    format: str | None,
    depth: int,
    tensors: bool,
    as_json: bool,
    **trust: Any,
) -> None:
    """Compare FIRST and SECOND: which tensors and values differ.

    Each is a checkpoint of ckpt or whatever else 'ckpt merge' reads, at a path or URL. It shows modules as a tree;
    numbered modules that differ in the same way share one line. `at most by` is the largest difference of an
    element, `relative` the RMS of the difference over the RMS of what FIRST has. Exits with status 0 if they are the
    same, 1 if they differ, 2 if they cannot be compared.

    \b
    ckpt diff runs/a/step-00000500 runs/b/step-00000500
    ckpt diff runs/a/step-00000500 s3://bucket/model --part model --tensors
    """
    from ckpt.tools.diff import diff

    try:
        found = diff(first, second, part=part, format=format, **trust)
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


_CHANGED = ("tensors", "elements", "at most by", "relative")
_OTHER_SHAPE, _FIRST_ONLY, _SECOND_ONLY = "another shape", "only in the first", "only in the second"


@dataclass(frozen=True)
class _Leaf:
    """A tensor that differs. Numbered modules are folded where these are equal: one with a NaN stands alone."""

    first: str
    second: str
    is_finite: bool
    found: Difference = field(repr=False)


_Row = tuple[str, ...]
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
            columns = (title, "tensors", "dtype and shape") if title else ("tensors that differ", *_CHANGED)
            yield ""
            yield from format_table(columns, rows, _CHANGED)
    values = [(one.name, one.first, one.second) for one in found if not one.is_tensor]
    if values:
        yield ""
        yield from format_table(("values that differ", "first", "second"), values)


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
    return name, str(len(found)), f"{elements:,}", f"{largest:.3g}", _percent(relative)


def _percent(relative: float) -> str:
    return f"{100 * relative:.3g} %" if math.isfinite(relative) else "from 0" if relative > 0 else "nan"


def _outline_row(name: str, leaves: Sequence[_Leaf]) -> _Row:
    """With dtype and shape, if all have the same."""
    from ckpt.tools.diff import ABSENT

    sides = {(leaf.first, leaf.second) for leaf in leaves}
    first, second = sides.pop()
    note = second if first == ABSENT else first if second == ABSENT else f"{first} -> {second}"
    return name, str(len(leaves)), "" if sides else note
