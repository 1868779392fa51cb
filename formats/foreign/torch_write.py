"""Writes what torch reads: files of `torch.save`, folders of `torch.distributed.checkpoint`, files for Accelerate.

Tensors are streamed, one in memory at a time: first the file without data, then every tensor. The pickles are written
by torch's own writers, and hold what a checkpoint of ckpt holds: containers, numbers, text, tensors.
"""

from __future__ import annotations

import copy
import io
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import skip_data

from ckpt.errors import CkptError, ConfigError
from ckpt.formats.checks import Sizes
from ckpt.formats.foreign.accelerate import RNG_DEVICES, in_memory, rng_key
from ckpt.formats.foreign.hf_safetensors import LiveTensor, StreamedTensor
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.tensors import host_bytes
from ckpt.util.filesystem import sync

_MEANT = (CkptError, OSError, KeyboardInterrupt)


@contextmanager
def first_error_raised() -> Iterator[None]:
    """Raise the error that came first, where PyTorch raises another one from it, or lists it by rank."""
    try:
        yield
    except BaseException as error:  # CheckpointException is no Exception
        meant = next((one for one in _behind(error) if isinstance(one, _MEANT)), None)
        if meant is None or meant is error:
            raise
        raise meant from None


def _behind(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from or while handling, the last one first."""
    left, seen = [error], set()
    while left:
        one = left.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        failures = getattr(one, "failures", None)
        inner = [failure[0] for failure in failures.values()] if isinstance(failures, dict) else []
        left += [other for other in (*inner, one.__cause__, one.__context__) if isinstance(other, BaseException)]


_LOCAL = struct.Struct("<4s10xL8xHH")  # of an entry: its signature, its checksum, the lengths of its name and extra
_LISTED = struct.Struct("<4s12xL8xHHH")  # the same in the directory at the end, with the length of a comment
_LISTED_SIZE = 46
_CRC_AT, _LISTED_CRC_AT = 14, 16  # where these have the checksum


def write_file(path: str, tree: Any, advance: Callable[[int], None]) -> None:
    """Write a value that has `PiecedTensor`s in it to a new file, and sync it to disk. `advance` is told of bytes.

    What lies in the same place, or is the same object, as tied weights are, is saved once.
    """
    with open(path, "x+b") as file, first_error_raised():
        if _has_subclasses(tree):  # which are saved as torch saves them, from memory
            torch.save(in_memory(tree), file)
            sync(file.fileno())
            return
        skeleton = _Skeleton()
        with skip_data():
            torch.save(skeleton.of(tree), file)
        sums = {name: _fill(file, place, skeleton.tensors[name], advance) for name, place in _places(file)}
        _write_checksums(file, sums)
        file.flush()
        sync(file.fileno())


def _has_subclasses(value: Any) -> bool:
    """Whether there are tensors of special kinds in a value: of torchao, of bitsandbytes."""
    if isinstance(value, dict):
        return any(map(_has_subclasses, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_subclasses, value))
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter)


class _Skeleton:
    """A value whose tensors are never written to, and so take no memory but addresses.

    `tensors` has them by the number under which `torch.save` stores each.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, StreamedTensor] = {}
        self._done: dict[Any, torch.Tensor] = {}
        self._kept: list[Any] = []  # or a new object could get the identity of one that was freed

    def of(self, value: Any) -> Any:
        if isinstance(value, PiecedTensor | torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            new = copy.copy(value)  # also a Counter, or an OrderedDict
            for key, item in value.items():
                new[key] = self.of(item)
            return new
        if type(value) in (list, tuple, set):
            return type(value)(map(self.of, value))
        return value

    def _tensor(self, value: PiecedTensor | torch.Tensor) -> torch.Tensor:
        identity: Any = id(value)
        if isinstance(value, PiecedTensor) and value.size:
            identity = value.dtype, value.shape, frozenset(value.pieces)
        if identity not in self._done:
            self._kept.append(value)
            shape = tuple(value.shape)
            self._done[identity] = torch.empty(shape, dtype=value.dtype)
            source = LiveTensor(value.dtype, shape, value.detach) if isinstance(value, torch.Tensor) else value
            self.tensors[str(len(self.tensors))] = source
        return self._done[identity]


def _places(file: IO[bytes]) -> Iterator[tuple[str, tuple[int, int]]]:
    """The number of every tensor in the file, with the offset and the length of its data."""
    with zipfile.ZipFile(file) as archive:
        entries = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    for entry in entries:
        file.seek(entry.header_offset)
        _, _, name, extra = _LOCAL.unpack(file.read(_LOCAL.size))
        yield entry.filename.rpartition("/")[2], (entry.header_offset + _LOCAL.size + name + extra, entry.file_size)


def _fill(file: IO[bytes], place: tuple[int, int], tensor: StreamedTensor, advance: Callable[[int], None]) -> int:
    """Write the data of a tensor to its place. Returns the checksum."""
    start, length = place
    checksum, at = 0, start
    for slab in tensor.slabs() if length else ():
        data = host_bytes(slab)
        file.seek(at)
        file.write(data)
        checksum, at = zlib.crc32(data, checksum), at + len(data)
        advance(len(data))
    if at != start + length:
        raise RuntimeError(f"wrote {at - start} bytes of a tensor instead of {length}")
    return checksum


def _write_checksums(file: IO[bytes], sums: dict[str, int]) -> None:
    """Write the checksums of data into the archive's directory and before the data: torch left them out."""
    with zipfile.ZipFile(file) as archive:
        listed, headers = archive.start_dir, [(entry.filename, entry.header_offset) for entry in archive.infolist()]
    for path, header in headers:
        file.seek(listed)
        _, _, *lengths = _LISTED.unpack(file.read(_LISTED.size))
        number = path.rpartition("/")[2]
        if "/data/" in path:
            for at in (header + _CRC_AT, listed + _LISTED_CRC_AT):
                file.seek(at)
                file.write(struct.pack("<L", sums[number]))
        listed += _LISTED_SIZE + sum(lengths)


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
        flattening = DefaultSavePlanner()
        flattening.set_up_planner(stand_in(tree))
        names, paths = flattening.state_dict, flattening.mappings
    except ValueError as error:  # `a.b` beside a dict `a` with a key `b`
        raise ConfigError(f"torch.distributed.checkpoint can't hold this state: {error}.") from error
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


_STEMS = {
    "model": ("model", ".safetensors"),
    "optimizer": ("optimizer", ".bin"),
    "scheduler": ("scheduler", ".bin"),
    "scaler": ("scaler", ".pt"),
    "dataloader": ("dl_state_dict", ".bin"),
}
_NUMPY_FIELDS = ("bit_generator", "state", "has_gauss", "gauss")


def file_of(kind: str, number: int) -> str:
    """The name of a file. The first of several has no number."""
    if kind in ("custom", "random_states"):
        return f"{'custom_checkpoint' if kind == 'custom' else kind}_{number}.pkl"
    stem, suffix = _STEMS[kind]
    return f"{stem}_{number}{suffix}" if number else f"{stem}{suffix}"


def pickled_model(number: int) -> str:
    """The name of the file of a model whose state safetensors cannot hold."""
    return file_of("model", number).replace("model", "pytorch_model").replace(".safetensors", ".bin")


def write_values(path: str, values: Any) -> None:
    """Write plain data to a new file, and sync it to disk."""
    with open(path, "xb") as file:
        torch.save(values, file)
        file.flush()
        sync(file.fileno())


def random_states(rng: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The content of `random_states_N.pkl`, for a rank whose generators `ckpt.state.rng` has captured."""
    states = {"step": step, "random_state": rng["python"], "numpy_random_seed": _numpy_state(rng.get("numpy"))}
    states["torch_manual_seed"] = rng["torch"]
    return states | {rng_key(kind): list(rng[kind]) for kind in RNG_DEVICES if kind in rng}


def _numpy_state(state: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """NumPy's state as a tuple; a fresh one for a run without NumPy, because Accelerate stops if it is missing."""
    import numpy as np

    if state is None:
        return tuple(np.random.RandomState(0).get_state(legacy=True))
    kind, inner, has_gauss, gauss = (state[key] for key in _NUMPY_FIELDS)
    return kind, inner["key"], inner["pos"], has_gauss, gauss
