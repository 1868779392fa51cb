"""`ckpt report`: a Markdown page about a run."""

from __future__ import annotations

from pathlib import Path

import click

from ckpt.cli.output import echo
from ckpt.errors import StorageError
from ckpt.tools.report import report as render


@click.command()
@click.argument("root")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write it to a file.")
def report(root: str, output: Path | None) -> None:
    """Write a page about the run below ROOT, in Markdown.

    Its checkpoints, its metrics by step, and how long training waited for saves.
    """
    text = render(root)
    if output is None:
        click.echo(text, nl=False)
    else:
        _write(output, text)
        echo(str(output))


def _write(output: Path, text: str) -> None:
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{output} cannot be written: {error.strerror}.") from error
