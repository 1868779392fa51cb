"""How a tensor is spread over ranks. The algebra is PyTorch's own; here it is written down and read back.

A layout is a mesh of ranks and, for each dimension of the mesh, a placement: `R` (every rank along it has the same),
`S0` (it divides the tensor's dimension 0), `S0/2` (it divides what a later dimension of the mesh has divided already
in two, as FSDP over tensor parallel does). It says of every rank which box of the tensor that rank holds, so nobody
needs to ask the others, or to open their files to find out.
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

_PLACEMENT = re.compile(r"R|S(\d+)(?:/(\d+))?")


Overlap = list[tuple[int, int, int]]  # for each dimension: the start in one box, the start in the other, the length

Ranges = list[tuple[int, int]]  # for each dimension the start and the length

_WHOLE = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.sizes

    @property
    def ranges(self) -> Ranges:
        return list(zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: Box) -> Overlap | None:
        """Where two boxes meet: for each dimension the start in this one, the start in the other, and the length."""
        if self.is_empty or other.is_empty or not _meet(self, other):
            return None
        narrows = _shards_get_overlap_region_wrt_saved_tensor(_chunk(self), _chunk(other))
        return [(start, other_start, length) for _, start, other_start, length in narrows]


Met = tuple[int, Box, Ranges]  # a rank, the part of its piece that meets a box, and where that is in the box


def _meet(one: Box, other: Box) -> bool:
    spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in spans)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


@dataclass(frozen=True)
class Layout:
    """A mesh of ranks (row by row) and a placement for each of its dimensions."""

    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[str, ...]

    def __post_init__(self) -> None:
        # layouts are looked up for every tensor, and may name a thousand ranks
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
        """How many ranks hold the same piece."""
        return math.prod(size for size, one in zip(self.mesh, self.placements, strict=True) if one == "R")

    def copy_of(self, rank: int) -> int:
        """Which of the copies of its piece a rank holds."""
        number = 0
        for coordinate, size, one in zip(self._coordinate(rank), self.mesh, self.placements, strict=True):
            if one == "R":
                number = number * size + coordinate
        return number

    def box(self, shape: tuple[int, ...], rank: int) -> Box:
        """What a rank holds of a tensor."""
        return _box(self, shape, self._coordinate(rank))

    def holders(self, shape: tuple[int, ...], copy: int) -> dict[int, Box]:
        """For each piece of a tensor that is not empty, the rank that holds the given copy of it."""
        return _holders(self, shape, copy)

    def overlaps(self, shape: tuple[int, ...], copy: int, box: Box) -> tuple[Met, ...]:
        """The ranks whose pieces of a tensor meet a box, and where. Tensors of one shape are worked out once."""
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

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Layout:
        placements = tuple(fields["placements"])
        if not all(_PLACEMENT.fullmatch(one) for one in placements):
            raise ValueError(f"unknown placements {placements}")
        return cls(tuple(fields["mesh"]), tuple(fields["ranks"]), placements)


@lru_cache(maxsize=100_000)
def _box(layout: Layout, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Box:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as compute

    sizes, offsets = compute(shape, layout.mesh, list(coordinate), [_placement(one) for one in layout.placements])
    return Box(tuple(offsets), tuple(sizes))


@lru_cache(maxsize=10_000)
def _holders(layout: Layout, shape: tuple[int, ...], copy: int) -> dict[int, Box]:
    held = {rank: _box(layout, shape, coordinate) for rank, coordinate in _holding(layout, copy)}
    return {rank: box for rank, box in held.items() if not box.is_empty}


@lru_cache(maxsize=10_000)
def _overlaps(layout: Layout, shape: tuple[int, ...], copy: int, box: Box) -> tuple[Met, ...]:
    met = []
    for rank, held in layout.holders(shape, copy).items():
        overlap = held.overlap(box)
        if overlap is not None:
            starts, others, lengths = zip(*overlap, strict=True) if overlap else ((), (), ())
            met.append((rank, Box(starts, lengths), list(zip(others, lengths, strict=True))))
    return tuple(met)


def _holding(layout: Layout, copy: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The ranks that hold the given copy of a piece, and where they are in the mesh."""
    only = layout.copies == 1
    for rank, coordinate in zip(layout.ranks, itertools.product(*map(range, layout.mesh)), strict=True):
        if only or layout.copy_of(rank) == copy:
            yield rank, coordinate


