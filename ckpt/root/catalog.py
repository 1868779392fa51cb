"""The checkpoints of a root: their names, their manifests, and listing them.

Imports no torch: the command `ckpt` starts without it.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ckpt.errors import AbsentError, CheckpointError, ConfigError, MissingError
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, Manifest
from ckpt.formats.registry import CKPT, is_checkpoint
from ckpt.root.manifest_files import find_manifest, was_committed, without_manifest
from ckpt.storage import Entry, HubStorage, Storage, open_storage
from ckpt.storage.base import ROOT_LOCK
from ckpt.storage.read_only import ReadOnlyStorage
from ckpt.util.console import format_age, format_number, format_size
from ckpt.util.html import html_table
from ckpt.util.option_values import path_text, settings
from ckpt.util.threads import in_parallel

LOCK = ROOT_LOCK  # in a root: locked by the run that writes to it
_READERS = 32  # threads that read manifests from an object store
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,199}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it is listed.

    Attributes:
        name: Of its folder.
        url: Where it is.
        manifest: What it says of itself: step, metrics, files. None if it is not committed, or not readable.
        problem: Why there is no manifest.
        flaw: What is wrong with `manifest.json`, if its copy was read in its place.
    """

    name: str
    url: str
    manifest: Manifest | None = None
    problem: CheckpointError | None = None
    flaw: str = ""

    @property
    def committed(self) -> bool:
        return self.manifest is not None

    @property
    def was_committed(self) -> bool:
        """Whether it was committed, though its manifest may be damaged or lost."""
        return was_committed(self.problem)

    @property
    def step(self) -> int | None:
        return self.manifest.step if self.manifest else None

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_table(self.url, zip(_COLUMNS, _row(self), strict=True))


class Checkpoints(list[Checkpoint]):
    """Checkpoints of a root, newest first: a list, and a table in notebooks."""

    def _repr_html_(self) -> str:
        """For notebooks."""
        right = ("step", "size")
        return html_table(f"{len(self)} checkpoints", map(_row, self), _COLUMNS, right)


_COLUMNS = ("name", "step", "size", "saved", "metrics", "state")


def _row(checkpoint: Checkpoint) -> tuple[str, ...]:
    found = checkpoint.manifest
    if found is None:
        return checkpoint.name, "", "", "", "", str(checkpoint.problem or "not committed")
    metrics = ", ".join(f"{name} {format_number(value)}" for name, value in found.metrics.items())
    age = f"{format_age(found.created)} ago"
    return checkpoint.name, str(found.step), format_size(found.size), age, metrics, "committed"


