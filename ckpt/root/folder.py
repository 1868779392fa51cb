"""What is at a path or URL: a folder of any storage, or one file in it, and the format that it has."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.errors import ConfigError, DamagedError, MissingError
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import FILE_NAME
from ckpt.formats.registry import (
    ACCELERATE,
    CKPT,
    HF,
    INDEX_SUFFIX,
    KNOWN,
    LIGHTNING,
    ROOT,
    TORCH,
    TORCH_SUFFIXES,
    Format,
    claims,
    identify,
    named,
)
from ckpt.root.verify import StoredFile
from ckpt.storage import Storage, open_storage
from ckpt.storage.base import LARGEST_DOCUMENT, read_document
from ckpt.storage.fsspec_stores import ReadOnlyStorage
from ckpt.util.console import format_size
from ckpt.util.option_values import path_text, settings

_LARGEST_BESIDE = 1 << 30  # bytes
ROOT_ITSELF = ""  # in place of a checkpoint's name: the root itself is a folder that Accelerate wrote
_FILES = (SUFFIX, f"{SUFFIX}{INDEX_SUFFIX}", *TORCH_SUFFIXES)  # how the names of single files end


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
                f"{self.where} is damaged: {'; '.join(sorted(wrong))}. Copy the files of every rank there."
            )


def is_foreign(storage: Storage, name: str) -> bool:
    """Whether a folder of the root was written by Accelerate, and not by ckpt."""
    return ACCELERATE.name in claims(Folder.of_checkpoint(storage, name).files)


@dataclass(frozen=True)
class Place:
    """What a path or URL names. `format` is None for a folder that no format of ckpt's own claims.

    `file` is the one file that was named; of safetensors in shards, the name of the whole stands for its index.
    """

    folder: Folder
    format: Format | None
    file: str = ""

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
    ) -> Place:
        """What is at a path or URL. `format` and `must` as for `identify`."""
        if format is not None:
            named(format)
        alone = single_file(source, options)
        if alone is not None:
            return cls._of_file(*alone, format if must else None)
        folder = Folder.at(source, options)
        if not folder.files and isinstance(folder.storage, ReadOnlyStorage):
            return cls(folder, CKPT)  # a server that shows no list: what there is, only a manifest says
        if not folder.files and folder.prefix and folder.storage.version(folder.prefix.rstrip("/")):
            raise ConfigError(f"{folder.where} is a file. ckpt reads {KNOWN}.")
        if not folder.files:
            raise MissingError(f"there is nothing at {folder.where}. ckpt reads {KNOWN}.")
        return cls(folder, identify(folder.files, folder.where, format, must=must))

    @classmethod
    def _of_file(cls, folder: Folder, file: str, format: str | None) -> Place:
        found = (HF,) if file.endswith(_FILES[:2]) else (TORCH, LIGHTNING)
        if format is not None and named(format) not in found:
            raise ConfigError(f"{folder.where}/{file} is no {format}: it is a file of {found[0].tool}.")
        return cls(folder, found[0], file)


def single_file(source: str | os.PathLike[str], options: Mapping[str, Any] | None) -> tuple[Folder, str] | None:
    """The one file at a path or URL, and the folder around it; None if it is a folder, or nothing."""
    where = path_text(source, "the source")
    local = "://" not in where
    if local and os.path.islink(where):
        where = _followed(where)
    top, slash, name = where.rpartition("/")
    if not name or (local and not os.path.isfile(where) and not os.path.isfile(f"{where}{INDEX_SUFFIX}")):
        return None
    if not local and (not name.endswith(_FILES) or top.endswith(":/")):
        return None
    folder = Folder.at(top or slash or ".", options)
    found = next((path for path in (name, f"{name}{INDEX_SUFFIX}") if path in folder.files), None)
    if found is None:
        return None
    _refuse_part_of_checkpoint(folder, where, options)
    return folder, found


def _followed(link: str) -> str:
    """What a link that the user names leads to. Of one to another kind of file, its name says what the file holds."""
    target = os.path.realpath(link)
    return target if os.path.splitext(target)[1] == os.path.splitext(link)[1] else link


def _refuse_part_of_checkpoint(folder: Folder, where: str, options: Mapping[str, Any] | None) -> None:
    """A file of a checkpoint may be one rank's piece, and only the manifest says what its bytes must be."""
    around = os.path.dirname(folder.where if "://" in folder.where else os.path.abspath(folder.where))
    is_ours = FILE_NAME in folder.files or bool(
        not around.endswith((":/", ":")) and open_url(around, options).version(FILE_NAME)
    )
    if is_ours:
        whole = folder.where if FILE_NAME in folder.files else around
        raise ConfigError(f"{where} is a file of a checkpoint. Name the checkpoint: {whole}.")