@lru_cache
def _placement(spelled: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    match = _PLACEMENT.fullmatch(spelled)
    assert match is not None
    if match.group(1) is None:
        return Replicate()
    dim = int(match.group(1))
    return Shard(dim) if match.group(2) is None else _StridedShard(dim, split_factor=int(match.group(2)))


def is_sharded(value: Any) -> bool:
    """Whether a value is a tensor of which every rank holds a piece: a DTensor, or what FSDP 1 gives out."""
    if type(value) in _WHOLE:  # most are, and to ask a tensor for what it has not takes longest
        return False
    return hasattr(value, "__create_chunk_list__") or hasattr(value, "local_shards")


def layout_of(tensor: Any) -> Layout:
    """How a sharded tensor is spread."""
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
    """How a sharded tensor is spread over the ranks of its own mesh, be it only a part of a larger one."""
    return _mesh_layout(tensor.device_mesh, tensor.placements) if hasattr(tensor, "device_mesh") else layout_of(tensor)


@lru_cache(maxsize=1000)
def _mesh_layout(mesh: Any, placed: tuple[Any, ...]) -> Layout:
    return Layout(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), tuple(map(_spelled, placed)))


def on_part_of_mesh(tensor: Any) -> bool:
    """Whether a sharded tensor is taken to be the same on other ranks than those of its own mesh."""
    return len(layout_of(tensor).ranks) != len(own_layout(tensor).ranks)


def divided(tensors: Iterable[Any]) -> frozenset[Layout]:
    """The ways in which tensors are divided, leaving out those that every rank has whole."""
    found = {layout_of(one) for one in tensors if is_sharded(one)}
    return frozenset(one for one in found if not one.is_replicated)


@lru_cache(maxsize=1000)
def _root_layout(mesh: Any, placed: tuple[Any, ...]) -> Layout:
    """Over the whole mesh, also for a tensor on a part of it: along the other dimensions the ranks hold the same.

    Of the parts of a mesh, each rank sees another one; only the whole is the same for all.
    """
    placements = tuple(_spelled(one) for one in placed)
    root = mesh._get_root_mesh()
    names, all_names = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    if root is not mesh and set(names) <= set(all_names):
        by_name = dict(zip(names, placements, strict=True))
        mesh, placements = root, tuple(by_name.get(name, "R") for name in all_names)
    return Layout(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), placements)


def _spelled(placement: Any) -> str:
    if placement.is_replicate():
        return "R"
    if hasattr(placement, "split_factor"):
        return f"S{placement.dim}/{placement.split_factor}"
    if placement.is_shard():
        return f"S{placement.dim}"
    raise ValueError(f"a tensor with placement {placement} has no value of its own to save")


def local_tensor(tensor: Any) -> torch.Tensor:
    """The piece that this rank holds; an empty one where it holds none."""
    if hasattr(tensor, "to_local"):
        with torch.no_grad():  # it is then the piece itself, without a step of autograd
            piece: torch.Tensor = tensor.to_local()
        return piece.detach()
    shards = tensor.local_shards()
    if shards:
        first: torch.Tensor = shards[0].tensor.detach()
        return first
    return torch.empty((0, *tensor.size()[1:]), dtype=tensor.dtype)


def gathered(tensor: Any) -> torch.Tensor:
    """The whole of a sharded tensor, on the main rank at least. Every rank makes this call."""
    if hasattr(tensor, "full_tensor"):
        full: torch.Tensor = tensor.full_tensor()
        return full
    whole = torch.empty(tensor.size(), dtype=tensor.dtype)
    tensor.gather(0, whole if torch.distributed.get_rank() == 0 else None)
    return whole


def empty_like(tensor: Any, dtype: torch.dtype) -> Any:
    """A new tensor of the same shape on the same device, spread like another one."""
    if not is_sharded(tensor):
        return torch.empty(tensor.size(), dtype=dtype, device=tensor.device)
    if hasattr(tensor, "device_mesh"):
        from torch.distributed.tensor import DTensor

        piece = torch.empty_like(local_tensor(tensor), dtype=dtype)
        mesh, placements = tensor.device_mesh, tensor.placements
        return DTensor.from_local(piece, mesh, placements, run_check=False, shape=tensor.size(), stride=tensor.stride())
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard as Piece

    metadata = copy.deepcopy(tensor.metadata())
    metadata.tensor_properties.dtype = dtype
    pieces = [Piece(torch.empty_like(one.tensor, dtype=dtype), one.metadata) for one in tensor.local_shards()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        pieces, sharded_tensor_metadata=metadata, process_group=tensor._process_group
    )
