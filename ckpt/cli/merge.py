"""`ckpt merge`: write a sharded checkpoint as safetensors."""

from __future__ import annotations

import click

from ckpt.cli.output import echo


@click.command()
@click.argument("source")
@click.argument("destination")
@click.option("--dtype", help="Cast floating point tensors: bfloat16, float16, float32, ...")
@click.option("--max-shard-size", help="Beyond this, write shards and an index: 5GB, 500MiB, ...")
@click.option("--part", default="model", show_default=True, help="Which part of the checkpoint.")
@click.option("--key", metavar="PATH", help="Refuse what this key (PEM, public or private) has not signed.")
def merge(
    source: str, destination: str, dtype: str | None, max_shard_size: str | None, part: str, key: str | None
) -> None:
    """Merge the sharded checkpoint at SOURCE into one safetensors file.

    SOURCE is a checkpoint of ckpt, a folder of torch.distributed.checkpoint, what Accelerate saves under FSDP, or what
    DeepSpeed's save_checkpoint wrote: of that, the master weights.
    DESTINATION is a file: out/model.safetensors.
    """
    from ckpt.export.merge import merge

    found = merge(
        source,
        destination,
        dtype=dtype,
        max_shard_size=max_shard_size,
        part=part,
        verify_key=key,
        require_signed=key is not None,
    )
    for url in found:
        echo(url)
