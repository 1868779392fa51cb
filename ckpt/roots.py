"""Where a manager keeps checkpoints: its root, and a mirror if it has one."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Any

from ckpt.errors import ConfigError, TransientError
from ckpt.folder import open_url
from ckpt.storage import Staging, Storage, open_storage

_log = logging.getLogger("ckpt")


def open_tiers(root: Any, mirror: Any, options: Mapping[str, Any] | None) -> tuple[Storage, ...]:
    """The root and, if there is one, the mirror; of the two only URLs take options."""
    if mirror is None:
        return (open_storage(root, **(options or {})),)
    tiers = (open_url(root, options), open_url(mirror, options))
    if tiers[0].url == tiers[1].url:
        raise ConfigError(f"mirror={mirror!r} is the root itself. Give it another place, or leave it out.")
    return tiers


def try_out_tiers(root: Storage, mirror: Storage | None = None) -> None:
    """A mirror that cannot be reached just now may be later; one that is wrong stays wrong."""
    if not root.near:
        _try_out(root)
    if mirror is not None and not mirror.near:
        try:
            _try_out(mirror)
        except TransientError as error:
            _log.warning("the mirror cannot be reached, and copies wait for it: %s", error)


def _try_out(storage: Storage) -> None:
    """Write a few bytes and remove them: what is wrong with a root shows before hours of training are lost."""
    key = f".try-{uuid.uuid4().hex}"
    if isinstance(storage, Staging):
        storage.stage(key, [b"ckpt"])  # which is never published
        return
    storage.write(key, [b"ckpt"])
    storage.delete([key])
