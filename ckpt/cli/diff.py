"""`ckpt diff`: the differences of two checkpoints, tensors of numbered modules in one line, and values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ckpt.cli.output import checkpoint_or_path, echo, echo_error, echo_json, with_trust
from ckpt.cli.show import without_numbers
from ckpt.errors import CkptError
from ckpt.util.console import format_table

if TYPE_CHECKING:
    from ckpt.tools.diff import Difference


@click.command()
@click.argument("first", shell_complete=checkpoint_or_path)
@click.argument("second", shell_complete=checkpoint_or_path)
@click.option("--part", help="Compare only this part: model, optimizer, ...")
@click.option("--format", help="The format to compare, if a folder has saves in several formats: deepspeed, hf, ...")
@click.option("--tensors", is_flag=True, help="List every tensor that differs, by its full name.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs to read.")
@with_trust
def diff(
    first: str,
    second: str,
    part: str | None,
    format: str | None,
    tensors: bool,
    as_json: bool,
    **trust: Any,
) -> None:
    """Compare two checkpoints, FIRST and SECOND, and list the tensors and values that differ.

    FIRST and SECOND are paths or URLs of checkpoints, or of anything else that 'ckpt merge' reads, such as a .pt file.
    If you give a root, diff compares its newest checkpoint. If FIRST and SECOND are both ckpt checkpoints, or both
    torch.save files, diff compares all parts and values; otherwise it compares only the model. Tensors whose names
    differ only in a number share a line. The column `at most by` shows the largest difference in any element;
    `relative` is the RMS of the difference divided by the RMS of FIRST. The command exits with status 0 if the
    checkpoints are the same, 1 if they differ, and 2 if diff can't compare them.

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
        echo(f"first   {found.first}")
        echo(f"second  {found.second}")
        for line in difference_lines(found.differences, fold=not tensors):
            echo(line)
    if found:
        raise click.exceptions.Exit(1)


_CHANGED = ("tensors", "elements", "at most by", "relative")
_OTHER_SHAPE, _FIRST_ONLY, _SECOND_ONLY = "another shape", "only in the first", "only in the second"


def difference_lines(found: Sequence[Difference], *, fold: bool) -> Iterator[str]:
    """The tables. `fold`: tensors of numbered modules share a line, except those with a NaN."""
    tensors = [difference for difference in found if difference.is_tensor]
    for title in ("", _OTHER_SHAPE, _FIRST_ONLY, _SECOND_ONLY):
        alike: dict[tuple[str, str, str], list[Difference]] = {}
        for one in tensors:
            if _title(one) == title:
                name = without_numbers(one.name) if fold and (one.most is None or math.isfinite(one.most)) else one.name
                alike.setdefault((name, one.first, one.second), []).append(one)
        if alike:
            line = _outline_row if title else _change_row
            columns = (title, "tensors", "dtype and shape") if title else ("tensors that differ", *_CHANGED)
            yield ""
            yield from format_table(columns, [line(name, those) for (name, *_), those in alike.items()], _CHANGED)
    values = [(one.name, one.first, one.second) for one in found if not one.is_tensor]
    if values:
        yield ""
        yield from format_table(("values that differ", "first", "second"), values)


def _title(difference: Difference) -> str:
    """The table that a tensor is in; empty for those whose elements were compared."""
    from ckpt.tools.diff import ABSENT

    if difference.elements is not None:
        return ""
    lacking = {difference.first: _SECOND_ONLY, difference.second: _FIRST_ONLY}
    return lacking.get(ABSENT, _OTHER_SHAPE)


def _change_row(name: str, found: Sequence[Difference]) -> tuple[str, ...]:
    """Of several tensors: the largest difference of all, and the relative one of all together."""
    from ckpt.tools.diff import Squares, percent

    most = [one.most for one in found if one.most is not None]
    known = [one.squares for one in found if one.squares is not None]
    relative = sum(known, Squares()).relative if len(known) == len(found) else math.nan
    elements = sum(one.elements or 0 for one in found)
    largest = math.nan if any(map(math.isnan, most)) else max(most)
    return name, str(len(found)), f"{elements:,}", f"{largest:.3g}", percent(relative)


def _outline_row(name: str, found: Sequence[Difference]) -> tuple[str, ...]:
    from ckpt.tools.diff import ABSENT

    first, second = found[0].first, found[0].second
    note = second if first == ABSENT else first if second == ABSENT else f"{first} -> {second}"
    return name, str(len(found)), note
