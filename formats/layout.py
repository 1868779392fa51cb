"""How a tensor is sharded over ranks. The algebra is PyTorch's own; here it becomes values that JSON can hold.

A layout is a mesh of ranks and, for each dimension of the mesh, a placement: `R` (replicated along it), `S0` (sharded
along the tensor's dimension 0), `S0/2` (sharded along dimension 0 after a later dimension of the mesh has halved it, as
with FSDP over tensor parallelism). It gives the box of the tensor that each rank holds, without asking other ranks or
opening their files.

A layout from a file is checked: the shards of a tensor must be all of it, each element once (`find_fault`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ckpt.errors import RanksError, UnsupportedError
from ckpt.formats.checks import Sizes, checked_sizes

_PLACEMENT = re.compile(r"R|S([0-9]{1,2})(?:/([0-9]{1,9}))?")

Overlap = list[tuple[int, int, int]]  # for each dimension: the start in one box, the start in the other, the length
Ranges = list[tuple[int, int]]  # for each dimension: the start and the length


@dataclass(frozen=True)
class Box:
    """A rectangular region of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.sizes

    @property
    def ranges(self) -> Ranges:
        return list(zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: Box) -> Overlap | None:
        """The intersection: for each dimension the start in this box, the start in the other, and the length."""
        found = []
        for (start, size), (other_start, other_size) in zip(self.ranges, other.ranges, strict=True):
            first, end = max(start, other_start), min(start + size, other_start + other_size)
            if first >= end:
                return None
            found.append((first - start, first - other_start, end - first))
        return found


RankOverlap = tuple[int, Box, Ranges]  # a rank, the part of its shard inside a box, and where in the box that is


@dataclass(frozen=True)
class Layout:
    """A mesh of ranks (in row-major order) and a placement for each of its dimensions."""

    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[str, ...]

    def __post_init__(self) -> None:
        # layouts are dict keys for every tensor and may name a thousand ranks: hash once, index ranks once
        object.__setattr__(self, "_hash", hash((self.mesh, self.ranks, self.placements)))
        object.__setattr__(self, "_places", {rank: place for place, rank in enumerate(self.ranks)})

    def __hash__(self) -> int:
        own: int = vars(self)["_hash"]
        return own

    def holds(self, rank: int) -> bool:
        """Whether a rank is in the mesh."""
        return rank in vars(self)["_places"]

    @classmethod
    def replicated(cls, world_size: int) -> Layout:
        return cls((world_size,), tuple(range(world_size)), ("R",))

    @classmethod
    def of_one(cls, rank: int) -> Layout:
        """That of a tensor which one rank has whole."""
        return cls((1,), (rank,), ("R",))

    @property
    def is_replicated(self) -> bool:
        return set(self.placements) == {"R"}

    @property
    def copies(self) -> int:
        """How many ranks hold the same shard."""
        return math.prod(size for size, placed in zip(self.mesh, self.placements, strict=True) if placed == "R")

    def copy_of(self, rank: int) -> int:
        """Which of the copies of its shard a rank holds."""
        number = 0
        for coordinate, size, placed in zip(self._coordinate(rank), self.mesh, self.placements, strict=True):
            if placed == "R":
                number = number * size + coordinate
        return number

    def copy_with(self, rank: int) -> Layout:
        """The layout of the copy that a rank holds a shard of, over the ranks that hold it: without replicas."""
        if self.copies == 1:
            return self
        return _copy(self, self.copy_of(rank)) if self.placements.count("R") < len(self.mesh) else Layout.of_one(rank)

    def box(self, shape: tuple[int, ...], rank: int) -> Box:
        """The box of a tensor that a rank holds."""
        return _box(self, shape, self._coordinate(rank))

    def holders(self, shape: tuple[int, ...], copy: int) -> dict[int, Box]:
        """The ranks that hold the given copy of a tensor, each with its shard. Empty shards are left out."""
        return _holders(self, shape, copy)

    def overlaps(self, shape: tuple[int, ...], copy: int, box: Box) -> tuple[RankOverlap, ...]:
        """The ranks whose shards of a tensor intersect a box, and where. Cached by shape."""
        return _overlaps(self, shape, copy, box)

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        place = vars(self)["_places"][rank]
        coordinate = []
        for size in reversed(self.mesh):
            place, here = divmod(place, size)
            coordinate.append(here)
        return tuple(reversed(coordinate))

    def to_json(self) -> dict[str, Any]:
        return {"mesh": list(self.mesh), "ranks": list(self.ranks), "placements": list(self.placements)}


