"""ZeRO 3, which partitions every parameter over the ranks as flat tensors.

Here such a parameter becomes a DTensor that is sharded along dimension 0. Parameters are gathered one at a time through
DeepSpeed's own calls, and each rank keeps its rows. These calls are collective: every rank makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from ckpt.formats.layout import Box, Layout
from ckpt.formats.sharded_tensors import gathered, is_sharded
from ckpt.formats.tensors import narrowed
from ckpt.state.unwrap import is_partitioned


def layout() -> Layout:
    """The layout of parameters in a checkpoint: sharded along dimension 0 over all ranks."""
    world_size = dist.get_world_size()
    return Layout((world_size,), tuple(range(world_size)), ("S0",))


def rows(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with this rank's rows of every partitioned parameter, in new memory. Tied parameters share it."""
    return _replaced(state, _rows_of)


def empty_rows(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same, uninitialised. Not collective."""
    return _replaced(state, _empty_rows_of)


@torch.no_grad()
def fill(state: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Fill partitioned parameters with the sharded or full values in `known`, by name. Others are not changed."""
    found = {id(value): (name, value) for name, value in state.items() if is_partitioned(value) and name in known}
    if not found:
        return
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    for name, parameter in found.values():
        whole = gathered(known[name]) if is_sharded(known[name]) else known[name]
        with GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(whole)


def _replaced(state: Mapping[str, Any], make: Callable[[Any], Any]) -> dict[str, Any]:
    made: dict[int, Any] = {}
    for value in state.values():
        if is_partitioned(value) and id(value) not in made:
            made[id(value)] = make(value)
    return {name: made.get(id(value), value) for name, value in state.items()}


def _empty_rows_of(parameter: Any) -> Any:
    return _sharded(torch.empty(parameter.ds_shape, dtype=parameter.dtype, device="meta"), parameter.device)


@torch.no_grad()
def _rows_of(parameter: Any) -> Any:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    gather = parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE  # small parameters are complete on every rank
    with GatheredParameters([parameter] if gather else []):
        return _sharded(parameter.data, parameter.device)


def _sharded(whole: torch.Tensor, device: torch.device) -> Any:
    """This rank's rows of a tensor; uninitialised for one on the meta device. A scalar is replicated."""
    from torch.distributed.tensor import DTensor, Shard

    box = layout().box(tuple(whole.shape), dist.get_rank()) if whole.dim() else Box((), ())
    piece = torch.empty(box.sizes, dtype=whole.dtype, device=device)
    if not whole.is_meta and not box.is_empty:
        piece.copy_(narrowed(whole, box.ranges))
    if not whole.dim():
        return piece
    mesh, stride = _mesh(device.type, dist.group.WORLD), torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(piece, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=stride)


@lru_cache(maxsize=4)
def _mesh(device: str, group: Any) -> Any:
    """The mesh of all ranks, cached for as long as the process group is the same."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (dist.get_world_size(),))
