"""`ckpt key`: make keys that sign checkpoints."""

from __future__ import annotations

import click

from ckpt.cli.output import echo


@click.group()
def key() -> None:
    """Keys that sign checkpoints: see StateManager(sign=...) and 'ckpt verify --key'.

    \b
    ckpt key new ~/.ckpt/run.pem
    """


@key.command()
@click.argument("path")
def new(path: str) -> None:
    """Write a new private key to PATH, for you alone, and its public half to PATH.pub."""
    from ckpt.root.keys import find_verify_keys, new_key, shown

    public = new_key(path)
    echo(f"{path}: keep it secret, and give it to the run: StateManager(sign={path!r}) or CKPT_SIGN_KEY")
    echo(f"{public}: give it to whoever loads: --key, verify_key= or CKPT_VERIFY_KEY")
    echo(f"named {shown(find_verify_keys(public))} in messages")
