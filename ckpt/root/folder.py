"""What is at a path or URL: a folder of any storage, or one file in it, and the format that it has."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import ConfigError, DamagedError, MissingError
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.formats.registry import (
    ACCELERATE,
    CKPT,
    FILE_SUFFIXES,
    HF,
    INDEX_SUFFIX,
    KNOWN,
    LIGHTNING,
    ROOT,
    TORCH,
    Format,
    claims,
    foreign_hint,
    identify,
    named,
)
from ckpt.root.catalog import read_manifest, resolve
from ckpt.root.signing import Trust
from ckpt.root.verify import StoredFile, size_problems, without_other_hosts
from ckpt.storage import Storage, open_storage
from ckpt.storage.base import LARGEST_DOCUMENT, read_document
from ckpt.storage.fsspec_stores import ReadOnlyStorage
from ckpt.util.console import format_size, one_line, say
from ckpt.util.option_values import path_text, settings

_log = logging.getLogger("ckpt")
_LARGEST_BESIDE = 1 << 30  # bytes
ROOT_ITSELF = ""  # in place of a checkpoint's name: the root itself is a folder that Accelerate wrote


def open_url(root: str | os.PathLike[str] | Storage, options: Mapping[str, Any] | None) -> Storage:
    """Open a storage where two places share one set of options: they apply to a URL, and not to a path."""
    is_url = isinstance(root, str | os.PathLike) and "://" in os.fspath(root)
    return open_storage(root, **(settings(options) if is_url else {}))


@dataclass(frozen=True)
class Folder:
    """The objects of a storage below a prefix: their sizes, by the rest of the key."""

    storage: Storage
    prefix: str
    where: str
    files: Mapping[str, int]

    @property
    def name(self) -> str:
        return os.path.basename(self.where if "://" in self.where else os.path.abspath(self.where))

    @classmethod
    def at(cls, source: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Folder:
        """The folder at a path or URL.

        Where a URL cannot be opened down to the folder itself, it is listed as a prefix below its parent.
        """
        where = path_text(source, "the source").rstrip("/")
        found = cls.listed(open_url(source, options), "", where)
        root, _, name = where.rpartition("/")
        if not found.files and "://" in root:
            return cls.listed(open_url(root, options), f"{name}/", where)
        return found

    @classmethod
    def listed(cls, storage: Storage, prefix: str, where: str) -> Folder:
        """The folder below a prefix, which is empty (the root itself) or ends with a slash."""
        entries = storage.list(prefix.rstrip("/"))
        return cls(storage, prefix, where, {entry.key.removeprefix(prefix): entry.size for entry in entries})

    @classmethod
    def of_checkpoint(cls, storage: Storage, name: str) -> Folder:
        """The folder of a checkpoint in a root; the root itself if the name is `ROOT_ITSELF`."""
        return cls.listed(storage, f"{name}/" if name else "", f"{storage.url}/{name}".rstrip("/"))

    def below(self, name: str) -> Folder:
        inside = {key.removeprefix(name): length for key, length in self.files.items() if key.startswith(name)}
        return Folder(self.storage, self.prefix + name, f"{self.where}/{name}".rstrip("/"), inside)

    def opened(self, path: str) -> StoredFile:
        return StoredFile(self.storage, self.prefix + path)

    def reader(self, path: str) -> Callable[[], bytes]:
        """A function that reads a file in full."""
        return lambda: self.document(path, _LARGEST_BESIDE)

    def document(self, path: str, most: int = LARGEST_DOCUMENT) -> bytes:
        """All bytes of a file. A larger one is refused before it is read: a file with a hole may be of any size."""
        return read_document(self.storage, self.prefix + path, most)

    def check(self, needed: Mapping[str, int]) -> None:
        """Raise one error that names every file that is missing or shorter than needed."""
        wrong = [f"{path} is missing" for path in needed if path not in self.files]
        for path, length in needed.items():
            if self.files.get(path, length) < length:
                wrong.append(
                    f"{path} is {format_size(self.files[path])} of {format_size(length)} ({self.files[path]} bytes)"
                )
        if wrong:
            raise DamagedError(
                f"{self.where} is damaged: {'; '.join(sorted(wrong))}. Copy every rank's files into that folder."
            )


def is_foreign(storage: Storage, name: str) -> bool:
    """Whether a folder of the root was written by Accelerate, and not by ckpt."""
    return ACCELERATE.name in claims(Folder.of_checkpoint(storage, name).files)


@dataclass(frozen=True)
class Place:
    """What a path or URL names. `format` is None for a folder that no format of ckpt's own claims.

    `file` is the one file that was named; of safetensors in shards, the name of the whole stands for its index.
    `source` and `options` are what was given.
    """

    folder: Folder
    format: Format | None
    file: str = ""
    source: str = ""
    options: Mapping[str, Any] | None = None

    @property
    def where(self) -> str:
        return f"{self.folder.where}/{self.file}" if self.file else self.folder.where

    @property
    def is_ours(self) -> bool:
        return self.format in (CKPT, ROOT)

    @classmethod
    def at(
        cls,
        source: str | os.PathLike[str],
        options: Mapping[str, Any] | None = None,
        format: str | None = None,
        *,
        must: bool = True,
        prefers: Collection[Format] = (),
    ) -> Place:
        """What is at a path or URL. `format` and `must` as for `identify`, which is not asked if a folder has saves in
        a format of `prefers`."""
        if format is not None:
            named(format)
        alone, where = single_file(source, options), os.fspath(source)
        given = (where, options if "://" in where else None)
        if alone is not None:
            return cls(alone[0], _format_of_file(*alone, format if must else None), alone[1], *given)
        folder = Folder.at(source, options)
        if not folder.files and isinstance(folder.storage, ReadOnlyStorage):
            return cls(folder, CKPT, "", *given)  # a server that shows no list: what there is, only a manifest says
        if not folder.files and folder.prefix and folder.storage.version(folder.prefix.rstrip("/")):
            raise ConfigError(f"{folder.where} is a file. ckpt reads {KNOWN}.")
        if not folder.files:
            raise MissingError(f"there is nothing at {folder.where}. ckpt reads {KNOWN}.")
        found = next((each for each in prefers if each.name in claims(folder.files)), None)
        return cls(folder, found or identify(folder.files, folder.where, format, must=must), "", *given)

    def checkpoints(self) -> tuple[Storage, list[str]]:
        """Of ours: the root, and the names of its checkpoints, newest first; of a checkpoint, its own name alone."""
        return resolve(self.source, self.options)[:2]

    def checkpoint(self, trust: Trust) -> OneCheckpoint:
        """Of ours: the checkpoint itself, or a root's newest whose files are all there."""
        storage, names = self.checkpoints()
        if not names:
            raise MissingError(f"there are no checkpoints in {storage.url}.{foreign_hint(list(self.folder.files))}")
        if self.format is not ROOT:
            return OneCheckpoint(storage, names[0])
        skipped: dict[str, str] = {}
        for name in names:
            if not (wrong := _incomplete(storage, name, trust)):
                return OneCheckpoint(storage, name, skipped, is_newest=True)
            skipped[name] = wrong
        return OneCheckpoint(storage, names[0], {name: skipped[name] for name in names[1:]}, is_newest=True)


