"""Which checkpoints are there, and are they whole?

Imports no torch: a shell asks the same questions.
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

LOCK = ".lock"  # in a root, held by the run that writes to it
MARKER = ".saving"  # in a checkpoint's folder while it is being written
STATE = "state.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,199}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it lies in its root. One without a manifest was never committed; `problem` says what is wrong."""

    name: str
    url: str
    manifest: Manifest | None = None
    problem: CheckpointError | None = None

    @property
    def committed(self) -> bool:
        return self.manifest is not None

    @property
    def step(self) -> int | None:
        return self.manifest.step if self.manifest else None


def check_name(name: str) -> str:
    """A checkpoint's name is one plain name: it becomes a folder below the root, and must stay there."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"{name!r} cannot name a checkpoint: use letters, digits and . _ - + = @, starting with a letter, a digit "
            "or '_', without '..' or '/'. For another folder, give StateManager another root."
        )
    return name


def scan(storage: Storage) -> list[Checkpoint]:
    """Every checkpoint below the root, the newest first; those that were never committed come last."""
    files: dict[str, set[str]] = defaultdict(set)
    for entry in storage.list():
        name, _, file = entry.key.partition("/")
        files[name].add(file)
    ours = [name for name, inside in files.items() if inside & {FILE_NAME, MARKER, STATE}]
    return sorted((find(storage, name) for name in ours), key=_age, reverse=True)


def find(storage: Storage, name: str) -> Checkpoint:
    """One checkpoint, by its name. Only its manifest is read."""
    url = f"{storage.url}/{name}"
    try:
        return Checkpoint(name, url, read_manifest(storage, name))
    except CheckpointError as error:
        # with its traceback it would keep alive whoever asked: a manager, and the lock on its root
        return Checkpoint(name, url, problem=error.with_traceback(None))


def read_manifest(storage: Storage, name: str) -> Manifest:
    where = f"{name}/{FILE_NAME}"
    try:
        manifest = Manifest.from_bytes(storage.read(where), where)
    except AbsentError:
        pass
    else:
        return replace(manifest, name=name)  # a checkpoint may be moved or copied to another name
    if not any(True for _ in storage.list(name)):
        known = ", ".join(one.name for one in scan(storage) if one.committed) or "none"
        raise MissingError(f"there is no checkpoint {name!r} in {storage.url}. There are: {known}.")
    raise DamagedError(f"{name} was never committed: its save was cut off before the manifest was written.")


def _age(checkpoint: Checkpoint) -> tuple[int, str, str]:
    manifest = checkpoint.manifest
    return (manifest.sequence, manifest.created, "") if manifest else (-1, "", checkpoint.name)


def list_checkpoints(
    root: str | os.PathLike[str] | Storage, *, storage_options: Mapping[str, Any] | None = None
) -> list[Checkpoint]:
    """The checkpoints below a root, newest first. Those without a manifest were never committed and come last.

    Reads manifests only; `verify` looks at every byte. `storage_options` are those of the manager.
    """
    return scan(open_storage(root, **(storage_options or {})))


def locate(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> tuple[Storage, list[str]]:
    """The root that a URL means, and the names of its checkpoints; or the one checkpoint that it points at."""
    return located(url, storage_options)[:2]


def located(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> tuple[Storage, list[str], bool]:
    """The same, and whether the URL points at one checkpoint: not at a root that may have only one."""
    options = storage_options or {}
    storage = open_storage(url, **options)
    text = os.fspath(url)
    if any(True for _ in storage.list()):
        names = [one.name for one in scan(storage)]
        if not any(entry.key in (FILE_NAME, MARKER, STATE) for entry in storage.list()):
            return storage, names, False
        text = text if "://" in text else os.path.abspath(text)
    root, _, name = text.rstrip("/").rpartition("/")
    if name and not root.endswith(":/"):
        with suppress(ConfigError):  # where the URL is of the root itself, nothing above it is one
            parent = open_storage(root or ("/" if text.startswith("/") else "."), **options)
            if any(True for _ in parent.list(name)):
                return parent, [name], True
    check_there(storage)
    raise MissingError(f"there is no checkpoint at {os.fspath(url)}: it is neither a root nor a checkpoint.")


def check_there(storage: Storage) -> None:
    """Raise what is wrong with a repository that looks empty: it may not be there, or be named wrongly."""
    if isinstance(storage, HubStorage):
        storage.repo.head()
