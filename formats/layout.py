"""How a tensor is sharded over ranks. The algebra is PyTorch's own; here it becomes values that JSON can hold.

A layout is a mesh of ranks and, for each dimension of the mesh, a placement: `R` (replicated along it), `S0` (sharded
along the tensor's dimension 0), `S0/2` (sharded along dimension 0 after a later dimension of the mesh has halved it, as
with FSDP over tensor parallelism). It gives the box of the tensor that each rank holds, without asking other ranks or
opening their files.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.resharding import _shards_get_overlap_region_wrt_saved_tensor

from ckpt.formats.shard_outline import ShardOutline

_PLACEMENT = re.compile(r"R|S(\d+)(?:/(\d+))?")

Overlap = list[tuple[int, int, int]]  # for each dimension: the start in one box, the start in the other, the length
Ranges = list[tuple[int, int]]  # for each dimension: the start and the length

_PLAIN = (torch.Tensor, torch.nn.Parameter)


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
        if self.is_empty or other.is_empty or not _intersect(self, other):
            return None
        narrows = _shards_get_overlap_region_wrt_saved_tensor(_chunk(self), _chunk(other))
        return [(start, other_start, length) for _, start, other_start, length in narrows]


RankOverlap = tuple[int, Box, Ranges]  # a rank, the part of its shard inside a box, and where in the box that is


def _intersect(box: Box, other: Box) -> bool:
    spans = zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in spans)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


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
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as compute

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


@lru_cache
def _placement(text: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    match = _PLACEMENT.fullmatch(text)
    assert match is not None
    if match.group(1) is None:
        return Replicate()
    dim = int(match.group(1))
    return Shard(dim) if match.group(2) is None else _StridedShard(dim, split_factor=int(match.group(2)))


def is_sharded(value: Any) -> bool:
    """Whether a value is a tensor of which every rank holds a shard: a DTensor, or FSDP 1's ShardedTensor."""
    if type(value) in _PLAIN:  # most are; hasattr for a missing attribute of a tensor is slow
        return False
    return hasattr(value, "__create_chunk_list__") or hasattr(value, "local_shards")


def layout_of(tensor: Any) -> Layout:
    """The layout of a sharded tensor."""
    if hasattr(tensor, "device_mesh"):
        return _root_layout(tensor.device_mesh, tensor.placements)
    ranks = tuple(torch.distributed.get_process_group_ranks(tensor._process_group))
    layout = Layout((len(ranks),), ranks, ("S0",))  # FSDP 1 divides dimension 0 as torch.chunk does
    expected = layout.holders(tuple(tensor.size()), 0).values()
    for piece in tensor.metadata().shards_metadata:
        box = Box(tuple(piece.shard_offsets), tuple(piece.shard_sizes))
        if box not in expected and not box.is_empty:
            raise ValueError(f"a ShardedTensor of shape {list(tensor.size())} is not divided along dimension 0")
    return layout


def own_layout(tensor: Any) -> Layout:
    """The layout of a sharded tensor over its own mesh, which may be a submesh."""
    return _mesh_layout(tensor.device_mesh, tensor.placements) if hasattr(tensor, "device_mesh") else layout_of(tensor)


@lru_cache(maxsize=1000)
def _mesh_layout(mesh: Any, placed: tuple[Any, ...]) -> Layout:
    return Layout(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), tuple(map(_placement_text, placed)))


def on_part_of_mesh(tensor: Any) -> bool:
    """Whether a sharded tensor lies on a submesh, so that `layout_of` assumes it replicated over the other ranks."""
    return len(layout_of(tensor).ranks) != len(own_layout(tensor).ranks)


def divided(tensors: Iterable[Any]) -> frozenset[Layout]:
    """The layouts of those tensors that are sharded and not fully replicated."""
    found = {layout_of(tensor) for tensor in tensors if is_sharded(tensor)}
    return frozenset(layout for layout in found if not layout.is_replicated)


@lru_cache(maxsize=1000)
def _root_layout(mesh: Any, placed: tuple[Any, ...]) -> Layout:
    """The layout over the root mesh. A tensor on a submesh counts as replicated along the other dimensions.

    Each rank sees another submesh; only the root mesh is the same on all of them.
    """
    placements = tuple(map(_placement_text, placed))
    root = mesh._get_root_mesh()
    names, all_names = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    if root is not mesh and set(names) <= set(all_names):
        by_name = dict(zip(names, placements, strict=True))
        mesh, placements = root, tuple(by_name.get(name, "R") for name in all_names)
    return Layout(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), placements)


def _placement_text(placement: Any) -> str:
    if placement.is_replicate():
        return "R"
    if hasattr(placement, "split_factor"):
        return f"S{placement.dim}/{placement.split_factor}"
    if placement.is_shard():
        return f"S{placement.dim}"
    raise ValueError(f"a tensor with placement {placement} has no value of its own to save")


def local_tensor(tensor: Any) -> torch.Tensor:
    """This rank's shard; an empty tensor if it has none."""
    if hasattr(tensor, "to_local"):
        with torch.no_grad():  # returns the shard itself, without an autograd node
            piece: torch.Tensor = tensor.to_local()
        return piece.detach()
    shards = tensor.local_shards()
    if shards:
        first: torch.Tensor = shards[0].tensor.detach()
        return first
    return torch.empty((0, *tensor.size()[1:]), dtype=tensor.dtype)


def gathered(tensor: Any) -> torch.Tensor:
    """The full tensor, at least on rank 0. Collective: every rank makes this call."""
    if hasattr(tensor, "full_tensor"):
        full: torch.Tensor = tensor.full_tensor()
        return full
    whole = torch.empty(tensor.size(), dtype=tensor.dtype)
    tensor.gather(0, whole if torch.distributed.get_rank() == 0 else None)
    return whole


def empty_like(tensor: Any, dtype: torch.dtype) -> Any:
    """An uninitialised tensor with the shape, device and sharding of another one."""
    if not is_sharded(tensor):
        return torch.empty(tensor.size(), dtype=dtype, device=tensor.device)
    if hasattr(tensor, "device_mesh"):
        return ShardOutline.of(tensor).around(torch.empty_like(local_tensor(tensor), dtype=dtype))
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard as Piece

    metadata = copy.deepcopy(tensor.metadata())
    metadata.tensor_properties.dtype = dtype
    pieces = [Piece(torch.empty_like(shard.tensor, dtype=dtype), shard.metadata) for shard in tensor.local_shards()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        pieces, sharded_tensor_metadata=metadata, process_group=tensor._process_group
    )
