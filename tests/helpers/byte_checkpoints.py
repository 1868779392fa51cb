"""Checkpoints of a few bytes, written as a save writes them, and storages that fail at a chosen call."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.formats.tensors import FilePlan
from ckpt.root.catalog import find
from ckpt.root.verify import problems
from ckpt.root.write_link_commit import Attempt, WrittenFile
from ckpt.storage import ANY, Buffer, Entry, Storage, Unfinished
from tests.helpers.places import PassedOn

MOMENT = "2026-01-01T00:00:00.000+00:00"


def tensor_file(data: bytes) -> bytes:
    """A safetensors file of these bytes."""
    header = json.dumps({"bytes": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


FILES = {"model.safetensors": tensor_file(b"weights" * 100), "state.json": b"{}"}


def attempt_at(storage: Storage, name: str) -> Attempt:
    """An attempt to write a checkpoint, over what the storage has under that name."""
    older = find(storage, name).manifest
    replaced = tuple(file.path for file in older.files) if older else ()
    there = tuple(entry.key.removeprefix(f"{name}/") for entry in storage.list(name))
    version = storage.version(f"{name}/{FILE_NAME}")
    return Attempt(name, replaces=replaced, occupied_paths=there, expected_version=version)


def manifest_of(attempt: Attempt, written: list[WrittenFile], *, sequence: int = 1, created: str = MOMENT) -> Manifest:
    files = tuple(file.file for file in written)
    return Manifest(name=attempt.name, id=attempt.id, sequence=sequence, created=created, run="run", files=files)


def begin_and_write(storage: Storage, attempt: Attempt, files: Mapping[str, bytes] = FILES) -> list[WrittenFile]:
    attempt.begin(storage, list(files))
    return attempt.write(storage, [FilePlan.of(path, data) for path, data in files.items()], {})


def save(storage: Storage, name: str, files: Mapping[str, bytes] = FILES, *, sequence: int = 1) -> Manifest:
    """Write and commit a checkpoint."""
    attempt = attempt_at(storage, name)
    manifest = manifest_of(attempt, begin_and_write(storage, attempt, files), sequence=sequence)
    attempt.commit(storage, manifest, {})
    return manifest


def is_whole(storage: Storage, manifest: Manifest) -> bool:
    """Whether that very checkpoint is committed, with every byte."""
    current = find(storage, manifest.name).manifest
    return current is not None and current.id == manifest.id and not problems(storage, manifest)


def keys(storage: Storage, prefix: str = "") -> set[str]:
    return {entry.key for entry in storage.list(prefix)}


class KilledError(BaseException):
    """Stands for SIGKILL: no code may handle it. Locks are released, as those of a dead process are."""


class Interrupted(PassedOn):
    """Raises KilledError in place of call number `at`, counted over all methods. Every object of a deletion counts, and
    those between the first and the last are deleted in another order than they were given, as a storage may."""

    def __init__(self, inner: Storage, at: int) -> None:
        super().__init__(inner.url)
        self.left = at

    def _step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KilledError

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        self._step()
        super().write(key, pieces, over=over)

    def version(self, key: str) -> str | None:
        self._step()
        return super().version(key)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._step()
        return super().read(key, start, stop)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        self._step()
        return super().list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        first, *others = [*keys] or [""]
        *middle, last = others or [""]
        for key in filter(None, (first, *reversed(middle), last)):
            self._step()
            super().delete([key])

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        self._step()
        return super().unfinished(prefix)

    def sweep(self, prefix: str = "", *, age: float | None = None) -> None:
        self._step()
        super().sweep(prefix, age=age)

    def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
        self._step()
        return super().lock(key, shared=shared, note=note)


def cut_off_at_every_call(prepare: Callable[[], Storage], do: Callable[[Storage], None]) -> Iterator[Storage]:
    """Do it again and again, each time killed one call later, until it is done. Yields what each time has left."""
    for at in range(1000):
        storage = prepare()
        try:
            do(Interrupted(storage, at))
        except KilledError:
            yield storage
        else:
            yield storage
            return
    raise AssertionError("it is never done")
