"""Copies of tensors that training cannot reach: made on their device, in the stream of training, or in host memory.

They stand for the tensors of a state, so that all that is left to do with it can be done while training continues. Many
tensors are copied at once by one call: per tensor, Python would take longer than the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import torch

from ckpt.formats.sharded_tensors import ShardOutline
from ckpt.save import snapshot_layout
from ckpt.save.staging_copy import TensorCopy, copy_on_host

_ALIGNMENT = 64  # bytes, of copies in host memory
BLOCK = 1 << 30  # bytes on a device that are copied at once
_HEAD_START = 0.05  # seconds
_TOGETHER = 64 << 10  # bytes: smaller tensors on the host are copied together
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

    @classmethod
    def of(
        cls, tensors: Sequence[Any], local: Sequence[torch.Tensor], sharded: dict[int, ShardOutline]
    ) -> Leaves | None:
        """None if some of them share memory: that must be known when they are encoded."""
        unique = dict(zip(map(id, tensors), local, strict=True))
        kept = list(unique.values())
        sizes = list(map(attrgetter("nbytes"), kept))
        if _overlap(map(torch.Tensor.data_ptr, kept), sizes):
            return None
        outlines = zip(map(attrgetter("dtype"), kept), map(attrgetter("shape"), kept), strict=True)
        leaves = cls(dict(zip(unique, outlines, strict=True)), sharded)
        leaves._divide(unique, sizes)
        return leaves

    def _divide(self, tensors: dict[int, torch.Tensor], sizes: list[int]) -> None:
        """Tensors of odd sizes are apart from others, as they would misalign them."""
        filling: dict[Any, Group] = {}
        for (key, tensor), size in zip(tensors.items(), sizes, strict=True):
            if not snapshot_layout.is_on_host(tensor):
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
        """Bytes of those on the host."""
        return sum(group.size for group in self.small) + self.large_size

    @cached_property
    def large_size(self) -> int:
        """Bytes of large ones on the host, aligned."""
        return sum(map(_aligned, self.large.sizes))

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
    """The copies, by the identity of the tensor that each was made of.

    `on_release`: called when the memory on devices has been given back.
    """

    leaves: Leaves
    on_release: Callable[[], None]
    _on_device: list[tuple[Group, torch.Tensor]] = field(default_factory=list)
    _on_host: list[tuple[Group, torch.Tensor]] = field(default_factory=list)
    _large: dict[int, torch.Tensor] = field(default_factory=dict)  # bytes in host memory that is given back by a call
    _give_back: Callable[[], None] = lambda: None
    _made: dict[int, Any] = field(default_factory=dict)

    def of(self, tensor: Any) -> Any:
        """The copy of a tensor, with its dtype, shape and sharding; the same each time, as it may be tied."""
        key = id(tensor)
        if key not in self._made:
            dtype, shape = self.leaves.outlines[key]
            copy, outline = self._flat[key].view(dtype).view(shape), self.leaves.sharded.get(key)
            self._made[key] = copy if outline is None else outline.around(copy)
        return self._made[key]

    @cached_property
    def _flat(self) -> dict[int, torch.Tensor]:
        flat = dict(self._large)
        for group, block in (*self._on_device, *self._on_host):
            counts = [size // block.element_size() for size in group.sizes]
            flat.update(zip(group.keys, block.split_with_sizes(counts), strict=True))
        return flat

    def add_on_devices(self) -> None:
        """Enqueue copies of tensors on their devices, in the current streams. A device may have no room for them."""
        for groups in self.leaves.on_device.values():
            for group in groups:
                self._on_device.append((group, _copied(group.tensors)))

    def let_training_go_ahead(self) -> None:
        """In the background, before the copies are encoded: that holds the GIL, and a device would wait meanwhile.

        By then training has launched the work of its next step, which keeps the device busy.
        """
        if self.leaves.on_device:
            time.sleep(_HEAD_START)

    def add_on_host(self, memory: torch.Tensor, give_back: Callable[[], None]) -> None:
        """Copy tensors on the host, large ones to this memory. It is given back by a call."""
        self._give_back, group = give_back, self.leaves.large
        self._on_host = [(group, _copied(group.tensors)) for group in self.leaves.small]
        copies, start = [], 0
        for key, tensor, size in zip(group.keys, group.tensors, group.sizes, strict=True):
            copies.append(TensorCopy("", tensor, start))
            self._large[key] = memory[start : start + size]
            start += _aligned(size)
        copy_on_host(copies, memory)

    def size_on(self, device: torch.device) -> int:
        """Bytes that the copies take on a device."""
        return sum(block.nbytes for _, block in self._on_device if block.device == device)

    def release_host(self) -> None:
        """Give back the host memory. The copies in it cannot be used any more."""
        give_back, self._give_back = self._give_back, lambda: None
        give_back()

    def forget_sources(self) -> None:
        """Hold the live tensors no longer: all have been copied."""
        for group in (*self.leaves.small, self.leaves.large, *chain(*self.leaves.on_device.values())):
            group.tensors = []

    def release(self) -> None:
        """Give back all memory."""
        self.release_host()
        self.release_devices()

    def release_devices(self) -> None:
        """Give back the memory on devices, although there are tensors that use it: none of them is read any more."""
        blocks, self._on_device = self._on_device, []
        for _, block in blocks:
            block.untyped_storage().resize_(0)
        if blocks:
            self.on_release()


@torch.no_grad()
def _copied(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A new tensor with the elements of these, one after the other, in every bit."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return torch.cat(flat if flat[0].dtype in _COPYABLE else [tensor.view(torch.uint8) for tensor in flat])
