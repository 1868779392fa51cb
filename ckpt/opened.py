"""A checkpoint that is being read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import DamagedError
from ckpt.formats.documents import STATE, decode_inline, from_json, rank_document
from ckpt.formats.manifest import Manifest
from ckpt.formats.native import SUFFIX, TensorFile
from ckpt.formats.values import Decoder
from ckpt.storage import Storage


@dataclass(frozen=True)
class _Reader:
    """One file of a checkpoint, for a format that knows no storage."""

    storage: Storage
    key: str

    def read(self, start: int, stop: int) -> bytes:
        return self.storage.read(self.key, start, stop)

    def read_into(self, start: int, buffer: memoryview) -> None:
        self.storage.read_into(self.key, start, buffer)


@dataclass(frozen=True)
class _Saved:
    """A tensor of a checkpoint, read when it is asked for."""

    file: TensorFile
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        return self.file.tensor(self.name)

    def read_into(self, target: torch.Tensor) -> None:
        self.file.read_into(self.name, target)


class Opened:
    """A checkpoint that is being read: the values of its parts, and their tensors when they are wanted."""

    def __init__(self, storage: Storage, manifest: Manifest, rank: int) -> None:
        self._storage = storage
        self.manifest = manifest
        self.rank = rank
        self._paths = {file.name: file.path for file in manifest.files}
        self.parts: dict[str, Any] = self._document(STATE)["parts"]
        # ranks that were not there when it was saved look at the main rank's document
        document = self._document(rank_document(rank if rank < manifest.world_size else 0))
        self.own: dict[str, Any] = document["own"] if rank < manifest.world_size else {}
        self.state: dict[str, Any] = {key: decode_inline(value) for key, value in document["state"].items()}

    def rank_state(self, rank: int) -> dict[str, Any]:
        """What another rank had as its own."""
        return {key: decode_inline(value) for key, value in self._document(rank_document(rank))["state"].items()}

    def has(self, key: str) -> bool:
        return key in self.parts or key in self.own

    def kind(self, key: str) -> str:
        """The class of the object whose state a part is."""
        kind: str = self._part(key)["class"]
        return kind

    def tree(self, key: str) -> Any:
        """A part's state, with `SavedTensor`s where tensors are."""
        file = self._file(key)

        def look(name: str) -> _Saved:
            if file is None:
                raise DamagedError(f"{self.manifest.name} refers to tensor {name!r} of {key}, but has no file of them.")
            return _Saved(file, name, *file.about(name))

        return self._decoded(key, look)

    def read(self, key: str) -> Any:
        """A part's state, its tensors read."""
        file = self._file(key)
        return self._decoded(key, lambda name: file.tensor(name) if file else None)

    def _decoded(self, key: str, tensor: Callable[[str], Any]) -> Any:
        return Decoder(tensor).decode(self._part(key)["state"])

    def _part(self, key: str) -> Any:
        return self.own[key] if key in self.own else self.parts[key]

    def _file(self, key: str) -> TensorFile | None:
        path = self._paths.get(key + SUFFIX)
        if path is None:
            return None
        where = f"{self.manifest.name}/{path}"
        return TensorFile.open(_Reader(self._storage, where), where)

    def _document(self, name: str) -> Any:
        where = f"{self.manifest.name}/{self._paths.get(name, name)}"
        return from_json(self._storage.read(where), where)