@dataclass(frozen=True)
class OneCheckpoint:
    """A checkpoint of a root: the named one, or the newest. `skipped`: others, with what is wrong with them."""

    root: Storage
    name: str
    skipped: Mapping[str, str] = field(default_factory=dict)
    is_newest: bool = False

    @property
    def url(self) -> str:
        return f"{self.root.url.rstrip('/')}/{self.name}"

    def tell(self) -> OneCheckpoint:
        """Log which one the newest is, and why newer ones are not taken."""
        for name, why in self.skipped.items():
            _log.warning("ckpt skips the newer checkpoint %s: %s", name, one_line(why))
        if self.is_newest:
            say(f"reading {self.url}, the newest checkpoint there")
        return self


def _incomplete(storage: Storage, name: str, trust: Trust) -> str:
    """Why a checkpoint cannot be read in full, as far as a listing shows it; empty if it can."""
    try:
        return "; ".join(missing_files(storage, trust.checked(read_manifest(storage, name))))
    except DamagedError as error:
        return str(error)


def missing_files(storage: Storage, manifest: Manifest) -> list[str]:
    """The files that are missing or cut short, apart from those that hosts keep in roots of their own."""
    return size_problems(storage, without_other_hosts(storage, manifest))


def _format_of_file(folder: Folder, file: str, format: str | None) -> Format:
    found = (HF,) if file.endswith(FILE_SUFFIXES[:2]) else (TORCH, LIGHTNING)
    if format is not None and named(format) not in found:
        raise ConfigError(f"{folder.where}/{file} is not in the format {format}: it was written by {found[0].tool}.")
    return found[0]


def single_file(source: str | os.PathLike[str], options: Mapping[str, Any] | None) -> tuple[Folder, str] | None:
    """The one file at a path or URL, and the folder around it; None if it is a folder, or nothing."""
    where = path_text(source, "the source")
    local = "://" not in where
    if local and os.path.islink(where):
        where = _followed(where)
    top, slash, name = where.rpartition("/")
    if not name or (local and not os.path.isfile(where) and not os.path.isfile(f"{where}{INDEX_SUFFIX}")):
        return None
    if not local and (not name.endswith(FILE_SUFFIXES) or top.endswith(":/")):
        return None
    folder = Folder.at(top or slash or ".", options)
    found = next((path for path in (name, f"{name}{INDEX_SUFFIX}") if path in folder.files), None)
    if found is None:
        return None
    _refuse_part_of_checkpoint(folder, where, options)
    return folder, found


def _followed(link: str) -> str:
    """What a link that the user names leads to. Of one to another kind of file, its name says what the file holds."""
    try:
        target = os.path.realpath(link)
    except OSError:  # it was a link, and somebody has put something else there
        return link
    return target if os.path.splitext(target)[1] == os.path.splitext(link)[1] else link


def _refuse_part_of_checkpoint(folder: Folder, where: str, options: Mapping[str, Any] | None) -> None:
    """A file of a checkpoint may be one rank's piece, and only the manifest says what its bytes must be."""
    around = os.path.dirname(folder.where if "://" in folder.where else os.path.abspath(folder.where))
    is_ours = FILE_NAME in folder.files or bool(
        not around.endswith((":/", ":")) and open_url(around, options).version(FILE_NAME)
    )
    if is_ours:
        whole = folder.where if FILE_NAME in folder.files else around
        raise ConfigError(f"{where} is only one file of a checkpoint. Name the checkpoint itself: {whole}.")
