"""Tensors apart from any file format: their bytes, their shards, the state of a part, the plan of a file, and reading.

Formats say which bytes of a file go where (`Transfer`). The reader decides when to read, how much at once, and in how
many threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from ckpt.errors import UnsupportedError


def device_obstacle(device: torch.device) -> str | None:
    """Why tensors on a device are neither saved nor loaded: torch_xla computes them later, when it is told to."""
    return "on an XLA device (TPU), which ckpt does not support" if device.type == "xla" else None


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy. The view keeps the tensor alive."""
    size = memory_size(tensor)
    if not size:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def memory_size(tensor: torch.Tensor) -> int:
    """The bytes of a contiguous tensor, which its storage has been checked to hold."""
    size, there = tensor.nbytes, tensor.untyped_storage().nbytes()
    if size and tensor.storage_offset() * tensor.element_size() + size > there:
        raise UnsupportedError(
            f"a {tensor.dtype} tensor of shape {list(tensor.shape)} has {there} bytes of memory, but its elements need "
            f"{size}. ckpt can't save or load such a tensor: convert it to another dtype."
        )
    return size


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor on any device, as a flat tensor of bytes."""
    memory_size(tensor)
    return tensor.view(-1).view(torch.uint8)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes can be read and written in place through `host_bytes`."""
    return tensor.is_cpu and is_dense(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory holds exactly its values, in order: contiguous, no lazy conjugate or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if `host_bytes` can read it, a plain CPU copy otherwise."""
    plain = tensor.detach()
    if not is_plain(plain):
        resolved = plain.resolve_conj().resolve_neg()
        plain = movable(resolved).contiguous().cpu().view(resolved.dtype)
    return plain


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory under a dtype that torch can copy: it has no copy kernel for int4 and the like."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are the same, bit for bit: a NaN equals itself, 0.0 is not -0.0."""
    return torch.equal(movable(first.flatten()).view(torch.uint8), movable(second.flatten()).view(torch.uint8))


def copy_into(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `source` into `target`, casting if the dtypes differ."""
    if source.dtype == target.dtype:
        source, target = movable(source), movable(target)
    target.copy_(source)


def narrowed(tensor: torch.Tensor, ranges: list[tuple[int, int]]) -> torch.Tensor:
    """A view of a box of the tensor. `ranges` are (start, length) for each dimension."""
    for dim, (start, length) in enumerate(ranges):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


class ByteReader(Protocol):
    """A file, as far as a format needs it."""

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`."""

    def read_into(self, start: int, *buffers: memoryview) -> None:
        """Fill the buffers one after the other with the bytes from `start` on."""


class FolderReader(Protocol):
    """A folder: the sizes of its files, and readers for them."""

    @property
    def where(self) -> str: ...

    @property
    def files(self) -> Mapping[str, int]: ...

    def opened(self, path: str) -> ByteReader: ...

    def below(self, name: str) -> FolderReader: ...

    def check(self, needed: Mapping[str, int]) -> None:
        """Raise one error that names every file that is missing or shorter than `needed` says."""


@dataclass(frozen=True)
class Transfer:
    """A range of bytes to read: straight into a tensor, or through a CPU buffer to a callback.

    `into` is a dense tensor on any device, whose bytes may be filled in any order. Without it, `take` gets all the
    bytes at once as a CPU tensor.
    """

    reader: Any = field(repr=False)
    start: int
    size: int
    into: torch.Tensor | None = field(default=None, repr=False)
    take: Callable[[torch.Tensor], None] | None = field(default=None, repr=False)

    @property
    def stop(self) -> int:
        return self.start + self.size


Want = Callable[[Transfer], None]


def at_once(transfer: Transfer) -> None:
    """Carry out a transfer now."""
    memory = transfer.into if transfer.into is not None else torch.empty(transfer.size, dtype=torch.uint8)
    here = memory if memory.device.type == "cpu" else torch.empty(transfer.size, dtype=torch.uint8)
    transfer.reader.read_into(transfer.start, host_bytes(here))
    if here is not memory:
        as_bytes(memory).copy_(here)
    if transfer.take is not None:
        transfer.take(memory)


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
    chunked: bool = False  # whether each item of a list in it has a file of its own
    about: Mapping[str, Any] = field(default_factory=dict)  # JSON that other tools need to rebuild the object


class FileHashes(NamedTuple):
    """What a manifest lists of a file: the hashes of its blocks, and that of its head."""

    blocks: tuple[str, ...]
    head: str


@dataclass(frozen=True)
class FilePlan:
    """A file to be written: its path, its size, and an iterator over its bytes that can be started anew.

    `likely_unchanged`: it probably equals the file of the previous checkpoint (frozen weights). `contents` are the
    bytes and named tensors that it consists of, in order; None if some are still to be fetched. `in_memory`: all pieces
    are in host memory and do not change until the file is written. `reserved`: the file of the storage that this memory
    is, if it is one. `hashes`: those of its bytes, if a device has computed them. `block_size`: of the blocks that are
    hashed, if it is not that of all files.
    """

    path: str
    size: int
    pieces: Callable[[], Iterator[memoryview]]
    likely_unchanged: bool = False
    contents: Sequence[bytes | tuple[str, torch.Tensor]] | None = None
    in_memory: bool = False
    head: int = 0  # bytes at its start (a header) that readers fetch separately
    reserved: Any = None
    hashes: FileHashes | None = None
    block_size: int = 0

    @classmethod
    def of(cls, path: str, data: bytes) -> FilePlan:
        return cls(path, len(data), lambda: iter((memoryview(data),)), contents=(data,), in_memory=True)
