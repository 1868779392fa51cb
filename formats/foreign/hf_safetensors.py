"""Planning a model's files as Hugging Face's tools read them: `model.safetensors`, or shards of it with an index.

Headers are built first. Tensor data is streamed slab by slab when a file is written, and cast on the way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ckpt.errors import ConfigError
from ckpt.formats.native import dtypes, header
from ckpt.formats.native.header import SUFFIX, TensorHeader
from ckpt.formats.registry import INDEX_SUFFIX as INDEX_SUFFIX
from ckpt.formats.state import FilePlan
from ckpt.formats.tensor_bytes import host_bytes, on_host


class StreamedTensor(Protocol):
    """A tensor that is read slab by slab: from files, from memory, or gathered from ranks."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> int:
        """The number of elements."""

    def slabs(self) -> Iterator[torch.Tensor]:
        """All of its data in contiguous CPU tensors, in the order of its bytes."""


@dataclass(frozen=True)
class LiveTensor:
    """A tensor of a live model, fetched in full when it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], torch.Tensor]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def slabs(self) -> Iterator[torch.Tensor]:
        yield on_host(self.fetch())


@dataclass(frozen=True)
class CastTensor:
    """A tensor, and the dtype that it is cast to when it is written."""

    source: StreamedTensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.source.size * self.dtype.itemsize

    def pieces(self) -> Iterator[memoryview]:
        for slab in self.source.slabs():
            yield host_bytes(slab.to(self.dtype))


def plan_files(
    name: str,
    tensors: Mapping[str, StreamedTensor],
    tied: Mapping[str, str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | None = None,
) -> list[FilePlan]:
    """The files to write, in this order: `name` alone, or shards named after it followed by their index."""
    cast = {key: CastTensor(tensor, _cast(tensor.dtype, dtype)) for key, tensor in tensors.items() if key not in tied}
    shards = _shards(cast, max_shard_size)
    if len(shards) == 1:
        return [_plan_file(name, shards[0], tied)]
    stem = name.removesuffix(SUFFIX)
    paths = [f"{stem}-{number:05d}-of-{len(shards):05d}{SUFFIX}" for number in range(1, len(shards) + 1)]
    files = [_plan_file(path, shard, tied) for path, shard in zip(paths, shards, strict=True)]
    return [*files, _index(name, dict(zip(paths, shards, strict=True)))]


def _cast(saved: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and saved.is_floating_point else saved


def _shards(tensors: Mapping[str, CastTensor], limit: int | None) -> list[dict[str, CastTensor]]:
    """The tensors in their order, in groups of at most `limit` bytes. A larger tensor is a group of its own."""
    shards: list[dict[str, CastTensor]] = [{}]
    room = limit
    for name, tensor in tensors.items():
        if limit is not None and room is not None:
            if shards[-1] and tensor.nbytes > room:
                shards.append({})
                room = limit
            room -= tensor.nbytes
        shards[-1][name] = tensor
    return shards


def _plan_file(path: str, shard: Mapping[str, CastTensor], tied: Mapping[str, str]) -> FilePlan:
    order = sorted(shard, key=lambda name: -shard[name].dtype.itemsize)  # so that every element is aligned
    head = _header({name: shard[name] for name in order}, tied)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(head)
        for name in order:
            yield from shard[name].pieces()

    return FilePlan(path, len(head) + sum(tensor.nbytes for tensor in shard.values()), pieces)


def _header(shard: Mapping[str, CastTensor], tied: Mapping[str, str]) -> bytes:
    # tied weights are noted as safetensors.torch.save_model does, so that load_model finds them
    metadata = {**{name: first for name, first in tied.items() if first in shard}, "format": "pt"}
    tensors = (
        TensorHeader(name, _spelling(name, tensor.dtype), tensor.source.shape, tensor.nbytes)
        for name, tensor in shard.items()
    )
    return header.to_bytes(tensors, metadata)


def _spelling(name: str, dtype: torch.dtype) -> str:
    if dtype not in dtypes.SPELLED:
        raise ConfigError(
            f"{name} has dtype {dtypes.name_of(dtype)}, which safetensors has no word for. "
            f"Choose another with dtype=, if it is of floating point: {floating_names()}."
        )
    return dtypes.SPELLED[dtype]


def _index(name: str, shards: Mapping[str, Mapping[str, CastTensor]]) -> FilePlan:
    total = sum(tensor.nbytes for shard in shards.values() for tensor in shard.values())
    weight_map = {key: path for path, shard in shards.items() for key in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return FilePlan.of(name + INDEX_SUFFIX, (json.dumps(index, indent=2) + "\n").encode())


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype to cast to, by its name."""
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if found not in dtypes.SPELLED or not found.is_floating_point:
        raise ConfigError(f"dtype={dtype!r} is none that a model can be cast to. Choose one of {floating_names()}.")
    return found


def floating_names() -> str:
    return ", ".join(dtypes.name_of(dtype) for dtype in dtypes.SPELLED if dtype.is_floating_point)
