"""Trees of plain values and dense tensors: once containers and tensors have been copied, they can be encoded later."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from ckpt.formats.sharded_tensors import ShardOutline, is_sharded, local_tensor
from ckpt.formats.state import Unsharded

_SCALARS = frozenset({bool, int, float, str, type(None)})
_KEYS = frozenset({str, int})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_TOO_DEEP = 50
_NEVER = tuple(map(attrgetter, ("is_nested", "is_quantized", "is_meta", "is_xla")))
_NO_LAZY_BITS = (torch.Tensor.is_conj, torch.Tensor.is_neg)


class NotPlainError(Exception):
    """A tree has something in it that only its encoding can judge."""


class PlainTrees:
    """Copies the containers of trees, and collects their tensors. Nothing in them can be refused when it is encoded."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []  # plain or sharded, as they are in the trees
        self.local: list[torch.Tensor] = []  # of each, this rank's shard or itself
        self.sharded: dict[int, ShardOutline] = {}  # by identity

    def copy(self, value: Any, depth: int = 0) -> Any:
        """The tree with containers of its own and the same tensors. Raises `NotPlainError` for anything else."""
        kind = type(value)
        if kind is dict or kind is OrderedDict:
            if depth > _TOO_DEEP or not _KEYS.issuperset(map(type, value)):
                raise NotPlainError
            return kind(zip(value, self._items(value.values(), depth), strict=True))
        if kind is list or kind is tuple:
            if depth > _TOO_DEEP:
                raise NotPlainError
            return kind(self._items(value, depth))
        return self._items((value,), depth)[0]

    def _items(self, values: Any, depth: int) -> list[Any]:
        items = list(values)
        for index, item in enumerate(items):  # most are tensors, and training waits
            kind = type(item)
            if kind in _TENSORS:
                self.tensors.append(item)
                self.local.append(item)
            elif kind not in _SCALARS:
                items[index] = self._container(item, depth + 1)
        return items

    def _container(self, value: Any, depth: int) -> Any:
        if type(value) in (dict, OrderedDict, list, tuple):
            return self.copy(value, depth)
        if type(value) is Unsharded:
            return Unsharded(*self._items(value, depth))
        if not is_sharded(value) or not hasattr(value, "device_mesh"):  # FSDP 1 has objects of its own
            raise NotPlainError
        local = local_tensor(value)
        if local.device.type != value.device_mesh.device_type:  # offloaded: PyTorch would build it on the device
            raise NotPlainError
        self.tensors.append(value)
        self.local.append(local)
        self.sharded[id(value)] = ShardOutline.of(value)
        return value

    def require_dense(self) -> None:
        """Raise `NotPlainError` if the memory of some tensor is not exactly its values, in order."""
        if not are_dense(self.local):
            raise NotPlainError


def are_dense(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are strided and contiguous, and their values are those in memory. In loops of C: training waits."""
    return (
        {torch.strided}.issuperset(map(attrgetter("layout"), tensors))
        and not any(any(map(has, tensors)) for has in _NEVER)
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(any(map(has, tensors)) for has in _NO_LAZY_BITS)
    )
