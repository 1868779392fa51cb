"""A part whose tensors are spread over ranks: who writes which piece, and where each piece is found again.

Every rank works this out alone, from the tensors it has: all ranks see the same names, shapes and layouts. Of a piece
that several ranks hold, one writes; large ones are shared out among them by size.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ckpt.errors import DamagedError
from ckpt.formats.layout import Box, Layout, gathered, is_sharded, layout_of, local_tensor
from ckpt.formats.native import dtypes
from ckpt.formats.native.tensor_file import TensorFile
from ckpt.formats.native.tensor_file_plan import SMALL
from ckpt.formats.state import Shard
from ckpt.formats.tensor_bytes import narrowed

EVERY = -1  # in place of the number of a copy: all copies are written


@dataclass(frozen=True)
class ShardSpec:
    """A tensor: what it is, how it is spread, and which of its copies is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout
    copy: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ShardTable:
    """All tensors of a part by name. A tied tensor is an alias of the one that is stored."""

    tensors: dict[str, ShardSpec]
    aliases: dict[str, str] = field(default_factory=dict)

    def with_every_copy(self) -> ShardTable:
        """The same, but for ranks that cannot read each other's files: each writes all that it holds."""
        return ShardTable({name: replace(one, copy=EVERY) for name, one in self.tensors.items()}, self.aliases)

    def to_json(self) -> dict[str, Any]:
        layouts = list(dict.fromkeys(one.layout for one in self.tensors.values()))
        number = {layout: index for index, layout in enumerate(layouts)}
        rows = {
            name: [dtypes.name_of(one.dtype), list(one.shape), number[one.layout], one.copy]
            for name, one in self.tensors.items()
        }
        return {"layouts": [layout.to_json() for layout in layouts], "tensors": rows, "aliases": self.aliases}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ShardTable:
        layouts = [Layout.from_json(one) for one in fields["layouts"]]
        rows = {
            name: ShardSpec(dtypes.by_name(dtype), tuple(shape), layouts[number], copy)
            for name, (dtype, shape, number, copy) in fields["tensors"].items()
        }
        return cls(rows, dict(fields["aliases"]))


@dataclass(frozen=True)
class ShardedState:
    """The state of a spread part on one rank: JSON with references, who has what, and this rank's live tensors."""

    kind: str
    values: Any
    table: ShardTable
    tensors: Mapping[str, Any]
    frozen: frozenset[str] = frozenset()  # tensors that training does not change
    about: Mapping[str, Any] = field(default_factory=dict)  # JSON: what others need to build the object again

    @property
    def outlines(self) -> dict[str, torch.Tensor]:
        """Every stored tensor as it would be whole, without its data."""
        return {
            name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in self.table.tensors.items()
        }

    def gather(self, name: str) -> torch.Tensor:
        """A tensor, whole, on the main rank at least. Every rank makes this call."""
        tensor = self.tensors[name]
        whole: torch.Tensor = gathered(tensor) if is_sharded(tensor) else tensor
        return whole


@torch.no_grad()  # a piece of a DTensor is then the piece itself, without a step of autograd
def spread(tensors: Mapping[str, Any], world_size: int) -> ShardTable:
    """How these live tensors are spread. Plain ones are taken to be the same on every rank."""
    aliases = _aliases(tensors)
    everywhere = Layout.replicated(world_size)
    found = {
        name: ShardSpec(tensor.dtype, tuple(tensor.size()), layout_of(tensor) if is_sharded(tensor) else everywhere)
        for name, tensor in tensors.items()
        if name not in aliases
    }
    return ShardTable(_shared_out(found), aliases)


