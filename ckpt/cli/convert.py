"""`ckpt convert`: between the checkpoints of ckpt and of Accelerate, DeepSpeed, Megatron-Core."""

from __future__ import annotations

import click

from ckpt.cli.output import echo


@click.command()
@click.argument("source")
@click.argument("destination")
@click.option(
    "--to",
    default="ckpt",
    show_default=True,
    type=click.Choice(["ckpt", "accelerate", "megatron"]),
    help="The format to convert to.",
)
@click.option("--name", help="Of the checkpoint; that of the folder, if none is given.")
def convert(source: str, destination: str, to: str, name: str | None) -> None:
    """Convert a checkpoint of another tool to one of ckpt, or the other way round.

    SOURCE is a folder that Accelerate's save_state wrote, or DeepSpeed's save_checkpoint, or Megatron-Core as
    torch_dist, and DESTINATION a root: runs/mine. With --to accelerate or --to megatron, SOURCE is a checkpoint of
    ckpt, and DESTINATION a new folder that accelerator.load_state or Megatron's dist_checkpointing.load will read.
    """
    from ckpt.tools.convert import convert

    echo(str(convert(source, destination, to=to, name=name)))
