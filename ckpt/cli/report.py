"""`ckpt report`: how a run went, or several side by side, on the terminal, as JSON, or as a page."""

from __future__ import annotations

from pathlib import Path

import click

from ckpt.cli.output import checkpoint_or_path, echo, echo_json
from ckpt.errors import ConfigError, StorageError
from ckpt.tools.report.facts import gather, to_json
from ckpt.tools.report.page import HTML, MARKDOWN, MOST_RUNS, TEXT, page

_HTML_SUFFIXES = (".html", ".htm")


def _modes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found = {name: mode for name, _, mode in (value.rpartition("=") for value in values)}
    if wrong := [value for value in values if value.rpartition("=")[2] not in ("min", "max") or "=" not in value[1:]]:
        raise click.BadParameter(f"{wrong[0]!r} is not METRIC=min or METRIC=max.", ctx, param)
    return found


@click.command()
@click.argument("roots", nargs=-1, required=True, shell_complete=checkpoint_or_path)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write. Without this option, ckpt prints the most important facts.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice([HTML, MARKDOWN]),
    help="The format of the page, if it isn't clear from the file's suffix.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a list of JSON objects for other programs to read.")
@click.option(
    "--best", "modes", multiple=True, callback=_modes, metavar="METRIC=min|max",
    help="Whether low or high values of a metric are best, if its name doesn't make that clear. You can repeat this "
    "option.",
)  # fmt: skip
def report(roots: tuple[str, ...], output: Path | None, kind: str | None, as_json: bool, modes: dict[str, str]) -> None:
    """Print how the run in ROOTS went, or write it to an HTML or Markdown page.

    The report says whether the run is healthy, where its time went, how each attempt ended and what it cost, and which
    checkpoints were skipped. The report also shows the metrics of every step. Give several roots to compare their runs.
    To make the report, ckpt reads only manifests, the root's history, and the sizes of files.

    The HTML page is a single file without scripts, and loads no other files.

    \b
    ckpt report runs/mrpc
    ckpt report runs/mrpc -o report.html
    ckpt report runs/a runs/b -o compared.html
    """
    if len(roots) > MOST_RUNS:
        raise ConfigError(f"a report compares at most {MOST_RUNS} runs, not {len(roots)}.")
    runs = list({run.url: run for run in map(gather, roots)}.values())
    metrics = list(dict.fromkeys(name for run in runs for name in run.curves))
    if unknown := modes.keys() - set(metrics):
        known = ", ".join(metrics) or "none"
        raise ConfigError(f"no checkpoint has a metric {', '.join(sorted(unknown))}. They have: {known}.")
    if as_json:
        echo_json([to_json(run, modes) for run in runs])
        return
    is_html = output is not None and output.suffix.lower() in _HTML_SUFFIXES
    text = page(runs, modes, kind or (HTML if is_html else TEXT if output is None else MARKDOWN))
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
