"""A folder of any storage, with or without a manifest: its files and their sizes. Says which ones Accelerate wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.errors import DamagedError
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME
from ckpt.root.save_marker import MARKER
from ckpt.root.verified_file import StoredFile
from ckpt.storage import Storage, open_storage
from ckpt.storage.base import LARGEST_DOCUMENT, read_document
from ckpt.util.console import format_size
from ckpt.util.option_values import path_text, settings

_LARGEST_BESIDE = 1 << 30  # bytes
ROOT = ""  # in place of a checkpoint's name: the root itself is a folder that Accelerate wrote


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
        """The folder of a checkpoint in a root; the root itself if the name is `ROOT`."""
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
    return written_by_accelerate(Folder.of_checkpoint(storage, name).files)


def written_by_accelerate(files: Iterable[str]) -> bool:
    from ckpt.formats.foreign import accelerate  # imports torch, which the command `ckpt` starts without

    return not {FILE_NAME, COPY_NAME, MARKER}.intersection(files) and accelerate.is_accelerate(files)
