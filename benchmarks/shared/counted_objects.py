"""An object store in memory that counts the requests which S3 would have been sent."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote

from ckpt.errors import AbsentError
from ckpt.storage.base import ANY, Buffer, Entry, Unfinished, changed

_PAGE = 1000  # objects in an answer to LIST, keys in a DELETE
_PART = 8 << 20  # bytes of a ranged read


class CountedObjects:
    """`Objects` for `ckpt.storage.object_storage.ObjectStorage`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.latency = 0.0  # seconds of a request
        self.content: MutableMapping[str, bytes] = {}
        self.requests: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"s3://{self.prefix}"

    def put(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> str:
        data = b"".join(bytes(piece) for piece in pieces)
        renews = key.startswith(".locks/") and key in self.content  # a lease: that comes with time, not with work
        self._count("renewal" if renews else "put", 1)
        if over not in (ANY, self._version(key)):
            raise changed(f"{self.url}/{key}")
        self.content[key] = data
        return self._version(key) or ""

    def version(self, key: str) -> str | None:
        self._count("head", 1)
        return self._version(key)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._count("get", 1)
        return self._found(key)[start:stop]

    def fill(self, key: str, start: int, buffers: list[memoryview]) -> int:
        size = sum(map(len, buffers))
        self._count("get", max(1, math.ceil(size / _PART)))
        data = memoryview(self._found(key))[start : start + size]
        missing = size - len(data)
        for buffer in buffers:
            part, data = data[: len(buffer)], data[len(buffer) :]
            buffer[: len(part)] = part
        return missing

    def copy(self, source: str, target: str) -> None:
        self._count("head", 1)
        self._count("put", 1)
        self.content[target] = self._found(source)

    def entries(self, prefix: str) -> Iterator[Entry]:
        found = sorted(key for key in list(self.content) if key.startswith(prefix))
        for start in range(0, max(1, len(found)), _PAGE):
            self._count("list", 1)
            yield from map(self._entry, found[start : start + _PAGE])

    def page(self, after: str) -> tuple[list[Entry], bool]:
        self._count("list", 1)
        found = sorted(key for key in list(self.content) if key > after)
        return [self._entry(key) for key in found[:_PAGE]], len(found) > _PAGE

    def _entry(self, key: str) -> Entry:
        return Entry(key, len(self.content[key]), self._version(key) if key.endswith("manifest.json") else None)

    def remove(self, keys: list[str]) -> None:
        self._count("delete", math.ceil(len(keys) / _PAGE))
        for key in keys:
            self.content.pop(key, None)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        self._count("list", 1)
        return iter(())

    def abort(self, prefix: str, age: float) -> None:
        self._count("list", 1)

    def _count(self, kind: str, requests: int) -> None:
        self.requests[kind] += requests
        time.sleep(self.latency * requests)

    def _version(self, key: str) -> str | None:
        data = self.content.get(key)
        return None if data is None else hashlib.md5(data, usedforsecurity=False).hexdigest()

    def _found(self, key: str) -> bytes:
        try:
            return self.content[key]
        except KeyError:
            raise AbsentError(f"{self.url}/{key} does not exist.") from None


class SharedObjects(CountedObjects):
    """The objects of several processes, in a folder that all of them see. Each process counts its own requests."""

    def __init__(self, prefix: str, folder: Path) -> None:
        super().__init__(prefix)
        folder.mkdir(exist_ok=True)
        self.content = _Files(folder)
        self._lock = folder.with_suffix(".lock")

    def put(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> str:
        with self._alone():
            return super().put(key, pieces, over=over)

    def copy(self, source: str, target: str) -> None:
        with self._alone():
            super().copy(source, target)

    def entries(self, prefix: str) -> Iterator[Entry]:
        with self._alone():
            return iter(list(super().entries(prefix)))

    def page(self, after: str) -> tuple[list[Entry], bool]:
        with self._alone():
            return super().page(after)

    def remove(self, keys: list[str]) -> None:
        with self._alone():
            super().remove(keys)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A server, too, compares a version and replaces it at once."""
        with open(self._lock, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class _Files(MutableMapping[str, bytes]):
    """Content by key: one file for each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, content: bytes) -> None:
        temporary = self._folder.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(content)
        temporary.rename(self._path(key))

    def __delitem__(self, key: str) -> None:
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[str]:
        return iter([unquote(name) for name in os.listdir(self._folder)])

    def __len__(self) -> int:
        return len(os.listdir(self._folder))

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")
