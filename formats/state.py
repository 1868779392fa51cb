"""The neutral state: what a checkpoint holds, without a word about who held it or where it will lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Shard(NamedTuple):
    """A rectangular piece of a tensor: its data, and where it belongs in the whole."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Shard:
        return cls(tensor, tensor.shape, (0,) * tensor.dim())

    @property
    def is_whole(self) -> bool:
        return self.tensor.shape == self.shape


@dataclass(frozen=True)
class PartState:
    """The state of one part: JSON in which tensors stand as references, the tensors by their names, and its class."""

    kind: str
    values: Any
    tensors: Mapping[str, Shard] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()  # tensors that training does not change
    about: Mapping[str, Any] = field(default_factory=dict)  # JSON: what others need to build the object again


@dataclass(frozen=True)
class FilePlan:
    """The bytes of a file that is to be written: how many, and a way to go through them once more.

    A `steady` one is likely to be the same as in the checkpoint before. `contents` are what it is made of, in order:
    bytes, and tensors with their names; none if some of it is not here yet. The pieces of a `settled` one are all here,
    and stay as they are until it is written.
    """

    path: str
    size: int
    pieces: Callable[[], Iterator[memoryview]]
    steady: bool = False
    contents: Sequence[bytes | tuple[str, torch.Tensor]] | None = None
    settled: bool = False
    head: int = 0  # bytes at its start that readers want by themselves

    @classmethod
    def of(cls, path: str, data: bytes) -> FilePlan:
        return cls(path, len(data), lambda: iter((memoryview(data),)), contents=(data,), settled=True)
