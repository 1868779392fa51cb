"""Lines of the commands on the terminal, escaped and without secrets, in colour where it helps; and what the shell
completes after `eval "$(_CKPT_COMPLETE=bash_source ckpt)"`: paths, and the names of checkpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click
from click.shell_completion import CompletionItem

from ckpt.errors import CkptError
from ckpt.shown import shown, without_secrets
from ckpt.util.console import one_line


@dataclass(frozen=True)
class Styled:
    """A piece of a line in a colour, or bold. Without a terminal it is plain."""

    text: str
    colour: str | None = None
    bold: bool | None = None


Line = tuple[str | Styled, ...]


def echo(*pieces: str | Styled, err: bool = False) -> None:
    """Print a line. Colours are those of its pieces, whatever escape sequences are in their text."""
    click.echo("".join(map(_rendered, pieces)), err=err)


def echo_error(error: Exception) -> None:
    """Print what was wrong, on one line of standard error."""
    echo(f"ckpt: {one_line(str(error))}", err=True)


def echo_json(value: Any) -> None:
    """Print JSON, for other programs: pure ASCII, so that nothing in it moves the cursor."""
    click.echo(json.dumps(_without_secrets(value), indent=1, allow_nan=False))


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_secrets(field) for key, field in value.items()}
    if isinstance(value, list | tuple):
        return [_without_secrets(item) for item in value]
    return without_secrets(value) if isinstance(value, str) else value


def _rendered(piece: str | Styled) -> str:
    if isinstance(piece, Styled):
        return click.style(shown(piece.text), fg=piece.colour, bold=piece.bold)
    return shown(piece)


def with_trust(command: Callable[..., None]) -> Callable[..., None]:
    """The options `--key` and `--run` of a command, which gets them as `verify_key` and `require_signed`."""

    @click.option(
        "--key", metavar="PATH", help="Refuse checkpoints that this key (PEM, public or private) has not signed."
    )
    @click.option(
        "--run", metavar="RUN[:NUMBER]", help="Refuse checkpoints from other runs, or with a number below NUMBER."
    )
    @wraps(command)
    def trusting(*given: Any, key: str | None, run: str | None, **options: Any) -> None:
        command(*given, verify_key=key, require_signed=run or key is not None, **options)

    return trusting


_MOST = 50  # names that are offered, the newest


def checkpoint_or_path(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The checkpoints in the root that has been typed so far, the newest first; else paths on the disk."""
    root, slash, begun = incomplete.rpartition("/")
    is_url = "://" in root
    if is_url or os.path.isdir(os.path.expanduser(root or ".")):
        names = [name for name in _names(root or ".") if name.startswith(begun)]
        if names or is_url:
            return [CompletionItem(f"{root}{slash}{name}") for name in names[:_MOST]]
    return [CompletionItem(incomplete, type="file")]


def _names(root: str) -> list[str]:
    """The committed checkpoints of a root; none where it cannot be read: a shell shows no errors."""
    from ckpt.root.catalog import Overview
    from ckpt.storage import open_storage

    try:
        return [summary.name for summary in Overview.of(open_storage(root)).committed]
    except (CkptError, OSError):
        return []
