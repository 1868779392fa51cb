"""Folders of `torch.distributed.checkpoint`: `.metadata`, and the shards of tensors in `*.distcp`.

`.metadata` is a pickle. It is read as data, with a list of the names that may occur in it: nothing is executed.
Every shard in a `.distcp` file is a tensor as `torch.save` writes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ckpt.errors import DamagedError
from ckpt.formats.checks import Sizes, checked_shape, checked_sizes, damage_reported, of_type
from ckpt.formats.foreign.torch_save import (
    DEEPEST,
    DTYPES,
    Described,
    find_tensor,
    read_pickle,
    read_values,
    stored_dtype,
)
from ckpt.formats.layout import Box
from ckpt.formats.native import tensor_file
from ckpt.formats.pieces import Piece, PiecedTensor, check_complete
from ckpt.formats.tensors import ByteReader, FolderReader

METADATA = ".metadata"
SUFFIX = ".distcp"
_LARGEST_METADATA = 1 << 30  # bytes
_MOST_TIES = 16  # tensors that may share their bytes
_HOME = "torch.distributed.checkpoint"
_TENSOR = f"{_HOME}.metadata.TensorStorageMetadata"
_SIZE = "torch.Size"
_OF_METADATA = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
    "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_ALLOWED = frozenset(
    (
        *(f"{_HOME}.metadata.{name}" for name in _OF_METADATA),
        *(f"{_HOME}.planner.{name}" for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
        *(f"{_HOME}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
        *(f"megatron.core.dist_checkpointing.strategies.torch.{name}" for name in ("MCoreMetadata", "MCoreSavePlan")),
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
        *("torch.serialization._get_layout", _SIZE, "collections.OrderedDict", *DTYPES),
    )
)


@dataclass(frozen=True)
class Chunk:
    """A saved shard of a tensor: its box, and the bytes of a file that hold it."""

    box: Box
    path: str
    start: int
    length: int


Keys = tuple[str | int, ...]  # the path in a nested state dict; integers are indices of lists


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint. `keys` is its path in the nested state dict."""

    keys: Keys
    dtype: torch.dtype
    shape: Sizes
    chunks: tuple[Chunk, ...]

    def pieced(self, name: str, opened: Callable[[str], ByteReader], where: str) -> PiecedTensor:
        """The tensor with its pieces located in the files. `opened` returns the reader of a path."""
        pieces = (self._piece(name, chunk, opened, where) for chunk in self.chunks)
        return PiecedTensor(self.dtype, self.shape, tuple(pieces))

    def _piece(self, name: str, chunk: Chunk, opened: Callable[[str], ByteReader], where: str) -> Piece:
        file = f"{where}/{chunk.path}"
        region = find_tensor(opened(chunk.path), chunk.start, chunk.length, file)
        if (region.dtype, region.sizes) != (self.dtype, chunk.box.sizes):
            claimed, found = _dtype_and_shape(self.dtype, chunk.box.sizes), _dtype_and_shape(region.dtype, region.sizes)
            raise DamagedError(f"{file} does not match {METADATA}: its {name} is {found}, not {claimed}.")
        return Piece(chunk.box, region)


@dataclass(frozen=True)
class StoredValue:
    """A value that is no tensor: the bytes of a file that hold it, as `torch.save` writes it."""

    keys: Keys
    path: str
    start: int
    length: int

    def read(self, opened: Callable[[str], ByteReader], where: str) -> Any:
        """The value, read without executing anything."""
        return read_values(opened(self.path), self.start, self.length, f"{where}/{self.path}")


