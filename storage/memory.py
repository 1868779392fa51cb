"""A storage in this process's memory: for tests, notebooks and dry runs."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckpt.errors import AbsentError, LockedError, TruncatedError
from ckpt.storage.base import ANY, Buffer, Entry, Unfinished, below, changed, check_key


@dataclass
class _Holders:
    shared: int = 0
    alone: bool = False
    note: str = ""


@dataclass
class _Space:
    objects: dict[str, bytes] = field(default_factory=dict)
    held: dict[str, _Holders] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)


_spaces: dict[str, _Space] = {}


class MemoryStorage:
    """`memory://name`: storages of the same name in this process share their objects."""

    is_local = True

    def __init__(self, name: str) -> None:
        self._name = name.rstrip("/")
        self._space = _spaces.setdefault(self._name, _Space())

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def __repr__(self) -> str:
        return f"MemoryStorage({self._name!r})"

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        check_key(key)
        data = b"".join(bytes(piece) for piece in pieces)
        with self._space.guard:
            if over not in (ANY, self.version(key)):
                raise changed(f"{self.url}/{key}")
            self._space.objects[key] = data

    def version(self, key: str) -> str | None:
        data = self._space.objects.get(check_key(key))
        return None if data is None else hashlib.sha256(data).hexdigest()

    def link(self, source: str, target: str) -> None:
        self._space.objects[check_key(target)] = self._object(source)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._object(key)[start:stop]

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        size = sum(map(len, buffers))
        pieces = memoryview(self._object(key))[start : start + size]
        if len(pieces) < size:
            raise TruncatedError(f"{self.url}/{key} is {size - len(pieces)} bytes too short.")
        for buffer in buffers:
            buffer[:], pieces = pieces[: len(buffer)], pieces[len(buffer) :]

    def list(self, prefix: str = "") -> Iterator[Entry]:
        top = prefix and check_key(prefix)
        for key, data in list(self._space.objects.items()):
            if below(key, top):
                yield Entry(key, len(data))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._space.objects.pop(check_key(key), None)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        return iter(())

    def sweep(self, prefix: str = "", *, age: float | None = None) -> None:
        """Nothing to do: an unfinished write leaves nothing behind."""

    @contextmanager
    def lock(self, key: str, *, shared: bool = False, note: str = "") -> Iterator[None]:
        holders = self._hold(check_key(key), shared=shared, note=note)
        try:
            yield
        finally:
            with self._space.guard:
                holders.shared -= shared
                holders.alone = False

    def _hold(self, key: str, *, shared: bool, note: str) -> _Holders:
        with self._space.guard:
            holders = self._space.held.setdefault(key, _Holders())
            if holders.alone or (holders.shared and not shared):
                raise LockedError(f"{self.url}/{key} is held: {holders.note or 'by somebody else.'}")
            holders.shared += shared
            holders.alone = not shared
            holders.note = note
            return holders

    def _object(self, key: str) -> bytes:
        try:
            return self._space.objects[check_key(key)]
        except KeyError:
            raise AbsentError(f"{self.url}/{key} does not exist.") from None
