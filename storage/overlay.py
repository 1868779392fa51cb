"""Storages over others: a root over its mirror, or one of which some objects are read elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt.errors import AbsentError
from ckpt.storage.base import Entry, Storage, below


class _Over:
    """All calls but those that read go to the first storage."""

    def __init__(self, first: Storage, *, is_local: bool) -> None:
        self.is_local = is_local
        self._first = first
        self.write, self.version, self.link = first.write, first.version, first.link
        self.delete, self.unfinished, self.sweep, self.lock = first.delete, first.unfinished, first.sweep, first.lock

    @property
    def url(self) -> str:
        return self._first.url


class Tiers(_Over):
    """Reads an object from the second storage if the first does not have it."""

    def __init__(self, first: Storage, second: Storage) -> None:
        super().__init__(first, is_local=True)
        self._second = second

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


@dataclass(frozen=True)
class Place:
    """An object of another storage, or under another key."""

    storage: Storage
    key: str
    size: int


class Patched(_Over):
    """Reads some objects from other places: `places`, by key."""

    def __init__(self, first: Storage, places: Mapping[str, Place]) -> None:
        local = first.is_local and all(place.storage.is_local for place in places.values())
        super().__init__(first, is_local=local)
        self._places = places

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        storage, key = self._where(key)
        return storage.read(key, start, stop)

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        storage, key = self._where(key)
        storage.read_into(key, start, *buffers, again=again)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        yield from (entry for entry in self._first.list(prefix) if entry.key not in self._places)
        yield from (Entry(key, place.size) for key, place in self._places.items() if below(key, prefix))

    def _where(self, key: str) -> tuple[Storage, str]:
        place = self._places.get(key)
        return (self._first, key) if place is None else (place.storage, place.key)
