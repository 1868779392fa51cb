"""`ckpt merge`: write a sharded checkpoint as safetensors."""

from __future__ import annotations

import click

from ckpt.cli.completion import checkpoint_or_path
from ckpt.cli.output import echo


@click.command()
@click.argument("source", shell_complete=checkpoint_or_path)
@click.argument("destination", shell_complete=checkpoint_or_path)
@click.option("--dtype", help="Cast floating point tensors: bfloat16, float16, float32, ...")
@click.option("--max-shard-size", help="Beyond this, write shards and an index: 5GB, 500MiB, ...")
@click.option("--part", default="model", show_default=True, help="Which part of the checkpoint.")
@click.option("--format", help="Of SOURCE, where a folder holds saves in several formats: deepspeed, hf, ...")
@click.option("--key", metavar="PATH", help="Refuse what this key (PEM, public or private) has not signed.")
def merge(
    source: str,
    destination: str,
    dtype: str | None,
    max_shard_size: str | None,
    part: str,
    format: str | None,
    key: str | None,
) -> None:
    """Merge the sharded checkpoint at SOURCE into one safetensors file.

    SOURCE is a checkpoint of ckpt, a folder of torch.distributed.checkpoint, what Accelerate saves under FSDP, what
    DeepSpeed's save_checkpoint wrote (of that, the master weights), or one file of safetensors, torch.save or
    Lightning. DESTINATION is a file.

    \b
    ckpt merge runs/mrpc/step-00001000 model.safetensors
    ckpt merge out/pytorch_model_fsdp_0 model.safetensors --dtype bfloat16
    ckpt merge s3://bucket/run/step-00001000 model/model.safetensors --max-shard-size 5GB
    """
    from ckpt.export.merge import merge

    found = merge(
        source,
        destination,
        dtype=dtype,
        max_shard_size=max_shard_size,
        part=part,
        format=format,
        verify_key=key,
        require_signed=key is not None,
    )
    for url in found:
        echo(url)
