"""Writes a folder of `torch.distributed.checkpoint` with its own writer, one shard in memory at a time."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt.errors import ConfigError
from ckpt.formats.foreign.accelerate import in_memory
from ckpt.formats.foreign.torch_errors import first_error_raised
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.strides import Sizes


@dataclass(frozen=True)
class Shard:
    """A shard of a tensor: where it begins, and what reads it into memory of its own, which is given back."""

    offsets: Sizes
    sizes: Sizes
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class ShardedEntry:
    """A tensor that is written as several shards."""

    dtype: torch.dtype
    shape: Sizes
    shards: tuple[Shard, ...]


def flattened(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The leaves of a nested state dict by the names that DCP gives them, and the path of keys to each."""
    leaves: dict[int, Any] = {}

    def stand_in(value: Any) -> Any:
        if isinstance(value, PiecedTensor | torch.Tensor):
            leaf = torch.empty(0, device="meta")  # DCP goes into lists that have tensors in them
            leaves[id(leaf)] = leaf, value
            return leaf
        if isinstance(value, dict):
            return {key: stand_in(item) for key, item in value.items()}
        if type(value) is list:
            return list(map(stand_in, value))
        return in_memory(value)  # also tuples, which DCP does not go into: their tensors are saved with them

    try:
        names, paths = flatten_state_dict(stand_in(tree))
    except ValueError as error:  # `a.b` beside a dict `a` with a key `b`
        raise ConfigError(f"torch.distributed.checkpoint cannot hold this state: {error}.") from error
    found = {name: leaves[id(leaf)][1] if id(leaf) in leaves else leaf for name, leaf in names.items()}
    empty = {".".join(map(str, path)): path for path in _empty_dicts(tree)}  # which DCP itself leaves out
    return found | {name: {} for name in empty}, dict(paths) | empty


def _empty_dicts(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict):
        if not value and path:
            yield path
        for key, item in value.items():
            yield from _empty_dicts(item, (*path, str(key)))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _empty_dicts(item, (*path, number))


def changed(tree: Any, path: str) -> dict[str, str]:
    """The keys that are no text below a path, which DCP does not keep as they are, with the reasons."""
    found: dict[str, str] = {}
    if isinstance(tree, dict) and (others := sorted({type(key).__name__ for key in tree if not isinstance(key, str)})):
        found[f"keys of {path}"] = f"{', '.join(others)}: torch.distributed.checkpoint makes text of them"
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found |= changed(value, f"{path}.{key}")
    return found


def write_folder(
    path: str,
    tensors: dict[str, ShardedEntry],
    values: dict[str, Any],
    advance: Callable[[int], None],
    paths: Mapping[str, Any] | None = None,
) -> None:
    """Write the tensors and other values by their names. `advance` is told the bytes of each shard.

    `paths` are the keys that lead to each in a nested state dict.
    """
    writer = FileSystemWriter(os.fspath(path), single_file_per_rank=True, thread_count=1)
    with warnings.catch_warnings(), first_error_raised():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is not asked for, either
        save({}, storage_writer=writer, planner=_Planner(tensors, values, advance, paths), no_dist=True)


class _Planner(SavePlanner):
    """Plans shards, and reads each of them when it is written."""

    def __init__(
        self,
        tensors: dict[str, ShardedEntry],
        values: dict[str, Any],
        advance: Callable[[int], None],
        paths: Mapping[str, Any] | None,
    ) -> None:
        self._paths = paths
        self._held: torch.Tensor | None = None
        self._tensors = tensors
        self._values = values
        self._advance = advance
        self._shards = {(name, shard.offsets): shard for name, entry in tensors.items() for shard in entry.shards}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([*self._items()])

    def _items(self) -> Iterator[WriteItem]:
        for name, entry in self._tensors.items():
            for shard in entry.shards:
                offsets = torch.Size(shard.offsets)
                chunk = ChunkStorageMetadata(offsets, torch.Size(shard.sizes))
                data = TensorWriteData(chunk, TensorProperties(dtype=entry.dtype), torch.Size(entry.shape))
                yield WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)
        for name in self._values:
            yield WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, replace(metadata, planner_data=self._paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def _release(self) -> None:
        """Give back the memory of the shard before: the writer keeps every tensor until its file is complete."""
        if self._held is not None:
            self._held.untyped_storage().resize_(0)
            self._held = None

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name, offset = write_item.index.fqn, write_item.index.offset
        if offset is not None:
            self._release()
            self._held = self._shards[name, tuple(offset)].read()
            self._advance(self._held.nbytes)
            return self._held
        data = io.BytesIO()
        torch.save(self._values[name], data)
        return data
