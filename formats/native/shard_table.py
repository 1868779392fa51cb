"""Sharded parts: which rank writes which shard, and from which file each shard is read.

Every rank computes this by itself: all ranks see the same names, shapes and layouts. Of the ranks that hold copies of a
shard, one writes it; large tensors are balanced among the copies by size.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from ckpt.errors import DamagedError, UnsupportedError
from ckpt.formats.checks import checked_shape, damage_reported
from ckpt.formats.layout import Box, Layout, Members, Ranges, check_covered, count_shards, layout_from_json
from ckpt.formats.native import tensor_file
from ckpt.formats.native.manifest import Manifest
from ckpt.formats.native.tensor_file import SMALL, TensorFile
from ckpt.formats.sharded_tensors import gathered, is_sharded, layout_of, local_tensor
from ckpt.formats.tensors import Shard, narrowed
from ckpt.shown import Lines

_LEAST_ENTRY = 32  # bytes of a file's header that no shard can do without
_ALWAYS_READ = 1 << 20  # bytes: a table that is read at once, however many shards it has

EVERY = -1  # instead of a copy's number: every copy is written


@dataclass(frozen=True)
class ShardSpec:
    """A tensor: dtype, shape, how it is sharded, and which of its copies is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout
    copy: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def shards(self) -> int:
        """How many different shards there are, at least."""
        return count_shards(self.layout, self.shape)

    def writers(self) -> set[int]:
        """The ranks that write their shards of it."""
        copies = range(self.layout.copies) if self.copy == EVERY else (self.copy,)
        return {rank for copy in copies for rank in self.layout.holders(self.shape, copy)}


def shares(spec: ShardSpec, ranks: range) -> list[tuple[int, Box]]:
    """Which of these ranks write shards of a tensor, in their order, and which shards."""
    return list(_shares(spec, ranks))


@lru_cache(maxsize=100_000)
def _shares(spec: ShardSpec, ranks: range) -> tuple[tuple[int, Box], ...]:
    layout = spec.layout
    writing = [rank for rank in ranks if layout.holds(rank) and spec.copy in (EVERY, layout.copy_of(rank))]
    boxes = [(rank, layout.box(spec.shape, rank)) for rank in writing]
    filled = tuple((rank, box) for rank, box in boxes if not box.is_empty)
    return filled if math.prod(spec.shape) else tuple(boxes[:1])  # an empty tensor is in a file too


@lru_cache(maxsize=100_000)
def joined_box(spec: ShardSpec, ranks: range) -> Box | None:
    """What these ranks write of a tensor, if that is one box, in bands of rows: of one rank, or several side by side.
    None if it is not, or if they write nothing of it."""
    found = [box for _, box in shares(spec, ranks)]
    if len(found) <= 1:
        return found[0] if found else None
    if spec.copy == EVERY:
        return None
    starts = [min(box.offsets[dim] for box in found) for dim in range(len(spec.shape))]
    stops = [max(box.offsets[dim] + box.sizes[dim] for box in found) for dim in range(len(spec.shape))]
    sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
    rows = sorted({(box.offsets[0], box.sizes[0]) for box in found})
    are_bands = all(start + size <= later for (start, size), (later, _) in pairwise(rows))
    is_box = sum(math.prod(box.sizes) for box in found) == math.prod(sizes)
    return Box(tuple(starts), tuple(sizes)) if is_box and are_bands else None


def bands(spec: ShardSpec, ranks: range) -> list[list[tuple[int, Box]]]:
    """The shards of a joined box, by rows: those of a band have the same ones."""
    found: dict[tuple[int, ...], list[tuple[int, Box]]] = {}
    for rank, box in shares(spec, ranks):
        found.setdefault(box.offsets[:1], []).append((rank, box))
    return [found[start] for start in sorted(found)]


