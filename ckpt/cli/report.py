"""The command that writes a page about a run: `ckpt report`."""

from __future__ import annotations

from pathlib import Path

import click

from ckpt.tools.report import report as written


@click.command()
@click.argument("root")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write it to a file.")
def report(root: str, output: Path | None) -> None:
    """Write a page about the run below ROOT, in Markdown.

    Its checkpoints, how its metrics went, and how long training waited for saves.
    """
    text = written(root)
    if output is None:
        click.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
        click.echo(str(output))
