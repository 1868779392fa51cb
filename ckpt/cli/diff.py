"""The command that compares two checkpoints: `ckpt diff`."""

from __future__ import annotations

import json

import click

from ckpt.errors import CkptError
from ckpt.util.console import aligned, one_line


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--part", help="Only this part: model, optimizer, ...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for other programs.")
def diff(first: str, second: str, part: str | None, as_json: bool) -> None:
    """Say which tensors and values FIRST and SECOND have differently.

    Each is a checkpoint of ckpt or whatever else 'ckpt merge' reads, at a path or URL. Exits with status 0 if they are
    the same, 1 if they differ, 2 if that cannot be said.
    """
    from ckpt.tools.diff import diff

    try:
        found = diff(first, second, part=part)
    except CkptError as error:
        click.echo(f"ckpt: {one_line(str(error))}", err=True)
        raise click.exceptions.Exit(2) from None
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=1, allow_nan=False))
    elif not found:
        click.echo("There is no difference.")
    else:
        rows = [(one.name, one.first, one.second, *_apart(one.elements, one.most)) for one in found.differences]
        for line in aligned(("", first, second, "elements", "at most by"), rows, ("elements",)):
            click.echo(line)
    if found:
        raise click.exceptions.Exit(1)


def _apart(elements: int | None, most: float | None) -> tuple[str, str]:
    return ("", "") if elements is None or most is None else (f"{elements:,}", f"{most:.3g}")
