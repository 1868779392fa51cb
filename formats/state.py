"""State independent of any file format: shards of tensors, the state of a part, and the plan of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Shard(NamedTuple):
    """A rectangular piece of a tensor: its data, the shape of the full tensor, and its offsets in that."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Shard:
        return cls(tensor, tensor.shape, (0,) * tensor.dim())

    @property
    def is_whole(self) -> bool:
        return self.tensor.shape == self.shape


class Unsharded(NamedTuple):
    """A plain tensor in the state of a sharded parameter that has the parameter's shape, and is no shard of it.

    Statistics of a square layer are such: without a record, a reader would take them for state that is sharded as the
    parameter is.
    """

    tensor: torch.Tensor


@dataclass(frozen=True)
class PartState:
    """The state of a part: its class, JSON values with references to tensors, and the tensors by name."""

    kind: str
    values: Any
    tensors: Mapping[str, Shard] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()  # tensors that training does not change
    about: Mapping[str, Any] = field(default_factory=dict)  # JSON that other tools need to rebuild the object


@dataclass(frozen=True)
class FilePlan:
    """A file to be written: its path, its size, and an iterator over its bytes that can be started anew.

    `likely_unchanged`: it probably equals the file of the previous checkpoint (frozen weights). `contents` are the
    bytes and named tensors that it consists of, in order; None if some are still to be fetched. `in_memory`: all pieces
    are in host memory and do not change until the file is written. `reserved`: the file of the storage that this memory
    is, if it is one.
    """

    path: str
    size: int
    pieces: Callable[[], Iterator[memoryview]]
    likely_unchanged: bool = False
    contents: Sequence[bytes | tuple[str, torch.Tensor]] | None = None
    in_memory: bool = False
    head: int = 0  # bytes at its start (a header) that readers fetch separately
    reserved: Any = None

    @classmethod
    def of(cls, path: str, data: bytes) -> FilePlan:
        return cls(path, len(data), lambda: iter((memoryview(data),)), contents=(data,), in_memory=True)