@lru_cache(maxsize=100_000)
def _box(layout: Layout, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Box:
    if any("/" in text for text in layout.placements):
        return _strided_box(layout, shape, coordinate)
    sizes, offsets = list(shape), [0] * len(shape)
    for size, here, text in zip(layout.mesh, coordinate, layout.placements, strict=True):
        if text != "R":
            dim = int(text[1:])
            first, sizes[dim] = chunk(sizes[dim], size, here)
            offsets[dim] += first
    # an empty shard begins where the tensor ends, as PyTorch says it
    starts = (whole if size == 0 else start for whole, size, start in zip(shape, sizes, offsets, strict=True))
    return Box(tuple(starts), tuple(sizes))


def chunk(size: int, pieces: int, number: int) -> tuple[int, int]:
    """The start and the length of a piece, as `torch.chunk` divides."""
    most = -(-size // pieces)
    start = min(number * most, size)
    return start, min(most, size - start)


def _strided_box(layout: Layout, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Box:
    """By PyTorch's own rule, which has changed for tensors that are not divided evenly."""
    from ckpt.compat.torch import SHARD_BOX

    compute = SHARD_BOX.imported()
    if compute is None:
        raise UnsupportedError(SHARD_BOX.without)
    sizes, offsets = compute(shape, layout.mesh, list(coordinate), [_placement(text) for text in layout.placements])
    return Box(tuple(offsets), tuple(sizes))


@lru_cache(maxsize=10_000)
def _holders(layout: Layout, shape: tuple[int, ...], copy: int) -> dict[int, Box]:
    held = {rank: _box(layout, shape, coordinate) for rank, coordinate in _holding(layout, copy)}
    return {rank: box for rank, box in held.items() if not box.is_empty}


@lru_cache(maxsize=10_000)
def _overlaps(layout: Layout, shape: tuple[int, ...], copy: int, box: Box) -> tuple[RankOverlap, ...]:
    met = []
    for rank, held in layout.holders(shape, copy).items():
        overlap = held.overlap(box)
        if overlap is not None:
            starts, others, lengths = zip(*overlap, strict=True) if overlap else ((), (), ())
            met.append((rank, Box(starts, lengths), list(zip(others, lengths, strict=True))))
    return tuple(met)


def _holding(layout: Layout, copy: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The ranks that hold the given copy, with their coordinates in the mesh."""
    only = layout.copies == 1
    for rank, coordinate in zip(layout.ranks, itertools.product(*map(range, layout.mesh)), strict=True):
        if only or layout.copy_of(rank) == copy:
            yield rank, coordinate


@lru_cache(maxsize=1000)
def _copy(layout: Layout, copy: int) -> Layout:
    kept = [(size, placed) for size, placed in zip(layout.mesh, layout.placements, strict=True) if placed != "R"]
    mesh, placements = zip(*kept, strict=True)
    return Layout(mesh, tuple(rank for rank, _ in _holding(layout, copy)), placements)


@lru_cache
def _placement(text: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    from ckpt.compat.torch import STRIDED

    match = _PLACEMENT.fullmatch(text)
    assert match is not None
    if match.group(1) is None:
        return Replicate()
    dim = int(match.group(1))
    if match.group(2) is None:
        return Shard(dim)
    strided = STRIDED.imported()
    if strided is None:
        raise UnsupportedError(STRIDED.without)
    return strided(dim, split_factor=int(match.group(2)))


Members = tuple[int, ...] | None  # some ranks of a job, by their numbers there; None: all of them


@lru_cache(maxsize=1000)
def among(layout: Layout, members: Members) -> Layout:
    """The same layout with the numbers that its ranks have among `members`. Raises if others are in it."""
    if members is None:
        return layout
    numbers = {rank: number for number, rank in enumerate(members)}
    if any(rank not in numbers for rank in layout.ranks):
        raise RanksError(
            f"a tensor is sharded over ranks {_listed(layout.ranks)}, but this manager covers ranks "
            f"{_listed(members)}. Build the manager on every rank that holds a shard, and pass a group of all of them: "
            "ranks=ckpt.RankOptions(process_group=...)."
        )
    return interned(Layout(layout.mesh, tuple(numbers[rank] for rank in layout.ranks), layout.placements))


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


@lru_cache(maxsize=1000)
def interned(layout: Layout) -> Layout:
    """The first of equal layouts: to compare two that name thousands of ranks, for every tensor, takes long."""
    return layout


@lru_cache(maxsize=1000)
def over_all_ranks(own: Layout, ranks: tuple[int, ...]) -> Layout:
    """The layout over all these ranks of a tensor that lies on some of them: it counts as replicated over the others.

    All ranks find the same one, by the ranks alone: the names of a mesh say nothing for sure about them.
    """
    parts = _translations(own.ranks, ranks)
    if len(parts) == 1:
        return own
    return interned(Layout((len(parts), *own.mesh), tuple(itertools.chain(*parts)), ("R", *own.placements)))


def _translations(some: tuple[int, ...], ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Some ranks, and others in the same pattern, that make up all of them, each once; if none do, these alone."""
    first, left, parts = min(some), set(ranks), []
    for lowest in sorted(ranks):
        if lowest not in left:
            continue
        part = tuple(lowest + rank - first for rank in some)
        if not left.issuperset(part):
            return [some]
        left.difference_update(part)
        parts.append(part)
    return parts if some in parts else [some]


_DEEPEST = 16  # cuts across cuts: a mesh has as many as a tensor has dimensions


class Fault(NamedTuple):
    """What is wrong with the boxes of a tensor, and where."""

    what: str
    box: Box

    def __str__(self) -> str:
        ranges = (f"{offset}:{offset + size}" for offset, size in zip(self.box.offsets, self.box.sizes, strict=False))
        return f"{self.what} [{', '.join(ranges)}]"


def find_fault(boxes: Iterable[Box], whole: Box) -> Fault | None:
    """The first part of a tensor that is in no box or in several, or the first box that leads out; None if all is well.

    Boxes that interlock, so that no cut divides them, count as overlapping: no mesh of ranks gives such.
    """
    filled = [box for box in boxes if not box.is_empty]
    outside = next((box for box in filled if not _is_inside(box, whole)), None)
    return Fault("has a piece outside it,", outside) if outside else _fault(filled, whole, 0)


def _is_inside(box: Box, whole: Box) -> bool:
    if not len(box.offsets) == len(box.sizes) == len(whole.offsets):
        return False
    spans = zip(box.ranges, whole.ranges, strict=True)
    return all(first <= start and start + size <= first + length for (start, size), (first, length) in spans)


def _fault(boxes: list[Box], whole: Box, depth: int) -> Fault | None:
    if not boxes:
        return None if whole.is_empty else Fault("lacks", whole)
    if depth < _DEEPEST:
        for dim in range(len(whole.offsets)):
            layers = list(_layers(boxes, dim))
            if len(layers) > 1 or (layers[0][1], layers[0][2]) != whole.ranges[dim]:
                return _fault_in_layers(layers, whole, dim, depth)
    return None if boxes == [whole] else Fault("has several pieces at", whole)


_Layer = tuple[list[Box], int, int]  # boxes that lie between two cuts across a dimension: start and length of that


def _layers(boxes: list[Box], dim: int) -> Iterator[_Layer]:
    """The boxes between cuts across a dimension that go through none of them."""
    layer: list[Box] = []
    start = stop = 0
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        offset, size = box.ranges[dim]
        if layer and offset >= stop:
            yield layer, start, stop - start
            layer = []
        if not layer:
            start = stop = offset
        layer.append(box)
        stop = max(stop, offset + size)
    yield layer, start, stop - start


def _fault_in_layers(layers: list[_Layer], whole: Box, dim: int, depth: int) -> Fault | None:
    first, length = whole.ranges[dim]
    at = first
    for boxes, start, thickness in layers:
        if start > at:
            return Fault("lacks", part_of_box(whole, dim, at - first, start - at))
        fault = _fault(boxes, part_of_box(whole, dim, start - first, thickness), depth + 1)
        if fault:
            return fault
        at = start + thickness
    rest = first + length - at
    return Fault("lacks", part_of_box(whole, dim, at - first, rest)) if rest else None


def part_of_box(box: Box, dim: int, start: int, length: int) -> Box:
    """The part of a box within a range of one dimension. `start` counts from the beginning of the box."""
    offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
    return Box(offsets, (*box.sizes[:dim], length, *box.sizes[dim + 1 :]))


_MOST_UNEVEN = 1 << 14  # ranks of a layout whose shards have to be compared one by one


def layout_from_json(fields: Mapping[str, Any], world_size: int | None = None) -> Layout:
    """A layout over distinct ranks, as many as its mesh has places. `world_size`: they are fewer than that."""
    mesh, ranks, placements = checked_sizes(fields["mesh"]), checked_sizes(fields["ranks"]), tuple(fields["placements"])
    if not ranks or math.prod(mesh) != len(ranks) or len(set(ranks)) != len(ranks):
        raise ValueError(
            f"a mesh of {'x'.join(map(str, mesh))} lists {len(ranks)} ranks, {len(set(ranks))} of them distinct"
        )
    if world_size is not None and max(ranks) >= world_size:
        raise ValueError(f"a mesh contains rank {max(ranks)}, but there were only {world_size} ranks")
    if len(placements) != len(mesh) or not all(map(_PLACEMENT.fullmatch, placements)):
        raise ValueError(f"{list(placements)} are not valid placements on a mesh of {len(mesh)} dimensions")
    return interned(Layout(mesh, ranks, placements))


def check_covered(layout: Layout, shape: Sizes) -> None:
    """Raise unless the shards of a tensor of that shape are all of it. Cached by layout and shape."""
    if problem := _problem(layout, shape):
        raise ValueError(f"a tensor of shape {list(shape)} is sharded as {','.join(layout.placements)}: {problem}")


@lru_cache(maxsize=10_000)
def _problem(layout: Layout, shape: Sizes) -> str | None:
    """Shards along a dimension are those of torch.chunk, which always cover it, unless they are strided and uneven."""
    uneven = False
    for text, dim, factor, pieces, size in _divisions(layout):
        if dim >= len(shape):
            return f"it has no dimension {dim}"
        if factor is not None and factor != pieces:
            return f"{text} stands over {pieces} pieces of dimension {dim}"
        uneven = uneven or (factor is not None and shape[dim] % (pieces * size) != 0)
    return _fault_one_by_one(layout, shape) if uneven else None


_Division = tuple[str, int, int | None, int, int]


def _divisions(layout: Layout) -> Iterator[_Division]:
    """The sharded dimensions of a mesh, from the last: placement, dimension of the tensor, split factor, into how many
    pieces later ones divide that dimension, and the size of this one."""
    pieces: dict[int, int] = {}
    for size, text in reversed(list(zip(layout.mesh, layout.placements, strict=True))):
        match = _PLACEMENT.fullmatch(text)
        if match is not None and match.group(1) is not None:
            dim, factor = int(match.group(1)), match.group(2)
            yield text, dim, None if factor is None else int(factor), pieces.get(dim, 1), size
            pieces[dim] = pieces.get(dim, 1) * size


@lru_cache(maxsize=10_000)
def count_shards(layout: Layout, shape: Sizes) -> int:
    """How many different shards a tensor has, at least: those that torch.chunk makes of each dimension."""
    if 0 in shape:
        return 0
    pieces = {dim: divided * size for _, dim, _, divided, size in _divisions(layout)}
    return math.prod(-(-shape[dim] // -(-shape[dim] // count)) for dim, count in pieces.items())


def _fault_one_by_one(layout: Layout, shape: Sizes) -> str | None:
    if len(layout.ranks) > _MOST_UNEVEN:
        return "strided and uneven over too many ranks"
    fault = find_fault(layout.holders(shape, 0).values(), Box((0,) * len(shape), shape))
    return f"it {fault}" if fault else None
