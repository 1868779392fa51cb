"""ZeRO 3, which divides every parameter among the ranks as a flat piece of it.

Here such a parameter is a DTensor that is sharded along dimension 0: it is gathered, one at a time, through DeepSpeed's
own calls, and each rank keeps its rows. These calls are collective: every rank makes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckpt.formats.layout import Box, Layout, gathered, is_sharded
from ckpt.formats.tensor_bytes import narrowed


def is_zero3(model: nn.Module) -> bool:
    """Whether it has parameters that are divided. Whoever divides them has imported it."""
    return "deepspeed" in sys.modules and any(is_divided(one) for one in model.parameters())


def is_divided(value: Any) -> bool:
    """Whether a value is a parameter that ZeRO 3 has divided: it has no data of its own."""
    return hasattr(value, "ds_id")


def layout() -> Layout:
    """How parameters are spread here: along dimension 0, over all ranks."""
    world_size = dist.get_world_size()
    return Layout((world_size,), tuple(range(world_size)), ("S0",))


def rows(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with this rank's rows of every divided parameter, in new memory. Tied ones stay one."""
    return _replaced(state, _rows_of)


def room(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same with memory that is still to be filled. No rank needs the others for it."""
    return _replaced(state, lambda one: _spread(torch.empty(one.ds_shape, dtype=one.dtype, device="meta"), one.device))


@torch.no_grad()
def fill(state: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Give divided parameters the values that all ranks know together, by name. Others stay as they are."""
    found = {id(one): (name, one) for name, one in state.items() if is_divided(one) and name in known}
    if not found:
        return
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    for name, parameter in found.values():
        whole = gathered(known[name]) if is_sharded(known[name]) else known[name]
        with GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(whole)


def _replaced(state: Mapping[str, Any], make: Callable[[Any], Any]) -> dict[str, Any]:
    made: dict[int, Any] = {}
    for one in state.values():
        if is_divided(one) and id(one) not in made:
            made[id(one)] = make(one)
    return {name: made.get(id(one), one) for name, one in state.items()}


@torch.no_grad()
def _rows_of(parameter: Any) -> Any:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    away = parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE  # small ones are whole everywhere, and stay so
    with GatheredParameters([parameter] if away else []):
        return _spread(parameter.data, parameter.device)


def _spread(whole: torch.Tensor, device: torch.device) -> Any:
    """This rank's rows of a tensor; of one on the meta device, room for them. What has no rows is whole everywhere."""
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
    """All ranks, as long as they are the same group."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (dist.get_world_size(),))