@dataclass(frozen=True)
class ShardTable:
    """All tensors of a part by name. A tied tensor is an alias of a stored one.

    `together`: the shards of so many ranks, from a multiple of it on, are in the file of the first of them. But of the
    tensors that stand `aside`, each rank has written its own shards.
    """

    tensors: dict[str, ShardSpec]
    aliases: dict[str, str] = field(default_factory=dict)
    together: int = 1
    aside: frozenset[str] = frozenset()

    @property
    def joined(self) -> ShardTable:
        """That of the tensors which ranks write together."""
        if not self.aside:
            return self
        return replace(self, tensors={name: spec for name, spec in self.tensors.items() if name not in self.aside})

    def writing_together(self, name: str) -> int:
        """The shards of how many ranks a file has of this tensor."""
        return 1 if name in self.aside else self.together

    def with_every_copy(self) -> ShardTable:
        """For ranks that cannot read each other's files: each writes all that it holds."""
        return ShardTable({name: replace(spec, copy=EVERY) for name, spec in self.tensors.items()}, self.aliases)

    def to_json(self) -> dict[str, Any]:
        layouts = list(dict.fromkeys(spec.layout for spec in self.tensors.values()))
        number = {layout: index for index, layout in enumerate(layouts)}
        rows = {
            name: [tensor_file.dtype_name(spec.dtype), list(spec.shape), number[spec.layout], spec.copy]
            for name, spec in self.tensors.items()
        }
        together = {"together": self.together} if self.together > 1 else {}
        aside = {"aside": sorted(self.aside)} if self.aside else {}
        return {
            "layouts": [layout.to_json() for layout in layouts],
            "tensors": rows,
            "aliases": self.aliases,
            **together,
            **aside,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], manifest: Manifest | None = None) -> ShardTable:
        """A table in which the shards of every tensor are all of it, and not more than the checkpoint's files hold."""
        with damage_reported("the shard table of a part", "shard table"):
            world_size = manifest.world_size if manifest else None
            layouts = dict(enumerate(layout_from_json(layout, world_size) for layout in fields["layouts"]))
            rows = {name: _spec_from_json(row, layouts) for name, row in fields["tensors"].items()}
            if not all(isinstance(stored, str) for stored in fields["aliases"].values()):
                raise ValueError("an alias is not a string")
            if manifest and sum(spec.shards for spec in rows.values()) * _LEAST_ENTRY > manifest.size + _ALWAYS_READ:
                raise ValueError("the table lists more shards than the checkpoint's files can hold")
            together = fields.get("together", 1)
            most = world_size or 1 + max((max(layout.ranks) for layout in layouts.values()), default=0)
            if type(together) is not int or not 1 <= together <= most:
                raise ValueError(f"{together!r} ranks can't write a file together")
            aside = fields.get("aside", [])
            if not isinstance(aside, list) or not rows.keys() >= {*aside}:
                raise ValueError("tensors that it does not list stand aside")
            return cls(rows, dict(fields["aliases"]), together, frozenset(aside))


def _spec_from_json(row: list[Any], layouts: Mapping[int, Layout]) -> ShardSpec:
    dtype, shape, number, copy = row
    spec = ShardSpec(tensor_file.dtype_of(dtype), checked_shape(shape), layouts[number], copy)
    if type(copy) is not int or not EVERY <= copy < spec.layout.copies:
        raise ValueError(f"the table asks for copy {copy!r} of a tensor with {spec.layout.copies} copies")
    check_covered(spec.layout, spec.shape)
    return spec


@dataclass(frozen=True)
class ShardedState:
    """The state of a sharded part on one rank: JSON with references, the shard table, and this rank's live tensors."""

    kind: str
    values: Any
    table: ShardTable
    tensors: Mapping[str, Any]
    frozen: frozenset[str] = frozenset()  # tensors that training does not change
    about: Mapping[str, Any] = field(default_factory=dict)  # JSON that other tools need to rebuild the object
    members: Members = None  # the numbers in the job of the ranks that it is sharded over, if they are not all

    @property
    def outlines(self) -> dict[str, torch.Tensor]:
        """Every stored tensor in full, on the meta device."""
        return {
            name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in self.table.tensors.items()
        }

    def gather(self, name: str) -> torch.Tensor:
        """The full tensor, at least on rank 0. Collective: every rank makes this call."""
        tensor = self.tensors[name]
        whole: torch.Tensor = gathered(tensor) if is_sharded(tensor) else tensor
        return whole


