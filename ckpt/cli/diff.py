"""`ckpt diff`: compare two checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpt.cli.output import echo, echo_error, echo_json
from ckpt.errors import CkptError
from ckpt.util.console import format_table

if TYPE_CHECKING:
    from ckpt.tools.diff import Difference


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--part", help="Only this part: model, optimizer, ...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for other programs.")
def diff(first: str, second: str, part: str | None, as_json: bool) -> None:
    """Say which tensors and values differ between FIRST and SECOND.

    Each is a checkpoint of ckpt or whatever else 'ckpt merge' reads, at a path or URL. Exits with status 0 if they are
    the same, 1 if they differ, 2 if they cannot be compared.
    """
    from ckpt.tools.diff import diff

    try:
        found = diff(first, second, part=part)
    except CkptError as error:
        echo_error(error)
        raise click.exceptions.Exit(2) from None
    if as_json:
        echo_json(found.to_json())
    elif not found:
        echo("There is no difference.")
    else:
        rows = [_row(difference) for difference in found.differences]
        for line in format_table(("", first, second, "elements", "at most by"), rows, ("elements",)):
            echo(line)
    if found:
        raise click.exceptions.Exit(1)


def _row(difference: Difference) -> tuple[str, ...]:
    elements = "" if difference.elements is None else f"{difference.elements:,}"
    most = "" if difference.most is None else f"{difference.most:.3g}"
    return difference.name, difference.first, difference.second, elements, most
