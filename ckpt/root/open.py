"""Opens and checks the storages of a manager: its root, and its mirror if it has one."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from typing import Any

from ckpt.errors import (
    AbsentError,
    ConfigError,
    ConflictError,
    DamagedError,
    DeniedError,
    FullError,
    StorageError,
    TransientError,
    UnsupportedError,
    VersionError,
)
from ckpt.formats.native.manifest import FILE_NAME, STATE, Manifest
from ckpt.root.folder import open_url
from ckpt.root.mirror import MirrorPatience
from ckpt.storage import LocalStorage, Staging, Storage, open_storage, place_of
from ckpt.storage.base import read_document
from ckpt.util.filesystem import why_not_creatable
from ckpt.util.option_values import settings

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
        raise ConfigError(f"mirror={mirror!r} is the same place as the root. Use another place, or leave out mirror=.")
    return tiers


def try_out_tiers(root: Storage, mirror: Storage | None = None, *, patience: MirrorPatience | None = None) -> None:
    """Write a probe file to each remote storage, so that a wrong one is refused before hours of training are lost.

    A local root that is not there is refused where it cannot be created.

    A mirror that cannot be reached now may be reachable later: that is only warned of.
    """
    if isinstance(root, LocalStorage) and (why := why_not_creatable(os.path.abspath(root.url))):
        raise ConfigError(f"{root.url} cannot be created: {why}. Choose another root.")
    if not root.is_local:
        _try_out(root)
    if mirror is not None and not mirror.is_local:
        try:
            (patience or MirrorPatience()).reached(mirror, lambda: _try_out(mirror))
        except TransientError as error:
            _log.warning("can't reach the mirror, so copies wait until the mirror answers: %s", error)


def refuse_checkpoint(root: Storage) -> None:
    """Refuse the URL of a checkpoint in place of a root: a run would start from scratch inside it."""
    if _is_checkpoint(root):
        raise ConfigError(
            f"{root.url} is a checkpoint, not a root: a run would start from scratch inside it. "
            f"{parent_instead(root.url)}"
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
    """Write a few bytes, see that they are listed and that conditions of a write are honoured, and delete them.

    A crash in between leaves a file that `deletion.sweep` deletes.
    """
    folder = f".try-{uuid.uuid4().hex}"
    key = f"{folder}/probe"
    if isinstance(storage, Staging):
        storage.stage(key, [b"ckpt"])  # which is never published
        return
    storage.write(key, [b"ckpt"])
    try:
        _refuse_unlisted(storage, folder, key)
        first = storage.version(key)
        ignored = [] if _is_refused(storage, key, None) else ["If-None-Match"]
        storage.write(key, [b"checkpoint"])
        ignored += [] if _is_refused(storage, key, first) else ["If-Match"]
    finally:
        storage.delete([key])
    if ignored:
        _refuse_unconditional(storage, ignored)


def _refuse_unlisted(storage: Storage, folder: str, key: str) -> None:
    """What is not listed counts as lost: no save would be committed, and no checkpoint found."""
    if all(entry.key != key for entry in storage.list(folder)):
        raise UnsupportedError(
            f"ckpt wrote to {storage.url}, but the server does not list the object. Some servers alter names that "
            "contain a backslash, or two slashes in a row: give the root another name."
        )


def _is_refused(storage: Storage, key: str, over: str | None) -> bool:
    """Whether the store refuses to write over a version that is not there any more."""
    try:
        storage.write(key, [b"try"], over=over)
    except ConflictError:
        return True
    except (TransientError, DeniedError, FullError):
        raise
    except StorageError as error:  # 400 or 501: the server does not know such requests
        raise UnsupportedError(
            f"the server of {storage.url} refuses conditional writes (If-None-Match, If-Match). Without such writes, "
            f"two runs could destroy each other's saves. Use another server, or a newer version. It said: {error}"
        ) from error
    return False


def _refuse_unconditional(storage: Storage, ignored: list[str]) -> None:
    """Locks and commits are conditional writes: where conditions are ignored, two runs destroy each other's saves."""
    text = f"{storage.url}: the server ignores {' and '.join(ignored)}, so nothing keeps a second run out of this root"
    if not getattr(storage, "allow_unconditional", False):
        raise UnsupportedError(
            f"{text}: each run would remove what the other is writing. Use another server, or a newer version of this "
            f"server. If only one run ever writes there, give storage_options={{'allow_unconditional': True}}."
        )
    _log.warning("%s. Make sure that only one run writes there (allow_unconditional=True).", text)