@torch.no_grad()  # the local shard of a DTensor is then the shard itself, without an autograd node
def build_table(tensors: Mapping[str, Any], world_size: int, members: Members = None) -> ShardTable:
    """The shard table of live tensors. Plain tensors count as replicated on every rank, or on those of `members`."""
    aliases = _aliases(tensors)
    everywhere = Layout.replicated(world_size)

    def layout(tensor: Any) -> Layout:
        return layout_of(tensor, members) if is_sharded(tensor) else everywhere

    found = {
        name: ShardSpec(tensor.dtype, tuple(tensor.size()), layout(tensor))
        for name, tensor in tensors.items()
        if name not in aliases
    }
    refuse_overlapping(found)
    return ShardTable(balanced(found), aliases)


def refuse_overlapping(tensors: Mapping[str, ShardSpec]) -> None:
    """Raise if PyTorch does not say where shards are: under FSDP over TP along one dimension, divided unevenly.

    Their offsets would then overlap, and rows come back in other places.
    """
    problems = []
    for name, spec in tensors.items():
        try:
            check_covered(spec.layout, spec.shape)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        head = "ckpt can't save the shards of these tensors, because PyTorch does not say which rows each rank has:"
        remedy = "Let the mesh divide that dimension evenly, shard another one, or save with layout='full'."
        raise UnsupportedError(Lines.listing(head, problems, remedy), tuple(problems))


