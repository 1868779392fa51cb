"""Live tensors that are sharded over ranks, be it DTensors or FSDP 1's ShardedTensors: their layouts and shards."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ckpt.compat.torch import SHARDED_TENSOR, root_ranks
from ckpt.errors import UnsupportedError
from ckpt.formats.layout import Box, Layout, Members, among, interned, over_all_ranks

_GROUP = "_ckpt_group"


class ShardOutline(NamedTuple):
    """A DTensor without its values."""

    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> ShardOutline:
        return cls(tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride())

    def around(self, piece: torch.Tensor) -> Any:
        """Such a DTensor, with this shard on this rank."""
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = self
        return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_sharded(value: Any) -> bool:
    """Whether a value is a tensor of which every rank holds a shard: a DTensor, or FSDP 1's ShardedTensor."""
    if type(value) in _PLAIN:  # most are; hasattr for a missing attribute of a tensor is slow
        return False
    return hasattr(value, "__create_chunk_list__") or hasattr(value, "local_shards")


def layout_of(tensor: Any, members: Members = None) -> Layout:
    """The layout of a sharded tensor over all ranks that the mesh was made for from which its own was taken.

    With `members`, over these ranks of the job alone, and with their numbers among them.
    """
    if members is None and hasattr(tensor, "device_mesh"):
        return _root_layout(tensor.device_mesh, tensor.placements)
    return over_ranks(own_layout(tensor), members)


def over_ranks(own: Layout, members: Members) -> Layout:
    """The layout over all ranks, or over those of `members`, of a tensor that lies on some of them."""
    if members is None:
        return over_all_ranks(own, tuple(range(torch.distributed.get_world_size())))
    return over_all_ranks(among(own, members), tuple(range(len(members))))


def own_layout(tensor: Any) -> Layout:
    """The layout of a sharded tensor over the ranks of its own mesh or process group, which may be some of them."""
    if hasattr(tensor, "device_mesh"):
        return _mesh_layout(tensor.device_mesh, tensor.placements)
    layout = group_layout(_group_of(tensor))
    expected = layout.holders(tuple(tensor.size()), 0).values()
    for piece in tensor.metadata().shards_metadata:
        box = Box(tuple(piece.shard_offsets), tuple(piece.shard_sizes))
        if box not in expected and not box.is_empty:
            raise ValueError(
                f"ckpt can't save a ShardedTensor of shape {list(tensor.size())}, because it is not "
                "divided along dimension 0"
            )
    return layout


def over_group(tensor: Any, group: Any) -> Any:
    """A tensor of FSDP 1, marked with the process group that it is sharded over: its metadata does not say it."""
    setattr(tensor, _GROUP, group)
    return tensor


def _group_of(tensor: Any) -> Any:
    return getattr(tensor, _GROUP, None) or torch.distributed.group.WORLD


def group_layout(group: Any) -> Layout:
    """That of FSDP 1, which divides dimension 0 over the ranks of a process group as torch.chunk does."""
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    return Layout((len(ranks),), ranks, ("S0",))


@lru_cache(maxsize=1000)
def _mesh_layout(mesh: Any, placed: tuple[Any, ...]) -> Layout:
    ranks, placements = tuple(mesh.mesh.flatten().tolist()), tuple(map(_placement_text, placed))
    return interned(Layout(tuple(mesh.mesh.shape), ranks, placements))


def on_part_of_mesh(tensor: Any, members: Members = None) -> bool:
    """Whether a sharded tensor lies on a submesh, so that `layout_of` assumes it replicated over the other ranks."""
    return len(layout_of(tensor, members).ranks) != len(own_layout(tensor).ranks)


def divided(tensors: Iterable[Any], members: Members = None) -> frozenset[Layout]:
    """The layouts of those tensors that are sharded and not fully replicated."""
    found = {layout_of(tensor, members) for tensor in tensors if is_sharded(tensor)}
    return frozenset(layout for layout in found if not layout.is_replicated)


@lru_cache(maxsize=1000)
def _root_layout(mesh: Any, placed: tuple[Any, ...]) -> Layout:
    return over_all_ranks(_mesh_layout(mesh, placed), root_ranks(mesh))


def _placement_text(placement: Any) -> str:
    if placement.is_replicate():
        return "R"
    if hasattr(placement, "split_factor"):
        return f"S{placement.dim}/{placement.split_factor}"
    if placement.is_shard():
        return f"S{placement.dim}"
    raise ValueError(f"ckpt can't save a tensor with placement {placement}: reduce it across the ranks first")


def local_tensor(tensor: Any) -> torch.Tensor:
    """This rank's shard, an empty tensor if it has none; of a tensor that is not sharded, all of it."""
    if not is_sharded(tensor):
        whole: torch.Tensor = tensor
        return whole
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
    if torch.distributed.get_world_size(_group_of(tensor)) < torch.distributed.get_world_size():
        return _gathered_in_group(tensor)
    whole = torch.empty(tensor.size(), dtype=tensor.dtype)
    tensor.gather(0, whole if torch.distributed.get_rank() == 0 else None)
    return whole


def _gathered_in_group(tensor: Any) -> torch.Tensor:
    """The same for a ShardedTensor over some of the ranks, which PyTorch's call takes for ranks of all."""
    group, mine = _group_of(tensor), local_tensor(tensor)
    count = torch.distributed.get_world_size(group)
    padded = mine.new_zeros((-(-tensor.size()[0] // count), *tensor.size()[1:]))
    padded[: len(mine)] = mine
    pieces = [torch.empty_like(padded) for _ in range(count)]
    torch.distributed.all_gather(pieces, padded, group=group)
    return torch.cat(pieces)[: tensor.size()[0]]


def empty_like(tensor: Any, dtype: torch.dtype) -> Any:
    """An uninitialised tensor with the shape, device and sharding of another one."""
    if not is_sharded(tensor):
        return torch.empty(tensor.size(), dtype=dtype, device=tensor.device)
    if hasattr(tensor, "device_mesh"):
        return ShardOutline.of(tensor).around(torch.empty_like(local_tensor(tensor), dtype=dtype))
    metadata = copy.deepcopy(tensor.metadata())
    metadata.tensor_properties.dtype = dtype
    shards = tensor.local_shards()
    pieces = [type(shard)(torch.empty_like(shard.tensor, dtype=dtype), shard.metadata) for shard in shards]
    build = SHARDED_TENSOR.of(type(tensor))
    if build is None:
        raise UnsupportedError(SHARDED_TENSOR.without)
    group = _group_of(tensor)
    return over_group(build(pieces, sharded_tensor_metadata=metadata, process_group=group), group)