def name_of_step(name: Any) -> Any:
    """The name of the checkpoint of a step, where a number is given; anything else as it is."""
    return f"step-{name:08d}" if type(name) is int and name >= 0 else name


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

    A folder is a checkpoint if it has a manifest or a copy of one, a save marker, or other files of a checkpoint.
    """
    listed = {name: inside for name, inside in by_folder(storage.list()).items() if is_checkpoint(name, inside)}
    found = find_listed(storage, listed)
    return sorted(found, key=lambda checkpoint: commit_order(checkpoint.name, checkpoint.manifest), reverse=True)


def by_folder(entries: Iterable[Entry]) -> dict[str, dict[str, Entry]]:
    """The objects of a root by the first name in their keys, and the rest of these."""
    files: dict[str, dict[str, Entry]] = defaultdict(dict)
    for entry in entries:
        name, _, file = entry.key.partition("/")
        files[name][file] = entry
    return files


def find_listed(storage: Storage, folders: Mapping[str, Mapping[str, Entry]]) -> list[Checkpoint]:
    """The checkpoints of folders that were just listed. Manifests are read several at a time, unless they are local."""
    committed = [name for name, inside in folders.items() if FILE_NAME in inside or COPY_NAME in inside]
    others = [
        Checkpoint(name, f"{storage.url}/{name}", problem=without_manifest(name, folders[name]))
        for name in folders.keys() - set(committed)
    ]
    threads = 1 if storage.is_local else _READERS
    return [*in_parallel(lambda name: _find_listed(storage, name), committed, threads, "ckpt-list"), *others]


def _find_listed(storage: Storage, name: str) -> Checkpoint:
    return _found(storage, name, known=lambda: "")  # to name the others for each would list the root once more


def manifests_of_run(storage: Storage, run: str) -> list[Manifest]:
    """The committed checkpoints of a run, as the root lists them now."""
    found = (checkpoint.manifest for checkpoint in scan(storage))
    return [manifest for manifest in found if manifest is not None and manifest.run == run]


def find(storage: Storage, name: str) -> Checkpoint:
    """The checkpoint of that name. Reads its manifest only."""
    return _found(storage, name, known=lambda: _known(storage))


def _found(storage: Storage, name: str, known: Callable[[], str]) -> Checkpoint:
    url = f"{storage.url}/{name}"
    try:
        found = find_manifest(storage, name, known)
    except CheckpointError as error:
        # its traceback would keep the caller's frames alive: a manager, and with it the lock on its root
        return Checkpoint(name, url, problem=error.with_traceback(None))
    return Checkpoint(name, url, found.manifest, flaw=found.flaw)


def read_manifest(storage: Storage, name: str) -> Manifest:
    """The manifest of a checkpoint, or, with a warning, what its copy says where it is damaged or missing."""
    return find_manifest(storage, name, lambda: _known(storage)).manifest


def _known(storage: Storage) -> str:
    names = ", ".join(checkpoint.name for checkpoint in scan(storage) if checkpoint.committed)
    return f" There are: {names or 'none'}."


class _Committed(Protocol):
    @property
    def sequence(self) -> int: ...
    @property
    def created(self) -> str: ...


def commit_order(name: str, found: _Committed | None) -> tuple[int, str, str]:
    """Sorts checkpoints by their commits; those without a readable manifest come first, by name."""
    return (found.sequence, found.created, "") if found else (-1, "", name)


def list_checkpoints(
    root: str | os.PathLike[str] | Storage, *, storage_options: Mapping[str, Any] | None = None
) -> Checkpoints:
    """The checkpoints below a root, newest first. Those without a manifest were never committed and come last.

    Reads manifests only; `verify` reads every byte.

    Args:
        root: A folder or prefix; one in which nothing was saved yet has none.
        storage_options: As for the manager.

    Returns:
        A list, which is a table in notebooks.

    Raises:
        StorageError: A repository of the Hub that does not exist, or that this account may not see.
    """
    storage = open_storage(root, **settings(storage_options))
    found = scan(storage)
    if not found:
        check_exists(storage)
    return Checkpoints(found)


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
    files = [entry.key for entry in storage.list()]
    if files:
        if CKPT.sign(files) is None:
            return storage, [checkpoint.name for checkpoint in scan(storage)], False
        if isinstance(storage, ReadOnlyStorage):
            above, name = storage.parent
            return above, [name], True
        text = text if "://" in text else os.path.abspath(text)
    elif isinstance(storage, ReadOnlyStorage):
        return _unlisted(storage)
    root, _, name = text.rstrip("/").rpartition("/")
    if name and not root.endswith(":/"):
        with suppress(ConfigError):  # the URL is a bucket's or a repository's: it has no parent that could be a root
            parent = open_storage(root or ("/" if text.startswith("/") else "."), **options)
            if any(True for _ in parent.list(name)):
                return parent, [name], True
    check_exists(storage)
    raise MissingError(f"there is no checkpoint at {os.fspath(url)}: it is neither a root nor a checkpoint.")


def _unlisted(storage: ReadOnlyStorage) -> tuple[Storage, list[str], bool]:
    """A checkpoint on a server that shows no list of its files: its manifest says what there is."""
    above, name = storage.parent
    try:
        manifest = read_manifest(above, name)
    except (AbsentError, CheckpointError) as error:
        raise MissingError(
            f"{storage.url} shows no list of its files, and no checkpoint's manifest: {error} Give the URL of a "
            "checkpoint itself, or let the server show an index of the folder."
        ) from None
    above.know([f"{name}/{FILE_NAME}", *(f"{name}/{file.path}" for file in manifest.files)])
    return above, [name], True


def check_exists(storage: Storage) -> None:
    """Raise if an empty storage is a repository that does not exist, or that this account may not see."""
    if isinstance(storage, HubStorage):
        storage.repo.head()
