"""The token of a root: a file by which a folder in memory knows that the root is still the one it belongs to.

A root that was removed and made anew has another one, or none. Imports no torch: the rescue asks for it too.
"""

from __future__ import annotations

import logging
import secrets

from ckpt.errors import AbsentError, StorageError
from ckpt.storage import Staging, Storage, place_of

_log = logging.getLogger("ckpt")
TOKEN = ".memory"  # noqa: S105 - the name of the file


def read_token(root: Storage) -> str:
    """The token of a root; empty if it has none."""
    if isinstance(root, Staging):
        return "staged"
    try:
        return root.read(TOKEN, 0, 64).decode("ascii", "replace")
    except AbsentError:
        return ""


def write_token(root: Storage, token: str = "") -> str:
    """Give a root this token or a new one, and return it."""
    token = token or secrets.token_hex(16)
    root.write(TOKEN, [token.encode()])
    return token


def remove_token(root: Storage) -> bool:
    """No folder in memory belongs to this root any more, on whatever host it is. Returns whether there was a token.

    A token that cannot be removed is said: a later run would take what is in such a folder for the newest.
    """
    if isinstance(root, Staging):
        return False
    try:
        if not read_token(root):
            return False
        root.delete([TOKEN])
    except StorageError as error:
        _log.warning(
            "%s/%s cannot be removed: %s Remove it, or a later run with memory= may resume from snapshots in "
            "memory that are older than this run's checkpoints.", root.url, TOKEN, error,
        )  # fmt: skip
    return True


def identity_of(root: Storage, token: str) -> str:
    """What the folder of a run knows its root by."""
    return f"{place_of(root)}\n{token}"
