"""Opens and checks the storages of a manager: its root, and its mirror if it has one."""

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
from ckpt.storage import LocalStorage, Staging, Storage, open_storage, place_of
from ckpt.storage.base import read_document
from ckpt.util.filesystem import why_not_creatable
from ckpt.util.option_values import said, settings

_log = logging.getLogger("ckpt")

Place = str | os.PathLike[str] | Storage


def open_tiers(
    root: Place,
    options: Mapping[str, Any] | None = None,
    mirror: Place | None = None,
    mirror_options: Mapping[str, Any] | None = None,
) -> tuple[Storage, ...]:
    """Open the root and, if there is one, the mirror, each with its own options. With both, only URLs take options."""
    if mirror is None:
        return (open_storage(root, **settings(options)),)
    tiers = (open_url(root, options), open_url(mirror, mirror_options))
    if place_of(tiers[0]) == place_of(tiers[1]):
        raise ConfigError(f"mirror={mirror!r} is the root itself. Give it another place, or leave it out.")
    refuse_nested(*tiers, mirror)
    return tiers


def refuse_nested(root: Storage, copy: Storage, mirror: object) -> None:
    """Of two local folders neither may be in the other: its checkpoints would be listed, and swept, as the other's."""
    if isinstance(root, LocalStorage) and isinstance(copy, LocalStorage):
        outer, inner = sorted((root.place, copy.place), key=len)
        if os.path.commonpath([outer, inner]) == outer:
            raise ConfigError(
                f"mirror={said(mirror)} and the root: one is in the other. Give it a folder beside the root."
            )


def try_out_tiers(root: Storage, mirror: Storage | None = None) -> None:
    """Write a probe file to each remote storage, so that a wrong one is refused before hours of training are lost.

    A local root that is not there is refused where it cannot be created.

    A mirror that cannot be reached now may be reachable later: that is only warned of.
    """
    if isinstance(root, LocalStorage) and (why := why_not_creatable(root.place)):
        raise ConfigError(f"{root.url} cannot be created: {why}. Choose another root.")
    if not root.is_local:
        _try_out(root)
    if mirror is not None and not mirror.is_local:
        try:
            _try_out(mirror)
        except TransientError as error:
            _log.warning("the mirror cannot be reached, and copies wait for it: %s", error)


def refuse_checkpoint(root: Storage) -> None:
    """Refuse the URL of a checkpoint in place of a root: a run would start afresh inside it."""
    if _is_checkpoint(root):
        raise ConfigError(
            f"{root.url} is a checkpoint, not a root: a run would start afresh inside it. {parent_instead(root.url)}"
        )


def parent_instead(url: str) -> str:
    """The remedy for users who gave a checkpoint, or a folder of Accelerate, as the root."""
    path = url if "/" in url else os.path.abspath(url)
    above, _, name = path.rpartition("/")
    return (
        "Give its parent as the root, and load it by its name: "
        f"manager = StateManager({above or '/'!r}, ...); manager.load_state({name!r})."
    )


def _is_checkpoint(storage: Storage) -> bool:
    try:
        Manifest.from_bytes(read_document(storage, FILE_NAME), FILE_NAME)
    except AbsentError:
        return False
    except VersionError:
        return True
    except DamagedError:  # or the manifest of another program
        return storage.version(STATE) is not None
    return True


def _try_out(storage: Storage) -> None:
    """Write a few bytes and delete them. A crash in between leaves a file that `deletion.sweep` deletes."""
    key = f".try-{uuid.uuid4().hex}"
    if isinstance(storage, Staging):
        storage.stage(key, [b"ckpt"])  # which is never published
        return
    storage.write(key, [b"ckpt"])
    storage.delete([key])
