"""The command `ckpt`: what a shell can do without a live model.

Imports no torch, so that it answers at once: whatever needs it is imported by the command that does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import click

from ckpt import catalog, cli_hub
from ckpt.catalog import Checkpoint
from ckpt.console import size
from ckpt.errors import CkptError, MissingError, StorageError
from ckpt.formats.manifest import FILE_NAME, Manifest
from ckpt.storage import Storage, open_storage
from ckpt.version import __version__

_COLUMNS = ("name", "step", "age", "size", "metrics", "world", "intact")
_TO_THE_RIGHT = ("step", "age", "size", "world")
_UNITS = (("d", 172_800, 86_400), ("h", 3600, 3600), ("min", 60, 60), ("s", 0, 1))  # name, from, seconds


class _Commands(click.Group):
    """Commands that answer a `CkptError` with one line and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CkptError as error:
            click.echo(f"ckpt: {_one_line(str(error))}", err=True)
            ctx.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ckpt")
def main() -> None:
    """Checkpoints of training runs: which are there, and are they whole?"""


@main.command()
@click.argument("root")
@click.option("--verify", is_flag=True, help="Read every byte and compare it with its hash.")
def ls(root: str, verify: bool) -> None:
    """List the checkpoints below ROOT, the newest first."""
    show_checkpoints(root, verify=verify)


@main.command()
@click.argument("url")
def verify(url: str) -> None:
    """Read every byte of the checkpoint at URL, or of all below it.

    Exits with status 1 if one is damaged.
    """
    storage, names = catalog.locate(url)
    width = max(len(name) for name in names)
    verdicts = [_show_verdict(storage, name, width) for name in names]
    if not all(verdicts):
        raise click.exceptions.Exit(1)


@main.command()
@click.option("--root", default="runs/demo", show_default=True, help="Where its checkpoints go.")
@click.option("--steps", default=240, hidden=True, type=click.IntRange(min=24), help="Fewer, for tests.")
def demo(root: str, steps: int) -> None:
    """Train, kill it in the middle of a save, resume, and compare.

    A small model learns on the CPU, once straight through and once killed and resumed. Takes half a minute. Exits with
    status 1 if the two do not end bit for bit the same.
    """
    from ckpt.demo import run

    if not run(root, steps):
        raise click.exceptions.Exit(1)


@main.command()
@click.argument("source")
@click.argument("destination")
@click.option("--dtype", help="Cast floating point tensors: bfloat16, float16, float32, ...")
@click.option("--max-shard-size", help="Beyond this, write shards and an index: 5GB, 500MiB, ...")
@click.option("--part", default="model", show_default=True, help="Which part of the checkpoint.")
def merge(source: str, destination: str, dtype: str | None, max_shard_size: str | None, part: str) -> None:
    """Make one safetensors file of the sharded checkpoint at SOURCE.

    SOURCE is a checkpoint of ckpt, a folder of torch.distributed.checkpoint, or what Accelerate saves under FSDP.
    DESTINATION is a file: out/model.safetensors.
    """
    from ckpt.merging import merge

    for url in merge(source, destination, dtype=dtype, max_shard_size=max_shard_size, part=part):
        click.echo(url)


@main.command()
@click.argument("source")
@click.argument("destination")
@click.option(
    "--to", default="ckpt", show_default=True, type=click.Choice(["ckpt", "accelerate"]), help="What to make."
)
@click.option("--name", help="Of the checkpoint; that of the folder, if none is given.")
def convert(source: str, destination: str, to: str, name: str | None) -> None:
    """Make a checkpoint of ckpt out of one of Accelerate, or the other way round.

    SOURCE is a folder that Accelerate's save_state wrote, and DESTINATION a root: runs/mine. With --to accelerate,
    SOURCE is a checkpoint of ckpt, and DESTINATION a new folder that accelerator.load_state will read.
    """
    from ckpt.converting import convert

    click.echo(convert(source, destination, to=to, name=name))


main.add_command(cli_hub.push)
main.add_command(cli_hub.pull)