@dataclass(frozen=True)
class Contents:
    """The tensors and other values of a folder, by their names in `.metadata`."""

    tensors: Mapping[str, StoredTensor]
    others: Mapping[str, StoredValue] = field(default_factory=dict)

    def of_part(self, part: str) -> Contents:
        """The contents below a key of the nested state dict, by the names below it."""
        return Contents(_of_part(self.tensors, part), _of_part(self.others, part))

    def parts(self) -> list[str]:
        """The outermost keys under which tensors are nested."""
        return sorted({str(tensor.keys[0]) for tensor in self.tensors.values() if len(tensor.keys) > 1})

    def needed_files(self) -> dict[str, int]:
        """The files that hold all of it, and the least size of each."""
        needed = defaultdict(int, needed_files(self.tensors.values()))
        for value in self.others.values():
            needed[value.path] = max(needed[value.path], value.start + value.length)
        return dict(needed)

    def check_lengths(self) -> None:
        """Refuse a folder that has the same bytes of its files as many tensors: together they could fill any memory."""
        claimed = sum(chunk.length for tensor in self.tensors.values() for chunk in tensor.chunks)
        if claimed > _MOST_TIES * sum(self.needed_files().values()):
            raise ValueError(f"its tensors claim {claimed} bytes, far more than the files have")

    def tree(self, opened: Callable[[str], ByteReader], where: str) -> Any:
        """The nested state dict, with `PiecedTensor`s that have not been read."""
        tensors = {name: tensor.pieced(name, opened, where) for name, tensor in self.tensors.items()}
        check_complete(tensors, where)
        leaves = [(tensor.keys, tensors[name]) for name, tensor in self.tensors.items()]
        others = [(value.keys, value.read(opened, where)) for value in self.others.values()]
        return _with_optimizers(_nested([*leaves, *others]))


_Stored = TypeVar("_Stored", StoredTensor, StoredValue)


def _of_part(stored: Mapping[str, _Stored], part: str) -> dict[str, _Stored]:
    found = [(".".join(map(str, below)), item) for item in stored.values() if (below := _below(item.keys, part))]
    if len({name for name, _ in found}) != len(found):
        raise DamagedError(f"{METADATA} gives several values of {part} the same name.")
    return dict(found)


def _below(keys: Keys, part: str) -> Keys:
    return keys[keys.index(part) + 1 :] if part in keys[:-1] else ()


def _nested(leaves: Iterable[tuple[Keys, Any]]) -> Any:
    """The nested state dict of these leaves. Integer keys make lists."""
    below: dict[str | int, list[tuple[Keys, Any]]] = defaultdict(list)
    for keys, value in leaves:
        if not keys:
            return value
        below[keys[0]].append((keys[1:], value))
    found = {key: _nested(inside) for key, inside in below.items()}
    numbers = sorted(key for key in found if isinstance(key, int))
    return [found[number] for number in numbers] if len(numbers) == len(found) else found


def _with_optimizers(tree: Any) -> Any:
    """The tree with the state of optimizers as `state_dict()` has it.

    DCP makes text of keys that are numbers, which an optimizer would take for no parameter of its own, and leaves out
    empty dicts, such as the `state` of plain SGD.
    """
    if not isinstance(tree, dict):
        return tree
    groups = tree.get("param_groups")
    if isinstance(groups, list) and groups and all(isinstance(group, dict) and "params" in group for group in groups):
        params = [name for group in groups for name in group["params"]]
        numbers = {str(number): number for number in params if type(number) is int}
        state = tree.get("state", {})
        named = {numbers.get(key, key): value for key, value in state.items()} if isinstance(state, dict) else state
        return {**tree, "state": named}
    return {key: _with_optimizers(value) for key, value in tree.items()}


def contents_of(folder: FolderReader) -> Contents:
    """What a folder holds, or a `DamagedError`: a save that was cut off has no metadata."""
    where = f"{folder.where}/{METADATA}"
    if METADATA not in folder.files:
        raise DamagedError(
            f"{where} is missing. PyTorch writes this file last, after the {SUFFIX} files, so the save was "
            "interrupted. Load an older checkpoint."
        )
    if folder.files[METADATA] > _LARGEST_METADATA:
        raise DamagedError(f"{where} is too large to be real: {folder.files[METADATA]} bytes.")
    return read_metadata(folder.opened(METADATA).read(0, folder.files[METADATA]), where)


