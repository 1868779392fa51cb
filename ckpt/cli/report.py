"""`ckpt report`: a page about a run, as HTML or Markdown."""

from __future__ import annotations

from pathlib import Path

import click

from ckpt.cli.output import checkpoint_or_path, echo
from ckpt.errors import ConfigError, StorageError
from ckpt.tools.report.facts import gather
from ckpt.tools.report.page import page

HTML, MARKDOWN = "html", "md"
_HTML_SUFFIXES = (".html", ".htm")


def _modes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found = {name: mode for name, _, mode in (value.rpartition("=") for value in values)}
    if wrong := [value for value in values if value.rpartition("=")[2] not in ("min", "max") or "=" not in value[1:]]:
        raise click.BadParameter(f"{wrong[0]!r} is not METRIC=min or METRIC=max.", ctx, param)
    return found


@click.command()
@click.argument("root", shell_complete=checkpoint_or_path)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write. By default, the page goes to standard output.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice([HTML, MARKDOWN]),
    help="The format of the page, if the file's suffix doesn't show it.",
)
@click.option(
    "--best", "modes", multiple=True, callback=_modes, metavar="METRIC=min|max",
    help="Whether low or high values of a metric are best, if its name doesn't show it. You can repeat this option.",
)  # fmt: skip
def report(root: str, output: Path | None, kind: str | None, modes: dict[str, str]) -> None:
    """Write a page about the run in ROOT: HTML if the file ends with .html, otherwise Markdown.

    The page shows metrics by step, how long training waited for saves, the size and state of the checkpoints, and which
    checkpoints each restart skipped. The command reads only manifests and file sizes.

    The HTML page is a single file without scripts, and loads no other files.

    \b
    ckpt report runs/mrpc -o report.html
    ckpt report runs/mrpc --best reward=max > report.md
    """
    kind = kind or (HTML if output is not None and output.suffix.lower() in _HTML_SUFFIXES else MARKDOWN)
    facts = gather(root)
    if unknown := modes.keys() - facts.curves.keys():
        known = ", ".join(facts.curves) or "none"
        raise ConfigError(f"no checkpoint has a metric {', '.join(sorted(unknown))}. They have: {known}.")
    text = page(facts, modes, as_html=kind == HTML)
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
