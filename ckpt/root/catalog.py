"""The checkpoints of a root: their names, their manifests, and listing them.

Imports no torch: the command `ckpt` starts without it.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ckpt.errors import AbsentError, CheckpointError, ConfigError, DamagedError, MissingError
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.storage import HubStorage, Storage, open_storage
from ckpt.storage.base import read_document
from ckpt.util.checked_json import is_key
from ckpt.util.option_values import path_text, settings

LOCK = ".lock"  # in a root: locked by the run that writes to it
MARKER = ".saving"  # in a checkpoint's folder while it is being saved or removed
STATE = "state.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,199}")


class UncommittedError(DamagedError):
    """There are files of a checkpoint, and no manifest."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it is listed. Without a manifest it is not committed or not readable: `problem` says why."""

    name: str
    url: str
    manifest: Manifest | None = None
    problem: CheckpointError | None = None

    @property
    def committed(self) -> bool:
        return self.manifest is not None

    @property
    def was_committed(self) -> bool:
        """Whether it has a manifest, though it may not be readable."""
        return self.committed or not isinstance(self.problem, MissingError | UncommittedError)

    @property
    def step(self) -> int | None:
        return self.manifest.step if self.manifest else None


def check_name(name: str) -> str:
    """Refuse a name that is not a single path segment: it becomes a folder below the root, and must not lead out."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"{name!r} cannot name a checkpoint: use letters, digits and . _ - + = @, starting with a letter, a digit "
            "or '_', without '..' or '/'. For another folder, give StateManager another root."
        )
    return name


def scan(storage: Storage) -> list[Checkpoint]:
    """Every checkpoint of the root, newest commit first; those without a readable manifest come last.

    A folder is a checkpoint if it has a manifest, a save marker or a `state.json`.
    """
    files: dict[str, set[str]] = defaultdict(set)
    for entry in storage.list():
        name, _, file = entry.key.partition("/")
        files[name].add(file)
    names = [name for name, inside in files.items() if inside & {FILE_NAME, MARKER, STATE} and is_key(name)]
    return sorted((find(storage, name) for name in names), key=_commit_order, reverse=True)


def manifests_of_run(storage: Storage, run: str) -> list[Manifest]:
    """The committed checkpoints of a run, as the root lists them now."""
    found = (checkpoint.manifest for checkpoint in scan(storage))
    return [manifest for manifest in found if manifest is not None and manifest.run == run]


def find(storage: Storage, name: str) -> Checkpoint:
    """The checkpoint of that name. Reads its manifest only."""
    url = f"{storage.url}/{name}"
    try:
        return Checkpoint(name, url, read_manifest(storage, name))
    except CheckpointError as error:
        # its traceback would keep the caller's frames alive: a manager, and with it the lock on its root
        return Checkpoint(name, url, problem=error.with_traceback(None))


def read_manifest(storage: Storage, name: str) -> Manifest:
    where = f"{name}/{FILE_NAME}"
    try:
        manifest = Manifest.from_bytes(read_document(storage, where), where)
    except AbsentError:
        pass
    else:
        return replace(manifest, name=name)  # the folder's name counts: a user may have renamed or copied it
    if not any(True for _ in storage.list(name)):
        known = ", ".join(checkpoint.name for checkpoint in scan(storage) if checkpoint.committed) or "none"
        raise MissingError(f"there is no checkpoint {name!r} in {storage.url}. There are: {known}.")
    raise UncommittedError(f"{name} was never committed: its save was cut off before the manifest was written.")


def _commit_order(checkpoint: Checkpoint) -> tuple[int, str, str]:
    manifest = checkpoint.manifest
    return (manifest.sequence, manifest.created, "") if manifest else (-1, "", checkpoint.name)


def list_checkpoints(
    root: str | os.PathLike[str] | Storage, *, storage_options: Mapping[str, Any] | None = None
) -> list[Checkpoint]:
    """The checkpoints below a root, newest first. Those without a manifest were never committed and come last.

    Reads manifests only; `verify` reads every byte. `storage_options` are those of the manager.
    """
    return scan(open_storage(root, **settings(storage_options)))


def locate(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> tuple[Storage, list[str]]:
    """The root at a URL with the names of its checkpoints; for the URL of a checkpoint, its root and its name alone."""
    return resolve(url, storage_options)[:2]


def resolve(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> tuple[Storage, list[str], bool]:
    """What `locate` returns, and whether the URL is a checkpoint's, which one name alone does not tell."""
    options = settings(storage_options)
    storage = open_storage(url, **options)
    text = path_text(url, "the root")
    if any(True for _ in storage.list()):
        names = [checkpoint.name for checkpoint in scan(storage)]
        if not any(entry.key in (FILE_NAME, MARKER, STATE) for entry in storage.list()):
            return storage, names, False
        text = text if "://" in text else os.path.abspath(text)
    root, _, name = text.rstrip("/").rpartition("/")
    if name and not root.endswith(":/"):
        with suppress(ConfigError):  # the URL is a bucket's or a repository's: it has no parent that could be a root
            parent = open_storage(root or ("/" if text.startswith("/") else "."), **options)
            if any(True for _ in parent.list(name)):
                return parent, [name], True
    check_exists(storage)
    raise MissingError(f"there is no checkpoint at {os.fspath(url)}: it is neither a root nor a checkpoint.")


def check_exists(storage: Storage) -> None:
    """Raise if an empty storage is a repository that does not exist, or that this account may not see."""
    if isinstance(storage, HubStorage):
        storage.repo.head()
