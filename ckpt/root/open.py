"""Where a manager keeps checkpoints: its root, and a mirror if it has one."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from typing import Any

from ckpt.errors import AbsentError, ConfigError, DamagedError, TransientError, VersionError
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.root.catalog import STATE
from ckpt.root.folder import open_url
from ckpt.storage import Staging, Storage, open_storage, place_of

_log = logging.getLogger("ckpt")


def open_tiers(
    root: Any,
    options: Mapping[str, Any] | None = None,
    mirror: Any = None,
    mirror_options: Mapping[str, Any] | None = None,
) -> tuple[Storage, ...]:
    """The root and, if there is one, the mirror, each with options of its own; only URLs take any."""
    if mirror is None:
        return (open_storage(root, **(options or {})),)
    tiers = (open_url(root, options), open_url(mirror, mirror_options))
    if place_of(tiers[0]) == place_of(tiers[1]):
        raise ConfigError(f"mirror={mirror!r} is the root itself. Give it another place, or leave it out.")
    return tiers


def try_out_tiers(root: Storage, mirror: Storage | None = None) -> None:
    """A mirror that cannot be reached just now may be later; one that is wrong stays wrong."""
    if not root.is_local:
        _try_out(root)
    if mirror is not None and not mirror.is_local:
        try:
            _try_out(mirror)
        except TransientError as error:
            _log.warning("the mirror cannot be reached, and copies wait for it: %s", error)


def refuse_checkpoint(root: Storage) -> None:
    """Refuse a checkpoint in place of a root: a run would start afresh inside it."""
    if _is_checkpoint(root):
        raise ConfigError(
            f"{root.url} is a checkpoint, not a root: a run would start afresh inside it. {parent_instead(root.url)}"
        )


def parent_instead(url: str) -> str:
    """What to write where a folder that holds a state was given as the root."""
    path = url if "/" in url else os.path.abspath(url)
    above, _, name = path.rpartition("/")
    return (
        "Give its parent as the root, and load it by its name: "
        f"manager = StateManager({above or '/'!r}, ...); manager.load_state({name!r})."
    )


def _is_checkpoint(storage: Storage) -> bool:
    try:
        Manifest.from_bytes(storage.read(FILE_NAME), FILE_NAME)
    except AbsentError:
        return False
    except VersionError:
        return True
    except DamagedError:  # or it is the manifest of something else
        return storage.version(STATE) is not None
    return True


def _try_out(storage: Storage) -> None:
    """Write a few bytes and remove them: what is wrong with a root shows before hours of training are lost."""
    key = f".try-{uuid.uuid4().hex}"
    if isinstance(storage, Staging):
        storage.stage(key, [b"ckpt"])  # which is never published
        return
    storage.write(key, [b"ckpt"])
    storage.delete([key])
