"""A checkpoint that is being read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ckpt.capture import spread_file
from ckpt.errors import DamagedError
from ckpt.formats.documents import STATE, decode_inline, from_json, rank_document
from ckpt.formats.manifest import Manifest
from ckpt.formats.native import SUFFIX, TensorFile
from ckpt.formats.sharding import Box, Layout, empty_like, is_sharded, layout_of, local_tensor
from ckpt.formats.spread import SpreadTensors, Table
from ckpt.formats.values import Decoder
from ckpt.parts import Like
from ckpt.storage import Storage
from ckpt.stored_file import StoredFile


class Tensors(Protocol):
    """The tensors of a part: in one file, or spread over many."""

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]: ...

    def tensor(self, name: str) -> torch.Tensor: ...

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None: ...


@dataclass(frozen=True)
class _Saved:
    """A tensor of a checkpoint, read when it is asked for."""

    tensors: Tensors
    name: str
    rank: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, like: Like | None = None) -> Any:
        """The tensor in new memory: spread like the one that `like` finds, or whole."""
        model = like(self.name, self.dtype, self.shape) if like else None
        if model is None:
            return self.tensors.tensor(self.name)
        spread = empty_like(model, self.dtype)
        self.read_into(spread)
        return spread

    def read_into(self, target: Any) -> None:
        """Fill a live tensor of the same shape; of one that is spread, the piece that is here."""
        if not is_sharded(target):
            self.tensors.fill(self.name, target.detach(), Box((0,) * len(self.shape), self.shape))
            return
        box = layout_of(target).box(self.shape, self.rank)
        if not box.is_empty:
            self.tensors.fill(self.name, local_tensor(target), box)


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
        return self._decoded(key, lambda saved: saved)

    def read(self, key: str, like: Like | None = None) -> Any:
        """A part's state, its tensors read."""
        return self._decoded(key, lambda saved: saved.read(like))

    def spread(self, key: str) -> bool:
        """Whether a part was saved in pieces."""
        return "spread" in self._part(key)

    def layouts(self, key: str) -> frozenset[Layout]:
        """The ways in which a part's tensors were divided; none if it was saved whole."""
        if not self.spread(key):
            return frozenset()
        found = Table.from_json(self._part(key)["spread"]).tensors.values()
        return frozenset(one.layout for one in found if not one.layout.is_replicated)

    def _decoded(self, key: str, use: Callable[[_Saved], Any]) -> Any:
        tensors = self._tensors(key)

        def find(name: str) -> Any:
            if tensors is None:
                raise DamagedError(f"{self.manifest.name} refers to tensor {name!r} of {key}, but has no file of them.")
            return use(_Saved(tensors, name, self.rank, *tensors.about(name)))

        return Decoder(find).decode(self._part(key)["state"])

    def _part(self, key: str) -> Any:
        return self.own[key] if key in self.own else self.parts[key]

    def _tensors(self, key: str) -> Tensors | None:
        if self.spread(key):
            table = Table.from_json(self._part(key)["spread"])
            return SpreadTensors(table, lambda rank: self._files(spread_file(key, rank)))
        found = self._files(key + SUFFIX)
        return found[0] if found else None

    def _files(self, name: str) -> list[TensorFile]:
        if name not in self._paths:
            return []
        where = f"{self.manifest.name}/{self._paths[name]}"
        return [TensorFile.open(StoredFile(self._storage, where), where)]

    def _document(self, name: str) -> Any:
        where = f"{self.manifest.name}/{self._paths.get(name, name)}"
        return from_json(self._storage.read(where), where)
