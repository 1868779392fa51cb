"""A model's files as Hugging Face's tools read them: `model.safetensors`, or shards of it with an index; tied weights.

To write them, headers are built first; tensor data is streamed slab by slab as a file is written, and cast on the way.
Tied weights are found by the place where they were saved, or by equal content.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch

from ckpt.errors import ConfigError, DamagedError
from ckpt.formats.checks import damage_reported
from ckpt.formats.native import header, tensor_file
from ckpt.formats.native.header import SUFFIX, TensorHeader, parsed
from ckpt.formats.native.tensor_file import TensorFile, pieced
from ckpt.formats.pieces import PiecedTensor, check_complete
from ckpt.formats.registry import INDEX_SUFFIX as INDEX_SUFFIX
from ckpt.formats.tensors import FilePlan, FolderReader, host_bytes, on_host, same_bytes


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
    if dtype not in tensor_file.SPELLED:
        raise ConfigError(
            f"{name} has dtype {tensor_file.dtype_name(dtype)}, which safetensors files can't hold. "
            f"For a floating point tensor, choose another dtype with dtype=: {floating_names()}."
        )
    return tensor_file.SPELLED[dtype]


def _index(name: str, shards: Mapping[str, Mapping[str, CastTensor]]) -> FilePlan:
    total = sum(tensor.nbytes for shard in shards.values() for tensor in shard.values())
    weight_map = {key: path for path, shard in shards.items() for key in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return FilePlan.of(name + INDEX_SUFFIX, (json.dumps(index, indent=2) + "\n").encode())


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype to cast to, by its name."""
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if found not in tensor_file.SPELLED or not found.is_floating_point:
        raise ConfigError(f"can't cast a model to dtype={dtype!r}. Choose one of {floating_names()}.")
    return found


def floating_names() -> str:
    return ", ".join(tensor_file.dtype_name(dtype) for dtype in tensor_file.SPELLED if dtype.is_floating_point)


_FEW = 10
_LARGEST_INDEX = 64 << 20  # bytes


def read_weight_map(data: bytes, where: str) -> dict[str, str]:
    """The file of each tensor, as `model.safetensors.index.json` has it."""
    with damage_reported(where, "index of safetensors files"):
        found = parsed(data)["weight_map"]
        if not all(isinstance(path, str) for path in found.values()):
            raise ValueError("the index lists a file without a name")
        return dict(found)


def tensors_at(folder: FolderReader, *paths: str) -> dict[str, PiecedTensor]:
    """The tensors of files of safetensors; or of all those that an index names, if that is the path."""
    weight_map: dict[str, str] = {}
    if paths[0].endswith(INDEX_SUFFIX):
        where = f"{folder.where}/{paths[0]}"
        if folder.files[paths[0]] > _LARGEST_INDEX:
            raise DamagedError(f"{where} is damaged: it is larger than {_LARGEST_INDEX} bytes.")
        weight_map = read_weight_map(folder.opened(paths[0]).read(0, folder.files[paths[0]]), where)
        paths = tuple(sorted(set(weight_map.values())))
        if missing := [path for path in paths if path not in folder.files]:
            raise DamagedError(
                f"{where} names files that are missing: {', '.join(missing)}. Copy all files into the same folder."
            )
    files = {path: TensorFile.open(folder.opened(path), f"{folder.where}/{path}", folder.files[path]) for path in paths}
    return tensors_of(files, weight_map, folder.where)


def tensors_of(files: Mapping[str, TensorFile], weight_map: Mapping[str, str], where: str) -> dict[str, PiecedTensor]:
    """Every tensor in the files: each from the file that the index names; what it does not name must be there once."""
    absent = [name for name, path in weight_map.items() if path not in files or name not in files[path]]
    if absent:
        listed = ", ".join(f"{name} in {weight_map[name]}" for name in absent[:_FEW])
        raise DamagedError(f"{where} is damaged: its index names tensors that its files lack: {listed}.")
    named = {name: files[path] for name, path in weight_map.items()}
    tensors = pieced(files.values(), lambda file, name: named.get(name, file) is file)
    check_complete(tensors, where)
    doubled = [
        name for name, tensor in tensors.items() if len({piece.box for piece in tensor.pieces}) < len(tensor.pieces)
    ]
    if doubled:
        raise DamagedError(
            f"{where} has several files with the same tensors, and no index says which file to use: "
            f"{', '.join(sorted(doubled)[:_FEW])}. Remove the files that don't belong to this model."
        )
    return tensors


# What models tie: an output head to an embedding, embeddings to a shared one. Only among these do equal bytes mean
# that weights are tied: fresh biases are all zero, and a model would not load without one of them.
_HEADS = ("lm_head", "embed_out", "output", "output_layer", "output_projection", "proj_out", "decoder")
_EMBEDDINGS = ("embed", "wte", "shared")
_SHARED = "shared"
_MOST_PAIRS = 1000  # models have a few; the names of a hostile one could be compared forever


def tied(tensors: Mapping[str, PiecedTensor]) -> dict[str, str]:
    """Names of duplicates that need not be written, each with the name that is."""
    found = same_place(tensors)
    left = {name: tensor for name, tensor in tensors.items() if name not in found}
    for kept, other in islice(_candidates(left), _MOST_PAIRS):
        if kept not in found and other not in found and equal_bytes(left[kept], left[other]):
            found[other] = kept
    return found


def same_place(tensors: Mapping[str, PiecedTensor]) -> dict[str, str]:
    """Duplicates that were saved as the same bytes of the same files."""
    by_place = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.size:
            by_place[tensor.dtype, tensor.shape, frozenset(tensor.pieces)].append(name)
    return duplicates(by_place.values())


def duplicates(groups: Iterable[list[str]]) -> dict[str, str]:
    """For groups of names of the same tensor: the names not to write, each with the name to write instead.

    An output head is never the name that is written, if the group has another.
    """
    ordered = (sorted(names, key=_is_head) for names in groups)
    return {other: kept for kept, *others in ordered for other in others}


def _candidates(tensors: Mapping[str, PiecedTensor]) -> Iterator[tuple[str, str]]:
    """Pairs of names that models tie, the name to keep first."""
    tables = [name for name, tensor in tensors.items() if len(tensor.shape) == 2 and name.endswith(".weight")]

    def pairs(keep: Callable[[str], bool], drop: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
        return ((kept, other) for kept in tables if keep(kept) for other in tables if drop(other) and other != kept)

    yield from pairs(_is_shared, _is_embedding)
    yield from pairs(_is_embedding, _is_head)


def _module(name: str) -> str:
    """`lm_head` of `model.lm_head.weight`."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _is_head(name: str) -> bool:
    return _module(name) in _HEADS


def _is_embedding(name: str) -> bool:
    return not _is_head(name) and any(word in _module(name) for word in _EMBEDDINGS)


def _is_shared(name: str) -> bool:
    return _module(name) == _SHARED


def equal_bytes(first: PiecedTensor, second: PiecedTensor) -> bool:
    """Whether every byte is the same. The first slab usually shows a difference."""
    if (first.dtype, first.shape) != (second.dtype, second.shape) or not first.size:
        return False
    return all(same_bytes(*slabs) for slabs in zip(first.slabs(), second.slabs(), strict=True))
