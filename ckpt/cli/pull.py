"""`ckpt pull`: copy checkpoints or files from the Hub, or from any URL."""

from __future__ import annotations

import click

from ckpt.cli.completion import checkpoint_or_path
from ckpt.cli.output import echo


@click.command()
@click.argument("source", shell_complete=checkpoint_or_path)
@click.argument("destination", shell_complete=checkpoint_or_path)
@click.option("--step", type=int, help="Only the checkpoint of this step, to resume from.")
@click.option("--revision", help="Of a repository: a branch, a tag or a commit.")
@click.option("--key", metavar="PATH", help="Refuse what this key (PEM, public or private) has not signed.")
def pull(source: str, destination: str, step: int | None, revision: str | None, key: str | None) -> None:
    """Copy SOURCE to DESTINATION, verified.

    SOURCE is a repository on the Hub (user/repo, or hub://user/repo@revision/path for a part of it) or any other URL
    (s3://bucket/run) or a folder: a checkpoint, a root with many, or a folder of files. DESTINATION is a
    folder or a URL too; a checkpoint becomes a folder below it, for a run to resume from. Other files in it are kept.
    Without the network, files of the Hub come from Hugging Face's cache, if they are there. The Hub's token comes
    from HF_TOKEN or 'hf auth login'.

    \b
    ckpt pull s3://bucket/mrpc runs/mrpc
    ckpt pull user/repo model
    ckpt pull runs/mrpc hub://user/mrpc --step 1000
    """
    from ckpt.tools.pull import pull

    signed = key is not None
    echo(pull(source, destination, step=step, revision=revision, verify_key=key, require_signed=signed))
