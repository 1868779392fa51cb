"""`ckpt convert`: from the checkpoints of any tool that is read to those of any that is written."""

from __future__ import annotations

import click

from ckpt.cli.completion import checkpoint_or_path
from ckpt.cli.output import echo
from ckpt.formats.registry import WRITTEN


@click.command(
    epilog="""\b
Examples:
  ckpt convert project/checkpoints/checkpoint_3 runs/mrpc   Accelerate
  ckpt convert out/global_step500 runs/mrpc                 DeepSpeed
  ckpt convert last.ckpt runs/mine                          Lightning
  ckpt convert runs/mine/step-00001000 model --to hf        for from_pretrained
  ckpt convert runs/mine/step-00001000 last.pt --to torch   for torch.load"""
)
@click.argument("source", shell_complete=checkpoint_or_path)
@click.argument("destination", shell_complete=checkpoint_or_path)
@click.option("--to", default="ckpt", show_default=True, type=click.Choice(WRITTEN), help="The format to write.")
@click.option("--format", help="Of SOURCE, where a folder holds saves in several formats: deepspeed, hf, ...")
@click.option("--name", help="Of the checkpoint in the root; that of the source, if none is given.")
@click.option("--max-shard-size", help="With --to hf: write shards of at most this size, such as 5GB.")
def convert(
    source: str, destination: str, to: str, format: str | None, name: str | None, max_shard_size: str | None
) -> None:
    """Convert a checkpoint between formats. That of SOURCE is found out.

    SOURCE is a checkpoint of ckpt, Accelerate, DeepSpeed, Lightning, Megatron-Core, the Trainer,
    torch.distributed.checkpoint, a file of torch.save, or safetensors. DESTINATION is a root for --to ckpt, a new file
    for torch and lightning, else a new folder. What a format cannot hold is named.
    """
    from ckpt.tools.convert import convert

    echo(str(convert(source, destination, to=to, format=format, name=name, max_shard_size=max_shard_size)))
