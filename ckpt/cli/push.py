"""`ckpt push`: publish the model of a checkpoint on the Hub."""

from __future__ import annotations

import click

from ckpt.cli.completion import checkpoint_or_path
from ckpt.cli.output import echo


@click.command()
@click.argument("source", shell_complete=checkpoint_or_path)
@click.argument("repo_id")
@click.option("--private/--public", default=None, help="For a new repository.")
@click.option("--revision", help="The branch to commit to; created if it does not exist.")
@click.option("-m", "--message", help="The commit's title.")
@click.option("--create-pr", is_flag=True, help="Open a pull request, and print its URL.")
@click.option("--dtype", help="Cast floating point tensors: bfloat16, float16, float32, ...")
@click.option("--max-shard-size", default="5GB", show_default=True, help="Beyond this, write shards and an index.")
@click.option("--part", default="model", show_default=True, help="Which part of the checkpoint.")
@click.option("--format", help="Of SOURCE, where a folder holds saves in several formats: deepspeed, hf, ...")
@click.option(
    "--beside",
    type=click.Path(exists=True, file_okay=False),
    help="A folder whose files, except weights, are pushed too: a tokenizer, a config.",
)
@click.option("--license", help="For the model card: apache-2.0, mit, ...")
@click.option("--card/--no-card", default=True, show_default=True, help="Write the model card, or leave it as it is.")
def push(
    source: str,
    repo_id: str,
    private: bool | None,
    revision: str | None,
    message: str | None,
    create_pr: bool,
    dtype: str | None,
    max_shard_size: str,
    part: str,
    format: str | None,
    beside: str | None,
    license: str | None,
    card: bool,
) -> None:
    """Publish the model of the checkpoint at SOURCE as REPO_ID on the Hub.

    SOURCE is a checkpoint of ckpt, sharded or not, what else 'ckpt merge' reads, or a folder of safetensors; REPO_ID is
    user/name, and is created if it does not exist. One commit has everything; what the Hub has is not sent again. The
    token comes from HF_TOKEN or 'hf auth login'.

    \b
    ckpt push runs/mrpc/step-00001000 user/mrpc --beside model --license mit
    ckpt push runs/mrpc/step-00001000 user/mrpc --create-pr
    """
    from ckpt.export.push import push_to_hub

    url = push_to_hub(
        source,
        repo_id,
        private=private,
        revision=revision,
        commit_message=message,
        create_pr=create_pr,
        dtype=dtype,
        max_shard_size=max_shard_size,
        part=part,
        format=format,
        beside=beside,
        card={"license": license} if card and license else card,
    )
    echo(url)
