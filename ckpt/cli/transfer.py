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
@click.option("--format", help="The format to read, if SOURCE has saves in several formats: deepspeed, hf, ...")
@click.option(
    "--name", help="The name of the new checkpoint in the root. By default, the new checkpoint has the source's name."
)
@click.option("--max-shard-size", help="With --to hf: write shards of at most this size, such as 5GB.")
@with_trust
def convert(source: str, destination: str, **options: Any) -> None:
    """Convert a checkpoint between formats, and list what the new format can't hold.

    SOURCE is a checkpoint from ckpt, Accelerate, DeepSpeed, Lightning, Megatron-Core, the Trainer or
    torch.distributed.checkpoint, or a torch.save or safetensors file. ckpt detects the format of SOURCE. If SOURCE is a
    ckpt root, convert takes its newest checkpoint. DESTINATION is a root for --to ckpt, a new file for --to torch and
    --to lightning, and otherwise a new folder."""
    from ckpt.tools.convert import convert

    echo(str(convert(source, destination, **options)))


@click.command()
@click.argument("source", shell_complete=checkpoint_or_path)
@click.argument("destination", shell_complete=checkpoint_or_path)
@click.option("--dtype", help="Cast floating point tensors to this dtype: bfloat16, float16, float32, ...")
@click.option("--max-shard-size", help="Write an index and shards of at most this size: 5GB, 500MiB, ...")
@click.option("--part", default="model", show_default=True, help="The part of the checkpoint to read.")
@click.option("--format", help="The format to read, if SOURCE has saves in several formats: deepspeed, hf, ...")
@with_trust
def merge(source: str, destination: str, **options: Any) -> None:
    """Merge the checkpoint at SOURCE into one safetensors file, DESTINATION.

    SOURCE is a ckpt checkpoint, a torch.distributed.checkpoint folder, an FSDP folder from Accelerate, a DeepSpeed save
    (merge takes its master weights), or a safetensors, torch.save or Lightning file. If SOURCE is a ckpt root, merge
    takes its newest checkpoint.

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
@click.option("--step", type=int, help="Copy only the checkpoint saved at this step.")
@click.option("--revision", help="A branch, a tag or a commit of the repository.")
@with_trust
def pull(source: str, destination: str, **options: Any) -> None:
    """Copy a checkpoint, a root or other files from SOURCE to DESTINATION, and verify the copy.

    SOURCE is a repository on the Hub (user/repo, or hub://user/repo@revision/path for a part of it), another URL
    (s3://bucket/run), a folder or a file. If SOURCE is a root, pull copies all its checkpoints. DESTINATION is a folder
    or a URL. Pull copies each checkpoint into its own folder below DESTINATION, and a run can resume from the copy.
    Pull leaves other files in DESTINATION unchanged. Without a network, pull reads Hub files from Hugging Face's cache.
    Pull takes the Hub token from HF_TOKEN or 'hf auth login'.

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
@click.option("--private/--public", default=None, help="If push creates the repository, make it private.")
@click.option("--revision", help="The branch to commit to. If there is no such branch, push creates it.")
@click.option("-m", "--message", "commit_message", help="The commit's title.")
@click.option("--create-pr", is_flag=True, help="Open a pull request, and print its URL.")
@click.option("--dtype", help="Cast floating point tensors to this dtype: bfloat16, float16, float32, ...")
@click.option(
    "--max-shard-size",
    default="5GB",
    show_default=True,
    help="Write an index and shards of at most this size: 5GB, 500MiB, ...",
)
@click.option("--part", default="model", show_default=True, help="The part of the checkpoint to read.")
@click.option("--format", help="The format to read, if SOURCE has saves in several formats: deepspeed, hf, ...")
@click.option(
    "--beside",
    type=click.Path(exists=True, file_okay=False),
    help="A folder with more files to push, such as a tokenizer or a config. Push ignores any weights in this folder.",
)
@click.option("--license", help="The license to name in the model card: apache-2.0, mit, ...")
@click.option(
    "--card/--no-card",
    default=True,
    show_default=True,
    help="Write a model card, or leave the existing card unchanged.",
)
@with_trust
def push(source: str, repo_id: str, license: str | None, card: bool, **options: Any) -> None:
    """Publish the model of the checkpoint at SOURCE as REPO_ID on the Hub.

    SOURCE is a ckpt checkpoint, sharded or not, or anything else that 'ckpt merge' reads. If SOURCE is a ckpt root,
    push takes its newest checkpoint. REPO_ID has the form user/name. If the repository does not exist, push creates it.
    Push makes one commit, and uploads only files that the Hub doesn't have. Push takes the Hub token from HF_TOKEN or
    'hf auth login'.

    \b
    ckpt push runs/mrpc/step-00001000 user/mrpc --beside model --license mit
    ckpt push runs/mrpc/step-00001000 user/mrpc --create-pr
    """
    from ckpt.export.push import push_to_hub

    about: Any = {"license": license} if card and license else card
    echo(push_to_hub(source, repo_id, card=about, **options))
