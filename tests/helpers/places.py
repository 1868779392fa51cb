"""Where tests keep checkpoints: a folder, or a prefix on an S3 server. A test that takes a `root` runs on either."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import PosixPath
from typing import Any

import ckpt
from ckpt.storage import ANY, Buffer, Entry, Unfinished, open_storage


class Folder(PosixPath):
    """A local folder, or a file in one. The folders of what is written are made."""

    def write_bytes(self, data: Any) -> int:
        self.parent.mkdir(parents=True, exist_ok=True)
        return super().write_bytes(data)

    def files(self) -> dict[str, int]:
        """All files below, hidden ones too, with their sizes."""
        found = {}
        for path in (Folder(folder, name) for folder, _, names in os.walk(self) for name in names):
            with suppress(FileNotFoundError):  # a run may be at work there
                found[str(path.relative_to(self))] = path.stat().st_size
        return found

    def remove(self) -> None:
        shutil.rmtree(self)


class Prefix:
    """The same on an S3 server. Looks at it through another client than the library does."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._bucket, _, self._key = url.removeprefix("s3://").partition("/")

    def __fspath__(self) -> str:
        return self._url

    __str__ = __fspath__

    def __truediv__(self, name: str) -> Prefix:
        return Prefix(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> Prefix:
        return Prefix(self._url.rpartition("/")[0])

    def read_bytes(self) -> bytes:
        body: bytes = _client().get_object(Bucket=self._bucket, Key=self._key)["Body"].read()
        return body

    def write_bytes(self, data: Any) -> int:
        _client().put_object(Bucket=self._bucket, Key=self._key, Body=bytes(data))
        return len(data)

    def exists(self) -> bool:
        try:
            _client().head_object(Bucket=self._bucket, Key=self._key)
        except _client().exceptions.ClientError:
            return bool(self.files())
        return True

    def unlink(self) -> None:
        assert self.exists()
        _client().delete_object(Bucket=self._bucket, Key=self._key)

    def files(self) -> dict[str, int]:
        top, found = f"{self._key}/", {}
        pages = _client().get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=top)
        for one in (one for page in pages for one in page.get("Contents", ())):
            found[one["Key"].removeprefix(top)] = one["Size"]
        return found

    def remove(self) -> None:
        for name in self.files():
            (self / name).unlink()


Place = Folder | Prefix


@cache
def _client_for(endpoint: str) -> Any:
    import boto3  # not where tests of a device run alone

    return boto3.client("s3")


def _client() -> Any:
    return _client_for(os.environ["AWS_ENDPOINT_URL"])


def at(url: str) -> Place:
    """The place that a URL or a path names."""
    return Prefix(url) if url.startswith("s3://") else Folder(url)


def copy(source: Place, target: Place) -> None:
    """Copy all files, over those that are there."""
    for name in source.files():
        (target / name).write_bytes((source / name).read_bytes())


def intact(root: object) -> bool:
    """Whether there are checkpoints, and nothing is wrong with any."""
    return set(map(tuple, ckpt.verify(str(root)).values())) == {()}


def committed(root: Place) -> set[str]:
    """The names of the checkpoints that have a manifest."""
    return {name.partition("/")[0] for name in root.files() if name.endswith("/manifest.json")}


class PassedOn:
    """A storage that leaves everything to another. What a test wants to go otherwise, it overrides."""

    def __init__(self, root: Place | str) -> None:
        self.inner = open_storage(root)
        self.is_local = self.inner.is_local

    @property
    def url(self) -> str:
        return self.inner.url

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        self.inner.write(key, pieces, over=over)

    def version(self, key: str) -> str | None:
        return self.inner.version(key)

    def link(self, source: str, target: str) -> None:
        self.inner.link(source, target)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self.inner.read(key, start, stop)

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        self.inner.read_into(key, start, *buffers, again=again)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        return self.inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self.inner.delete(keys)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        return self.inner.unfinished(prefix)

    def sweep(self, prefix: str = "", *, age: float | None = None) -> None:
        self.inner.sweep(prefix, age=age)

    def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
        return self.inner.lock(key, shared=shared, note=note)
