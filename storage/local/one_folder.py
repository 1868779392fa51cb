"""One folder of a directory as a storage: the others beside it are neither listed, nor locked, nor swept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.storage.base import Entry, Unfinished
from ckpt.storage.local.storage import LocalStorage


class OneFolder(LocalStorage):
    """The directory above a folder that may lie anywhere, such as /tmp: only keys in that folder are listed.

    Lock files, whose names begin with a dot, are inside it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = os.path.normpath(os.fspath(folder))
        super().__init__(os.path.dirname(path) or ".")
        self.name = os.path.basename(path)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        return super().list(prefix or self.name)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        return super().unfinished(prefix or self.name)

    @contextmanager
    def lock(self, key: str, *, shared: bool = False, note: str = "") -> Iterator[None]:
        inside = f"{self.name}/{key}" if key.startswith(".") else key
        with super().lock(inside, shared=shared, note=note):
            yield
