"""What the shell completes after `eval "$(_CKPT_COMPLETE=bash_source ckpt)"`: paths, and the names of checkpoints."""

from __future__ import annotations

import os

import click
from click.shell_completion import CompletionItem

from ckpt.errors import CkptError

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
