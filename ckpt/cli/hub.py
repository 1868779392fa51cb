"""The commands that publish and bring back: `ckpt push` and `ckpt pull`."""

from __future__ import annotations

import click


@click.command()
@click.argument("source")
@click.argument("repo_id")
@click.option("--private/--public", default=None, help="For a repository that is new.")
@click.option("--revision", help="The branch to commit to; made if it is not there.")
@click.option("-m", "--message", help="The commit's title.")
@click.option("--dtype", help="Cast floating point tensors: bfloat16, float16, float32, ...")
@click.option("--max-shard-size", default="5GB", show_default=True, help="Beyond this, write shards and an index.")
@click.option("--part", default="model", show_default=True, help="Which part of the checkpoint.")
@click.option(
    "--beside",
    type=click.Path(exists=True, file_okay=False),
    help="A folder whose files go along, but for weights: a tokenizer, a config.",
)
@click.option("--license", help="For the model card: apache-2.0, mit, ...")
@click.option("--card/--no-card", default=True, show_default=True, help="Write the model card, or leave it alone.")
def push(
    source: str,
    repo_id: str,
    private: bool | None,
    revision: str | None,
    message: str | None,
    dtype: str | None,
    max_shard_size: str,
    part: str,
    beside: str | None,
    license: str | None,
    card: bool,
) -> None:
    """Publish the model of the checkpoint at SOURCE as REPO_ID on the Hub.

    SOURCE is a checkpoint of ckpt, sharded or not, what else 'ckpt merge' reads, or a folder of safetensors; REPO_ID is
    user/name, and is made if it is not there. One commit has everything; what the Hub has already is not sent again.
    The token comes from HF_TOKEN or 'hf auth login'.
    """
    from ckpt.export.push import push_to_hub

    url = push_to_hub(
        source,
        repo_id,
        private=private,
        revision=revision,
        commit_message=message,
        dtype=dtype,
        max_shard_size=max_shard_size,
        part=part,
        beside=beside,
        card={"license": license} if card and license else card,
    )
    click.echo(url)


@click.command()
@click.argument("source")
@click.argument("destination")
@click.option("--step", type=int, help="Only the checkpoint of this step, to resume from.")
@click.option("--revision", help="Of a repository: a branch, a tag or a commit.")
def pull(source: str, destination: str, step: int | None, revision: str | None) -> None:
    """Copy SOURCE to DESTINATION, verified.

    SOURCE is a repository on the Hub (user/repo, or hub://user/repo@revision/path for a part of it) or any other URL
    (s3://bucket/run, or /a/path): a checkpoint, a root with many, or a folder of files. DESTINATION is a folder or a
    URL too; a checkpoint goes below it, for a run to resume from. Other files in it stay. Without the network, what is
    on the Hub comes from Hugging Face's cache, if it is there. Its token comes from HF_TOKEN or 'hf auth login'.
    """
    from ckpt.tools.pull import pull

    click.echo(pull(source, destination, step=step, revision=revision))


COMMANDS = (push, pull)