def _aliases(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Tensors that are the same object or memory as an earlier one. Empty shards have no memory to compare."""
    first: dict[Any, str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        piece = local_tensor(tensor)
        keys: list[Any] = [id(tensor)]
        if piece.numel():
            keys.append((piece.device, piece.data_ptr(), piece.dtype, piece.shape, piece.stride(), tensor.size()))
        known = next((first[key] for key in keys if key in first), name)
        for key in keys:
            first.setdefault(key, known)
        if known != name:
            aliases[name] = known
    return aliases


def balanced(tensors: Mapping[str, ShardSpec]) -> dict[str, ShardSpec]:
    """Assign each replicated tensor to the copy with the fewest bytes to write so far, largest tensors first.

    Small tensors all go to copy 0, so that they lie together for whoever reads them. Of many copies, so few write that
    each has much to write: every rank that writes any has a file.
    """
    shared: dict[tuple[int, ...], list[str]] = {}  # the large tensors that have copies on the same ranks
    chosen = dict(tensors)
    for name in sorted(tensors, key=lambda name: (-tensors[name].size, name)):
        spec = tensors[name]
        if spec.layout.copies > 1 and spec.size >= SMALL:
            shared.setdefault((spec.layout.copies, *spec.layout.ranks), []).append(name)
    for (copies, *ranks), names in shared.items():
        size = sum(tensors[name].size for name in names)
        heap = [(0, number) for number in _writing(copies, size * copies // len(ranks))]
        for name in names:
            load, copy = heapq.heappop(heap)
            heapq.heappush(heap, (load + tensors[name].size, copy))
            chosen[name] = replace(tensors[name], copy=copy)
    return chosen


_FEW_COPIES = 8
_WORTH_A_FILE = 128 << 20  # bytes


def _writing(copies: int, size: int) -> range:
    """The copies that write, spaced evenly: neighbours may be on one host. `size`: what a rank would write alone."""
    step = copies // min(copies, max(_FEW_COPIES, size // _WORTH_A_FILE))
    return range(0, copies, step)


@torch.no_grad()
def written_by(table: ShardTable, tensors: Mapping[str, Any], rank: int) -> dict[str, Shard]:
    """The shards that a rank writes."""
    mine = {}
    for name, spec in table.tensors.items():
        if spec.layout.holds(rank) and spec.copy in (EVERY, spec.layout.copy_of(rank)):
            box = spec.layout.box(spec.shape, rank)
            if not box.is_empty or not math.prod(spec.shape):
                tensor = tensors[name]
                local = local_tensor(tensor)
                mine[name] = Shard(local, spec.shape, box.offsets)
    return mine


@dataclass
class ShardedTensors:
    """The tensors of a sharded part in a checkpoint. Only files that hold a needed shard are opened."""

    table: ShardTable
    open: Callable[[int], list[TensorFile]]  # opens the files that a rank has written
    rank: int = 0  # whose own copy is preferred
    here: Callable[[int], bool] = lambda rank: True  # whether a rank's files can be read from here
    _opened: dict[int, list[TensorFile]] = field(default_factory=dict)
    _whole: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def ties(self) -> Mapping[str, str]:
        return self.table.aliases

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        spec = self._spec(name)
        return spec.dtype, spec.shape

    def tensor(self, name: str) -> torch.Tensor:
        """The full tensor in new memory. Tied tensors are one object."""
        name = self.table.aliases.get(name, name)
        if name not in self._whole:
            spec = self._spec(name)
            whole = Box((0,) * len(spec.shape), spec.shape)
            self._pieces(name, spec, whole)  # before memory of that size is allocated
            self._whole[name] = torch.empty(spec.shape, dtype=spec.dtype)
            self.fill(name, self._whole[name], whole)
        return self._whole[name]

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        """Fill `target`, which is the given box of a tensor."""
        name = self.table.aliases.get(name, name)
        for file, part, there in self._pieces(name, self._spec(name), box):
            file.fill(name, narrowed(target, there), part)

    def _pieces(self, name: str, spec: ShardSpec, box: Box) -> list[tuple[TensorFile, Box, Ranges]]:
        """The pieces that a box of a tensor consists of: the file of each, which part of it, and where in the box."""
        overlaps = spec.layout.overlaps(spec.shape, self._copy(spec, box), box)
        return [(*self._piece(rank, name, spec, part), there) for rank, part, there in overlaps]

    def _piece(self, rank: int, name: str, spec: ShardSpec, part: Box) -> tuple[TensorFile, Box]:
        """The file that has a part of a rank's shard, and where it is in the file's tensor."""
        together = self.table.writing_together(name)
        if together == 1:
            return self._file(rank, name, spec, spec.layout.box(spec.shape, rank)), part
        first = rank - rank % together
        joined = joined_box(spec, range(first, first + together))
        if joined is None:
            raise DamagedError(
                f"the checkpoint says that rank {first} wrote {name!r} for others, whose shards are apart."
            )
        own = spec.layout.box(spec.shape, rank)
        moved = zip(part.offsets, own.offsets, joined.offsets, strict=True)
        offsets = tuple(offset + here - start for offset, here, start in moved)
        return self._file(first, name, spec, joined), Box(offsets, part.sizes)

    def _copy(self, spec: ShardSpec, box: Box) -> int:
        """The copy to read. If every copy was written: this rank's own, or else one whose files are readable here."""
        if spec.copy != EVERY:
            return spec.copy
        own = spec.layout.copy_of(self.rank) if spec.layout.holds(self.rank) else 0
        for copy in (own, *(number for number in range(spec.layout.copies) if number != own)):
            if all(self.here(rank) for rank, _, _ in spec.layout.overlaps(spec.shape, copy, box)):
                return copy
        return own

    def _spec(self, name: str) -> ShardSpec:
        try:
            return self.table.tensors[self.table.aliases.get(name, name)]
        except KeyError:
            raise DamagedError(
                f"the checkpoint refers to tensor {name!r}, but does not say which file has it."
            ) from None

    def _file(self, rank: int, name: str, spec: ShardSpec, box: Box) -> TensorFile:
        """The file in which a rank has written this box of a tensor, which has the dtype that the table says."""
        if rank not in self._opened:
            self._opened[rank] = self.open(rank)
        for file in self._opened[rank]:
            if name in file:
                _check_shard(file, name, spec, box)
                return file
        raise DamagedError(
            f"the checkpoint says that rank {rank} wrote a piece of tensor {name!r}, but no file of that rank has it."
        )


def _check_shard(file: TensorFile, name: str, spec: ShardSpec, box: Box) -> None:
    found = file.about(name), file.shapes.get(name, spec.shape), file.offsets.get(name, box.offsets)
    if found != ((spec.dtype, box.sizes), spec.shape, box.offsets):
        (dtype, sizes), shape, offsets = found
        raise DamagedError(
            f"{file.where} does not match the checkpoint's shard table: its {name} is {tensor_file.dtype_name(dtype)}"
            f"{list(sizes)} at {list(offsets)} of {list(shape)}, not {tensor_file.dtype_name(spec.dtype)}"
            f"{list(box.sizes)} at {list(box.offsets)} of {list(spec.shape)}."
        )
