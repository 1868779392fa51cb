"""The command `ckpt`: what a shell can do without a live model.

Imports no torch, so that it answers at once: whatever needs it is imported by the command that does.
"""

from __future__ import annotations

from typing import Any

import click

from ckpt.cli import diff, hub, ls, prune, report, selftest, show
from ckpt.errors import CkptError
from ckpt.util.console import one_line
from ckpt.version import __version__


class _Commands(click.Group):
    """Commands that answer a `CkptError` with one line and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CkptError as error:
            click.echo(f"ckpt: {one_line(str(error))}", err=True)
            ctx.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ckpt")
def main() -> None:
    """Checkpoints of training runs: which are there, and are they whole?"""


@main.command()
@click.option("--root", default="runs/demo", show_default=True, help="Where its checkpoints go.")
@click.option("--steps", default=240, hidden=True, type=click.IntRange(min=24), help="Fewer, for tests.")
def demo(root: str, steps: int) -> None:
    """Train, kill it in the middle of a save, resume, and compare.

    A small model learns on the CPU, once straight through and once killed and resumed. Takes half a minute. Exits with
    status 1 if the two do not end bit for bit the same.
    """
    from ckpt.cli.demo import run

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
    from ckpt.export.merge import merge

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
    from ckpt.tools.convert import convert

    click.echo(convert(source, destination, to=to, name=name))


for _home in (ls, show, prune, diff, report, hub, selftest):
    for _command in _home.COMMANDS:
        main.add_command(_command)
