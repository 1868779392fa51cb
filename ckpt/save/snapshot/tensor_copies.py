"""Copies of tensors that training cannot reach: made on their device, in the stream of training, or in host memory.

They stand for the tensors of a state, so that all that is left to do with it can be done while training continues. Many
tensors are copied at once by one call: per tensor, Python would take longer than the device.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ckpt.formats.sharded_tensors import ShardOutline
from ckpt.formats.tensors import as_bytes, is_dense, is_plain, memory_size, movable
from ckpt.save.snapshot import devices
from ckpt.save.snapshot.devices import Device

_ALIGNMENT = 64  # bytes, of copies in host memory
BLOCK = 256 << 20  # bytes that are copied at once: an allocator whose free memory is in pieces may have no more
_HEAD_START = 0.05  # seconds
_TOGETHER = 64 << 10  # bytes: smaller tensors on the host are copied together
_PART = 8 << 20  # bytes that a thread copies at a time
_COPYABLE = {
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
}  # fmt: skip


@dataclass
class Group:
    """Tensors of one dtype that are copied together, one after the other.

    `keys`: the identities of the tensors that they stand for, which of a sharded one is not this rank's shard.
    """

    keys: list[int] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes
    size: int = 0


@dataclass
class Leaves:
    """Tensors to copy, each once, by where they are: small ones on the host, large ones, and those on devices.

    `outlines`: the dtype and shape of each, by the identity of the tensor that it stands for; `sharded`: the tensors of
    which it is this rank's shard. Both as they are now: `model.half()` changes them in the live tensors.
    """

    outlines: dict[int, tuple[torch.dtype, torch.Size]]
    sharded: dict[int, ShardOutline]
    small: list[Group] = field(default_factory=list)
    large: Group = field(default_factory=Group)
    on_device: dict[torch.device, list[Group]] = field(default_factory=dict)
    are_dense: bool = True  # the memory of each is its values in order

    @classmethod
    def of(
        cls, tensors: Sequence[Any], local: Sequence[torch.Tensor], sharded: dict[int, ShardOutline]
    ) -> Leaves | None:
        """All of these, which are dense. None if some share memory: that must be known when they are encoded."""
        unique = dict(zip(map(id, tensors), local, strict=True))
        kept = list(unique.values())
        sizes = list(map(attrgetter("nbytes"), kept))
        if _overlap(map(torch.Tensor.data_ptr, kept), sizes):
            return None
        outlines = zip(map(attrgetter("dtype"), kept), map(attrgetter("shape"), kept), strict=True)
        leaves = cls(dict(zip(unique, outlines, strict=True)), sharded)
        leaves._divide(unique, sizes)
        return leaves

    @classmethod
    def last_of(cls, tensors: Sequence[torch.Tensor], room: Mapping[torch.device, int]) -> Leaves:
        """As many of these, from the last on, as their devices have room for. They may be of any order in memory.

        Training waits for the first ones, so that hashing and writing can begin with them.
        """
        left, chosen = dict(room), dict[int, torch.Tensor]()
        for tensor in reversed(tensors):
            left[tensor.device] -= tensor.nbytes
            if left[tensor.device] >= 0:
                chosen[id(tensor)] = tensor
            else:
                left[tensor.device] = 0  # what is before it stays, too, unless it is empty
        leaves = cls({}, {}, are_dense=False)
        leaves._divide(chosen, [tensor.nbytes for tensor in chosen.values()])
        return leaves

    def _divide(self, tensors: dict[int, torch.Tensor], sizes: list[int]) -> None:
        """Tensors of odd sizes are apart from others, as they would misalign them."""
        filling: dict[Any, Group] = {}
        for (key, tensor), size in zip(tensors.items(), sizes, strict=True):
            if not devices.is_on_host(tensor):
                kind: Any = (tensor.dtype, size % 16 == 0, tensor.device)
            elif size < _TOGETHER:
                kind = (tensor.dtype, True, None)
            else:
                kind = None
            group = filling.get(kind)
            if group is None or group.size >= BLOCK:
                group = filling[kind] = self._new_group(kind)
            group.keys.append(key)
            group.tensors.append(tensor)
            group.sizes.append(size)
            group.size += size

    def _new_group(self, kind: tuple[torch.dtype, bool, torch.device | None] | None) -> Group:
        if kind is None:
            return self.large
        group = Group()
        (self.small if kind[2] is None else self.on_device.setdefault(kind[2], [])).append(group)
        return group

    @cached_property
    def host_size(self) -> int:
        """Bytes of those on the host, aligned."""
        return sum(_aligned(group.size) for group in self.small) + sum(map(_aligned, self.large.sizes))

    @cached_property
    def sizes(self) -> dict[torch.device, int]:
        """Bytes of those on each device."""
        return {device: sum(group.size for group in groups) for device, groups in self.on_device.items()}


def _overlap(pointers: Iterable[int], sizes: Iterable[int]) -> bool:
    spans = sorted((start, size) for start, size in zip(pointers, sizes, strict=True) if size)
    return any(start + size > following for (start, size), (following, _) in pairwise(spans))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass
class TensorCopies:
    """The copies, by the identity of the tensor that each was made of. `devices`: those that the tensors are on."""

    leaves: Leaves
    devices: Mapping[torch.device, Device] = field(default_factory=dict)
    _on_device: list[tuple[Group, torch.Tensor]] = field(default_factory=list)
    _on_host: list[tuple[Group, torch.Tensor]] = field(default_factory=list)
    _give_back: Callable[[], None] = lambda: None  # the memory of those on the host
    _made: dict[int, Any] = field(default_factory=dict)
    _stays: bool = False
    _is_fetched: bool = False

    def of(self, tensor: Any) -> Any:
        """The copy of a tensor, with its dtype, shape and sharding; the same each time, as it may be tied."""
        key = id(tensor)
        if key not in self._made:
            dtype, shape = self.leaves.outlines[key]
            copy, outline = self._flat[key].view(dtype).view(shape), self.leaves.sharded.get(key)
            self._made[key] = copy if outline is None else outline.around(copy)
        return self._made[key]

    def bytes_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The bytes of the copy of a tensor, in the order of its file; None if there is no copy."""
        flat = self._flat.get(id(tensor))
        return None if flat is None else flat.view(torch.uint8)

    @cached_property
    def _flat(self) -> dict[int, torch.Tensor]:
        flat: dict[int, torch.Tensor] = {}
        for group, block in (*self._on_device, *self._on_host):
            counts = [size // block.element_size() for size in group.sizes]
            flat.update(zip(group.keys, block.split_with_sizes(counts), strict=True))
        return flat

    def add_on_devices(self) -> bool:
        """Enqueue copies of tensors on their devices, in the current streams. False if a device had no room for all."""
        made = [self._add_on(self.devices[device], groups) for device, groups in self.leaves.on_device.items()]
        return all(made)

    def _add_on(self, device: Device, groups: list[Group]) -> bool:
        taken = 0
        if device.room is None:
            return False
        try:
            for group in groups:
                self._on_device.append((group, _copied(group.tensors, are_dense=self.leaves.are_dense)))
                taken += group.size
        except torch.OutOfMemoryError:
            device.room.overestimated(taken)
        device.room.taken(taken)
        return taken == sum(group.size for group in groups)

    def let_training_go_ahead(self) -> None:
        """In the background, before the copies are encoded: that holds the GIL, and a device would wait meanwhile.

        By then training has launched the work of its next step, which keeps the device busy.
        """
        if self.leaves.on_device:
            time.sleep(_HEAD_START)

    def add_on_host(self, memory: torch.Tensor, give_back: Callable[[], None]) -> None:
        """Copy tensors on the host to this memory, of `host_size` bytes. It is given back by a call."""
        self._give_back, copies, start = give_back, list[TensorCopy](), 0
        for group in self.leaves.small:
            place = memory[start : start + group.size]
            self._on_host.append((group, _copied(group.tensors, place)))
            start += _aligned(group.size)
        large = self.leaves.large
        for key, tensor, size in zip(large.keys, large.tensors, large.sizes, strict=True):
            copies.append(TensorCopy("", tensor, start))
            self._on_host.append((Group([key], [], [size], size), memory[start : start + size]))
            start += _aligned(size)
        copy_on_host(copies, memory)

    def release_host(self) -> None:
        """Give back the host memory. The copies in it cannot be used any more."""
        give_back, self._give_back = self._give_back, lambda: None
        give_back()

    def forget_sources(self) -> None:
        """Hold the live tensors no longer: all have been copied."""
        for group in (*self.leaves.small, self.leaves.large, *chain(*self.leaves.on_device.values())):
            group.tensors = []

    def stay(self) -> None:
        """From now on, the memory on devices is needed after the fetch too: until `leave` or `release`."""
        self._stays = True

    def leave(self) -> None:
        """Nothing but the fetch needs the memory on devices any more: if that is done, give it back."""
        self._stays = False
        if self._is_fetched:
            self.release_devices()

    def release(self) -> None:
        """Give back all memory."""
        self._stays = False
        self.release_host()
        self.release_devices()

    def release_devices(self) -> None:
        """Give back the memory on devices, although there are tensors that use it: none of them is read any more."""
        self._is_fetched = True
        if self._stays:
            return
        blocks, self._on_device = self._on_device, []
        for _, block in blocks:
            block.untyped_storage().resize_(0)
        for device in self.devices.values() if blocks else ():
            if device.room is not None:
                device.room.released()


@torch.no_grad()
def _copied(tensors: list[torch.Tensor], target: torch.Tensor | None = None, *, are_dense: bool = True) -> torch.Tensor:
    """The elements of these tensors, one after the other, in every bit: in the target's bytes, or in a new tensor."""
    flat = [tensor.reshape(-1) for tensor in (tensors if are_dense else map(in_order, tensors))]
    kinds = set(map(attrgetter("dtype"), flat))
    if len(kinds) > 1 or not kinds <= _COPYABLE:
        flat = list(map(as_bytes, flat))
    return torch.cat(flat) if target is None else torch.cat(flat, out=target.view(flat[0].dtype))


@torch.no_grad()
def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory has the order of the file; a copy on its device if its own has another."""
    tensor = tensor.detach()
    return tensor if is_dense(tensor) else movable(tensor.resolve_conj().resolve_neg()).contiguous()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the order of the file; a copy if its memory has another."""
    if tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous():  # as a staged copy is already
        return tensor
    return as_bytes(in_order(tensor))


# Copies from the host to the host, in several threads.


class TensorCopy(NamedTuple):
    """A tensor to copy, and its place in the image of the snapshot. `is_live`: training can change it."""

    file: str  # the path of its file
    source: torch.Tensor
    start: int
    is_live: bool = False


_Part = tuple[int, int, int]  # target address, source address, number of bytes


def copy_on_host(copies: list[TensorCopy], memory: torch.Tensor) -> None:
    """Copy in several threads, which release the interpreter's lock."""
    base = memory.data_ptr()
    parts = []
    for copy in copies:
        if is_plain(copy.source):
            target, source, length = base + copy.start, copy.source.data_ptr(), memory_size(copy.source)
            parts += [(target + b, source + b, min(_PART, length - b)) for b in range(0, length, _PART)]
        else:
            memory[copy.start : copy.start + copy.source.nbytes].copy_(flat_bytes(copy.source))
    shares = _shares(parts)
    if len(shares) < 2:
        _copy_parts(parts)
        return
    with ThreadPoolExecutor(max(1, torch.get_num_threads()), thread_name_prefix="ckpt-copy") as pool:
        try:
            list(pool.map(_copy_parts, shares))
        except RuntimeError:  # at interpreter shutdown executors refuse work
            _copy_parts(parts)


def _shares(parts: list[_Part]) -> list[list[_Part]]:
    """Parts in groups that are large enough for a thread each."""
    shares: list[list[_Part]] = []
    room = 0
    for part in parts:
        if room <= 0:
            shares.append([])
            room = _PART
        shares[-1].append(part)
        room -= part[2]
    return shares


def _copy_parts(parts: list[_Part]) -> None:
    for part in parts:
        ctypes.memmove(*part)
