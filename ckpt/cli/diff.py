"""`ckpt diff`: compare two checkpoints."""

from __future__ import annotations

import click

from ckpt.cli.completion import checkpoint_or_path
from ckpt.cli.output import echo, echo_error, echo_json
from ckpt.errors import CkptError


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
    from ckpt.cli.diff_table import difference_lines
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