def show_checkpoints(root: str, *, verify: bool = False) -> None:
    """Print what `ckpt ls` does."""
    storage, found = _checkpoints(root)
    if not found:
        catalog.check_there(storage)
        click.echo(f"There are no checkpoints in {root}.")
        return
    _show_table([_row(storage, one, verify=verify) for one in found])
    click.echo("every byte checked" if verify else "sizes checked; --verify reads every byte")


def _checkpoints(root: str) -> tuple[Storage, list[Checkpoint]]:
    """The checkpoints below a root; if the root is a checkpoint itself, that one."""
    storage = open_storage(root)
    if "://" not in storage.url and not os.path.isdir(storage.url):
        raise MissingError(f"{root} does not exist.")
    found = catalog.scan(storage)
    if not found and any(entry.key == FILE_NAME for entry in storage.list()):
        storage, names = catalog.locate(root)
        found = [catalog.find(storage, name) for name in names]
    return storage, found


def _row(storage: Storage, checkpoint: Checkpoint, *, verify: bool) -> list[str]:
    manifest = checkpoint.manifest
    if manifest is None:
        return [checkpoint.name, *"-----", f"no: {_short_reason(checkpoint)}"]
    wrong = _problems(storage, manifest, verify=verify)
    return [
        checkpoint.name,
        str(manifest.step),
        _age(manifest.created),
        size(manifest.size),
        " ".join(f"{name}={value:.4g}" for name, value in manifest.metrics.items()) or "-",
        str(manifest.world_size),
        f"no: {'; '.join(wrong)}" if wrong else "yes",
    ]


def _problems(storage: Storage, manifest: Manifest, *, verify: bool) -> list[str]:
    try:
        return catalog.problems(storage, manifest, show=True) if verify else catalog.size_problems(storage, manifest)
    except StorageError as error:
        return [_one_line(str(error))]


def _short_reason(checkpoint: Checkpoint) -> str:
    return _without_name(str(checkpoint.problem), checkpoint.name).partition(":")[0]


def _age(created: str) -> str:
    seconds = (datetime.now(timezone.utc) - datetime.fromisoformat(created)).total_seconds()
    seconds = max(0.0, seconds)  # the clock of the machine that wrote it may be ahead
    name, _, unit = next(one for one in _UNITS if seconds >= one[1])
    return f"{seconds // unit:.0f} {name}"


def _show_table(rows: Sequence[Sequence[str]]) -> None:
    if sys.stdout.isatty():
        _show_on_terminal(rows)
    else:
        _show_plain([_COLUMNS, *rows])


def _show_plain(rows: Sequence[Sequence[str]]) -> None:
    """Aligned text, a line a row however long, for grep and awk."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(_COLUMNS, row, widths, strict=True)
        aligned = [cell.rjust(width) if name in _TO_THE_RIGHT else cell.ljust(width) for name, cell, width in cells]
        click.echo("  ".join(aligned).rstrip())


def _show_on_terminal(rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in _COLUMNS:
        table.add_column(
            name,
            justify="right" if name in _TO_THE_RIGHT else "left",
            no_wrap=name not in ("metrics", "intact"),
            overflow="fold",
        )
    for row in rows:
        *cells, intact = map(Text, row)
        intact.stylize("green" if intact.plain == "yes" else "red")
        table.add_row(*cells, intact)
    Console().print(table)


def _show_verdict(storage: Storage, name: str, width: int) -> bool:
    """Verify one checkpoint and print its line. Returns whether there is nothing wrong with it."""
    wrong = catalog.verify_one(storage, name)
    if wrong and not any(True for _ in storage.list(name)):
        click.echo(f"{name:<{width}}  was removed meanwhile")
        return True
    if wrong:
        verdict, about = "DAMAGED", _without_name("; ".join(wrong), name)
    else:
        manifest = catalog.read_manifest(storage, name)
        verdict, about = "intact", size(manifest.size)
    click.echo(f"{name:<{width}}  {click.style(verdict, fg='red' if wrong else 'green')}  {_one_line(about)}")
    return not wrong


def _without_name(text: str, name: str) -> str:
    """A problem without the checkpoint's name in front, which stands beside it already."""
    return text.removeprefix(name).lstrip(" /").rstrip(".")


def _one_line(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines())


if __name__ == "__main__":
    main()
