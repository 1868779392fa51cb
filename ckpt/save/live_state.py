"""The state of live objects at a moment: trees of values and tensors, as their parts have given them out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch

from ckpt.formats.native import documents
from ckpt.formats.native.documents import Substitute, refuse
from ckpt.formats.native.shard_table import ShardedState
from ckpt.formats.sharded_tensors import ShardOutline, is_sharded, local_tensor
from ckpt.formats.tensors import PartState, Unsharded
from ckpt.save.captured_state import CapturedState, part_values
from ckpt.save.tensor_copies import Leaves, TensorCopies

# Trees of plain values and dense tensors: once containers and tensors have been copied, they can be encoded later.
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


@dataclass(frozen=True)
class LivePart:
    """The state of a part, with live tensors in it."""

    key: str
    kind: str
    tree: Any
    frozen: frozenset[str] = frozenset()
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LiveState:
    """What this rank has to save, not encoded yet.

    `finish`: adds what is found out about the encoded state. `leaves`: the tensors in the trees, if these are plain and
    have containers of their own; None if the state must be encoded before training continues.
    """

    state: CapturedState  # without the state of parts
    parts: Sequence[LivePart]
    sharded: Sequence[LivePart]
    gathered: Sequence[LivePart]
    own: Sequence[LivePart]
    problems: list[str]
    encode_sharded: Callable[[LivePart, Substitute | None, list[str]], ShardedState]
    finish: Callable[[CapturedState], CapturedState]
    leaves: Leaves | None = None
    encoded: CapturedState | None = None

    def prepared(self) -> LiveState:
        """The same with trees that training cannot change, but for their tensors; encoded if that cannot be had."""
        trees = PlainTrees()

        def copied(parts: Sequence[LivePart]) -> list[LivePart]:
            return [replace(part, tree=trees.copy(part.tree)) for part in parts]

        try:
            if self.gathered or self.problems:
                raise NotPlainError
            parts, sharded, own = copied(self.parts), copied(self.sharded), copied(self.own)
            trees.require_dense()
        except NotPlainError:
            return replace(self, encoded=self.encode())
        return replace(
            self, parts=parts, sharded=sharded, own=own, leaves=Leaves.of(trees.tensors, trees.local, trees.sharded)
        )

    def encode(self, copies: TensorCopies | None = None) -> CapturedState:
        """The state as files hold it, copies in place of live tensors. Refuses all values that no file can hold."""
        if self.encoded is not None:
            return self.encoded
        substitute = None if copies is None else copies.of
        problems: list[str] = []
        parts = {part.key: _encoded(part, substitute, problems) for part in self.parts}
        own = {part.key: _encoded(part, substitute, problems) for part in self.own}
        sharded, gathered = (
            {part.key: self.encode_sharded(part, substitute, problems) for part in found}
            for found in (self.sharded, self.gathered)
        )
        refuse([*problems, *self.problems])
        values = {**self.state.rank_values, "own": part_values(own)}
        state = replace(self.state, parts=parts, sharded=sharded, gathered=gathered, rank_parts=own, rank_values=values)
        finished = self.finish(state)
        return finished if copies is None else _with_known_fingerprints(finished)


def _encoded(part: LivePart, substitute: Substitute | None, problems: list[str]) -> PartState:
    state = documents.encode_part(part.kind, part.tree, part.key, problems, substitute)
    return replace(state, frozen=part.frozen, about=part.about)


def _with_known_fingerprints(state: CapturedState) -> CapturedState:
    """Wait for them: the copies that they are of may be released before somebody asks for them."""
    for read in state.fingerprints.values():
        read()
    return state