def _aliases(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Tensors that are another one, or lie in the same memory. A piece that is empty has no memory to tell by."""
    first: dict[Any, str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        piece = local_tensor(tensor) if is_sharded(tensor) else tensor
        keys: list[Any] = [id(tensor)]
        if piece.numel():
            keys.append((piece.device, piece.data_ptr(), piece.dtype, piece.shape, piece.stride(), tensor.size()))
        known = next((first[key] for key in keys if key in first), name)
        for key in keys:
            first.setdefault(key, known)
        if known != name:
            aliases[name] = known
    return aliases


def _shared_out(tensors: Mapping[str, ShardSpec]) -> dict[str, ShardSpec]:
    """Give each tensor that several ranks hold to the copy that has least to write so far, the largest first.

    Small ones are all the first copy's, so that whoever wants them finds them together.
    """
    loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    chosen = dict(tensors)
    for name in sorted(tensors, key=lambda name: (-tensors[name].size, name)):
        one = tensors[name]
        if one.layout.copies > 1 and one.size >= SMALL:
            heap = loads.setdefault((one.layout.copies, *one.layout.ranks), [(0, n) for n in range(one.layout.copies)])
            load, copy = heapq.heappop(heap)
            heapq.heappush(heap, (load + one.size, copy))
            chosen[name] = ShardSpec(one.dtype, one.shape, one.layout, copy)
    return chosen


@torch.no_grad()
def written_by(table: ShardTable, tensors: Mapping[str, Any], rank: int) -> dict[str, Shard]:
    """The pieces that a rank writes."""
    mine = {}
    for name, one in table.tensors.items():
        if one.layout.holds(rank) and one.copy in (EVERY, one.layout.copy_of(rank)):
            box = one.layout.box(one.shape, rank)
            if not box.is_empty or not math.prod(one.shape):
                tensor = tensors[name]
                piece = local_tensor(tensor) if is_sharded(tensor) else tensor
                mine[name] = Shard(piece, one.shape, box.offsets)
    return mine


@dataclass
class ShardedTensors:
    """The tensors of a spread part in a checkpoint. Only the files that hold a wanted piece are opened."""

    table: ShardTable
    open: Callable[[int], list[TensorFile]]  # the files that a rank has written
    rank: int = 0  # whose own files come first
    here: Callable[[int], bool] = lambda rank: True  # whether the files that a rank has written can be read
    _opened: dict[int, list[TensorFile]] = field(default_factory=dict)
    _whole: dict[str, torch.Tensor] = field(default_factory=dict)

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        one = self._entry(name)
        return one.dtype, one.shape

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, whole and plain, in new memory. Tied ones are one."""
        name = self.table.aliases.get(name, name)
        if name not in self._whole:
            one = self._entry(name)
            self._whole[name] = torch.empty(one.shape, dtype=one.dtype)
            self.fill(name, self._whole[name], Box((0,) * len(one.shape), one.shape))
        return self._whole[name]

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        """Fill `target`, which is the given box of a tensor."""
        name = self.table.aliases.get(name, name)
        one = self._entry(name)
        for rank, piece, there in one.layout.overlaps(one.shape, self._copy(one, box), box):
            self._file(rank, name).fill(name, narrowed(target, there), piece)

    def _copy(self, one: ShardSpec, box: Box) -> int:
        """The copy to read. Where every copy was written, this rank's own; or another one that can be read here."""
        if one.copy != EVERY:
            return one.copy
        own = one.layout.copy_of(self.rank) if one.layout.holds(self.rank) else 0
        for copy in (own, *(number for number in range(one.layout.copies) if number != own)):
            if all(self.here(rank) for rank, _, _ in one.layout.overlaps(one.shape, copy, box)):
                return copy
        return own

    def _entry(self, name: str) -> ShardSpec:
        try:
            return self.table.tensors[self.table.aliases.get(name, name)]
        except KeyError:
            raise DamagedError(f"the checkpoint refers to tensor {name!r}, but does not say where it is.") from None

    def _file(self, rank: int, name: str) -> TensorFile:
        if rank not in self._opened:
            self._opened[rank] = self.open(rank)
        for file in self._opened[rank]:
            if name in file.stored:
                return file
        raise DamagedError(f"rank {rank} has written no piece of tensor {name!r}, though the checkpoint says so.")


def disagreements(tables: Mapping[int, ShardTable]) -> Iterator[tuple[str, list[str]]]:
    """Tensors that ranks see differently: for each, what which ranks say."""
    for name in sorted({name for table in tables.values() for name in table.tensors}):
        said: dict[str, list[str]] = defaultdict(list)
        for rank, table in tables.items():
            one = table.tensors.get(name)
            said[f"{dtypes.name_of(one.dtype)}{list(one.shape)}" if one else "nothing"].append(str(rank))
        if len(said) > 1:
            yield name, [f"{text} on rank {', '.join(ranks)}" for text, ranks in said.items()]