def read_metadata(data: bytes, where: str) -> Contents:
    """The contents of a DCP folder. `where` names the file in errors."""
    with damage_reported(where, f"metadata file of {_HOME}"):
        contents = _contents(read_pickle(data, _ALLOWED, where).state)
        contents.check_lengths()
        return contents


def _contents(state: Mapping[str, Any]) -> Contents:
    paths = state.get("planner_data") or {}
    chunks = _chunks(state["storage_data"])
    values = _values(state["storage_data"])
    tensors: dict[str, StoredTensor] = {}
    others: dict[str, StoredValue] = {}
    for name, entry in state["state_dict_metadata"].items():
        keys = _checked_keys(paths.get(name, (name,)))
        if entry.name == _TENSOR:
            tensors[name] = _stored(keys, entry.state, chunks[name])
        else:
            others[name] = StoredValue(keys, *_place(values[name]))
    return Contents(tensors, others)


def _checked_keys(keys: tuple[Any, ...]) -> Keys:
    if len(keys) > DEEPEST or any(type(key) not in (int, str) for key in keys):
        raise ValueError(
            f"ckpt can't read a value whose path has {len(keys)} keys of the types "
            f"{sorted({type(key).__name__ for key in keys})}"
        )
    return tuple(keys)


def _stored(keys: Keys, state: Mapping[str, Any], chunks: Mapping[Sizes, Mapping[str, Any]]) -> StoredTensor:
    """A tensor with its chunks. A chunk without a file is left out, so that it counts as missing."""
    boxes = {box.offsets: box for box in map(_box, state["chunks"]) if not box.is_empty}
    listed = [_chunk(box, chunks[offsets]) for offsets, box in boxes.items() if offsets in chunks]
    return StoredTensor(keys, stored_dtype(state["properties"].state[0].name), _sizes(state["size"]), tuple(listed))


def _box(chunk: Described) -> Box:
    return Box(_sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"]))


def _chunk(box: Box, info: Mapping[str, Any]) -> Chunk:
    return Chunk(box, *_place(info))


def _place(info: Mapping[str, Any]) -> tuple[str, int, int]:
    """A file, and the start and length of a range in it."""
    if info.get("transform_descriptors"):
        raise ValueError(
            f"{info['relative_path']} was written with the transforms {info['transform_descriptors']}, but ckpt reads "
            "only plain files"
        )
    start, length = checked_sizes((info["offset"], info["length"]))
    return of_type(str, info["relative_path"]), start, length


def _chunks(storage: Mapping[Described, Described]) -> dict[str, dict[Sizes, Mapping[str, Any]]]:
    """The storage info of each chunk, by the tensor's name and the chunk's offsets."""
    found: dict[str, dict[Sizes, Mapping[str, Any]]] = defaultdict(dict)
    for index, info in storage.items():
        offset = index.state.get("offset")
        if offset is not None:
            found[of_type(str, index.state["fqn"])][_sizes(offset)] = info.state
    return found


def _values(storage: Mapping[Described, Described]) -> dict[str, Mapping[str, Any]]:
    """The storage info of every value that has no chunks."""
    return {
        of_type(str, index.state["fqn"]): info.state
        for index, info in storage.items()
        if index.state.get("offset") is None
    }


def _sizes(size: Described) -> Sizes:
    if size.name != _SIZE:
        raise ValueError(f"expected a size, found {size.name}")
    return checked_shape(size.arguments[0])


def _dtype_and_shape(dtype: torch.dtype, shape: Sizes) -> str:
    return f"{tensor_file.dtype_name(dtype)}{list(shape)}"


def needed_files(tensors: Iterable[StoredTensor]) -> dict[str, int]:
    """The files that hold these tensors, and the least size of each."""
    needed: dict[str, int] = defaultdict(int)
    for chunk in (chunk for tensor in tensors for chunk in tensor.chunks):
        needed[chunk.path] = max(needed[chunk.path], chunk.start + chunk.length)
    return dict(needed)
