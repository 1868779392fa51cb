"""Two storages as one, for reading."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt.errors import AbsentError
from ckpt.storage.base import Entry, Storage
from ckpt.storage.deprecated import FormerName


class Tiers:
    """What the first storage does not have is read from the second. All else is done to the first."""

    is_local = True
    near = FormerName("is_local")

    def __init__(self, first: Storage, second: Storage) -> None:
        self._first = first
        self._second = second
        self.write, self.version, self.link = first.write, first.version, first.link
        self.delete, self.unfinished, self.sweep, self.lock = first.delete, first.unfinished, first.sweep, first.lock

    @property
    def url(self) -> str:
        return self._first.url

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        try:
            return self._first.read(key, start, stop)
        except AbsentError:
            return self._second.read(key, start, stop)

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        try:
            self._first.read_into(key, start, *buffers, again=again)
        except AbsentError:
            self._second.read_into(key, start, *buffers, again=again)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        first = {entry.key: entry for entry in self._first.list(prefix)}
        yield from first.values()
        yield from (entry for entry in self._second.list(prefix) if entry.key not in first)
