"""`ckpt convert`, `merge`, `pull` and `push`: from one format or place to another."""

from __future__ import annotations

from typing import Any

import click

from ckpt.cli.output import checkpoint_or_path, echo, with_trust
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
@click.option("--format", help="The format to read, if SOURCE holds saves in several: deepspeed, hf, ...")
@click.option("--name", help="The checkpoint's name in the root; by default the source's.")
@click.option("--max-shard-size", help="With --to hf: write shards of at most this size, such as 5GB.")
@with_trust
def convert(source: str, destination: str, **options: Any) -> None:
    """Convert a checkpoint between formats. It recognises the format of SOURCE.

    SOURCE is a checkpoint of ckpt, Accelerate, DeepSpeed, Lightning, Megatron-Core, the Trainer,
    torch.distributed.checkpoint, a file of torch.save, or safetensors. DESTINATION is a root for --to ckpt, a new file
    for torch and lightning, otherwise a new folder. It lists what the new format can't hold.
    """
    from ckpt.tools.convert import convert

    echo(str(convert(source, destination, **options)))


@click.command()
@click.argument("source", shell_complete=checkpoint_or_path)
@click.argument("destination", shell_complete=checkpoint_or_path)
@click.option("--dtype", help="Cast floating point tensors: bfloat16, float16, float32, ...")
@click.option("--max-shard-size", help="Write shards of at most this size and an index: 5GB, 500MiB, ...")
@click.option("--part", default="model", show_default=True, help="Which part of the checkpoint.")
@click.option("--format", help="The format to read, if SOURCE holds saves in several: deepspeed, hf, ...")
@with_trust
def merge(source: str, destination: str, **options: Any) -> None:
    """Merge the sharded checkpoint at SOURCE into one safetensors file.

    SOURCE is a checkpoint of ckpt, a folder of torch.distributed.checkpoint, an FSDP folder of Accelerate, a save of
    DeepSpeed's save_checkpoint (it takes the master weights), or one file of safetensors, torch.save or Lightning.
    DESTINATION is a file.

    \b
    ckpt merge runs/mrpc/step-00001000 model.safetensors
    ckpt merge out/pytorch_model_fsdp_0 model.safetensors --dtype bfloat16
    ckpt merge s3://bucket/run/step-00001000 model/model.safetensors --max-shard-size 5GB
    """
    from ckpt.export.merge import merge

    for url in merge(source, destination, **options):
        echo(url)


@click.command()
@click.argument("source", shell_complete=checkpoint_or_path)
@click.argument("destination", shell_complete=checkpoint_or_path)
@click.option("--step", type=int, help="Only the checkpoint of this step, to resume from.")
@click.option("--revision", help="A branch, a tag or a commit of the repository.")
@with_trust
def pull(source: str, destination: str, **options: Any) -> None:
    """Copy SOURCE to DESTINATION, verified.

    SOURCE is a repository on the Hub (user/repo, or hub://user/repo@revision/path for a part of it) or any other URL
    (s3://bucket/run) or a folder: a checkpoint, a root with many, or a folder of files. DESTINATION is a
    folder or a URL too; a checkpoint becomes a folder below it, for a run to resume from. Other files in it stay.
    Without a network, it takes files of the Hub from Hugging Face's cache, if they are there. It takes the Hub's token
    from HF_TOKEN or 'hf auth login'.

    \b
    ckpt pull s3://bucket/mrpc runs/mrpc
    ckpt pull user/repo model
    ckpt pull runs/mrpc hub://user/mrpc --step 1000
    """
    from ckpt.tools.pull import pull

    echo(pull(source, destination, **options))


@click.command()
@click.argument("source", shell_complete=checkpoint_or_path)
@click.argument("repo_id")
@click.option("--private/--public", default=None, help="Make a new repository private.")
@click.option("--revision", help="The branch to commit to; created if it does not exist.")
@click.option("-m", "--message", "commit_message", help="The commit's title.")
@click.option("--create-pr", is_flag=True, help="Open a pull request, and print its URL.")
@click.option("--dtype", help="Cast floating point tensors: bfloat16, float16, float32, ...")
@click.option(
    "--max-shard-size", default="5GB", show_default=True, help="Write shards of at most this size and an index."
)
@click.option("--part", default="model", show_default=True, help="Which part of the checkpoint.")
@click.option("--format", help="The format to read, if SOURCE holds saves in several: deepspeed, hf, ...")
@click.option(
    "--beside",
    type=click.Path(exists=True, file_okay=False),
    help="A folder whose files, except weights, are pushed too: a tokenizer, a config.",
)
@click.option("--license", help="The license in the model card: apache-2.0, mit, ...")
@click.option("--card/--no-card", default=True, show_default=True, help="Write the model card, or leave it as it is.")
@with_trust
def push(source: str, repo_id: str, license: str | None, card: bool, **options: Any) -> None:
    """Publish the model of the checkpoint at SOURCE as REPO_ID on the Hub.

    SOURCE is a checkpoint of ckpt, sharded or not, anything else that 'ckpt merge' reads, or a folder of safetensors;
    REPO_ID is user/name, and is created if it does not exist. One commit has everything; files that the Hub has are not
    sent again. It takes the token from HF_TOKEN or 'hf auth login'.

    \b
    ckpt push runs/mrpc/step-00001000 user/mrpc --beside model --license mit
    ckpt push runs/mrpc/step-00001000 user/mrpc --create-pr
    """
    from ckpt.export.push import push_to_hub

    about: Any = {"license": license} if card and license else card
    echo(push_to_hub(source, repo_id, card=about, **options))
