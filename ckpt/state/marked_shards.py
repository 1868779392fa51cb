"""Plain parameters of which every rank has a shard of its own, such as its experts: what the user says about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckpt.errors import ConfigError, UnsupportedError
from ckpt.formats.sharded_tensors import ShardOutline, is_sharded
from ckpt.state.parts import Unmarked
from ckpt.state.unwrap import modules_in, unwrap

_MARKS = "_ckpt_shards"  # by the name of a parameter in its module: it outlives parameters that are replaced

# State of torch's Adafactor: means over the last dimension of a parameter, and over the one before it.
_FACTORED = {"row_var": -1, "col_var": -2}


@dataclass(frozen=True)
class ShardMark:
    """Along which dimension a parameter is divided over the ranks of a mesh. `group`: of these ranks, if given so."""

    dim: int
    mesh: Any
    group: Any = None

    def around(self, local: torch.Tensor) -> Any:
        """The DTensor whose shard on this rank is the tensor, in the same memory."""
        from torch.distributed.tensor import Shard

        kind = torch.get_default_device().type if local.is_meta else local.device.type
        mesh = self.mesh or _mesh_of_group(self.group, kind)
        if kind != mesh.device_type and not local.is_meta:
            raise UnsupportedError(
                f"ckpt.mark_sharded: a parameter is on {kind}, but its mesh is on {mesh.device_type}."
            )
        shape = [size * (mesh.size() if dim == self.dim else 1) for dim, size in enumerate(local.size())]
        stride = torch.empty(shape, device="meta").stride()
        return ShardOutline(mesh, [Shard(self.dim)], torch.Size(shape), stride).around(local.detach())

    def __deepcopy__(self, memo: Any) -> ShardMark:
        return self  # a copy of the model is divided over the same ranks

    def __reduce__(self) -> Any:
        return type(None), ()  # groups of ranks are not pickled, and the model may be


def mark_sharded(module: nn.Module, dim: int = 0, *, mesh: Any = None, names: Iterable[str] | None = None) -> None:
    """Declare that a module's plain parameters are shards of larger tensors, divided evenly across the ranks.

        mark_sharded(model.experts, mesh=mesh["ep"])  # weights of shape [experts of this rank, ...]

    Mark parameters that your own code divides across ranks, such as experts that differ on every rank. ckpt then saves
    these parameters, and their optimizer state, as shards of one tensor, so that any number of ranks can load it.
    Without the mark, every rank saves its own tensors, and only the same number of ranks can load them. If there is no
    process group, the mark has no effect: the parameters are complete. If a checkpoint was saved without the mark, load
    that checkpoint before you mark the module.

    Args:
        module: The module with these parameters.
        dim: The dimension along which they are divided.
        mesh: A device mesh of one dimension, or a process group of all ranks; None: all ranks.
        names: Names of parameters, as in `module.named_parameters()`; None: all.

    Raises:
        ConfigError: Some parameters can't be marked; the error names all of them.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    wanted = list(named) if names is None else list(names)
    wrong = [f"{name}: {why}" for name in wanted if (why := _obstacle(named.get(name), dim))]
    if not wanted or wrong:
        what = "; ".join(wrong) or f"{type(module).__name__} has no parameters"
        raise ConfigError(f"ckpt.mark_sharded: {what}.")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mark = _mark(dim, mesh)
    for name in wanted:
        owner, _, own_name = name.rpartition(".")
        vars(module.get_submodule(owner)).setdefault(_MARKS, {})[own_name] = mark


def _obstacle(parameter: Any, dim: int) -> str | None:
    if parameter is None:
        return "there is no such parameter"
    if is_sharded(parameter):
        return "it is a DTensor, so ckpt knows its shards already"
    return None if 0 <= dim < parameter.dim() else f"it has {parameter.dim()} dimensions, but dim={dim}"


def _mark(dim: int, mesh: Any) -> ShardMark:
    if hasattr(mesh, "get_group"):
        if mesh.ndim != 1:
            raise ConfigError(
                f'ckpt.mark_sharded needs one dimension of the mesh, not {mesh.ndim}. Give one dimension: mesh["ep"].'
            )
        return ShardMark(dim, mesh)
    ranks = dist.get_process_group_ranks(mesh)
    if len(ranks) < dist.get_world_size():
        raise ConfigError(
            f"ckpt.mark_sharded: the group has only {len(ranks)} of {dist.get_world_size()} ranks, so ckpt can't tell "
            'where the other copies are. Give one dimension of a mesh that has all ranks: mesh["ep"].'
        )
    return ShardMark(dim, None, mesh if mesh is not None else dist.group.WORLD)


@lru_cache(maxsize=4)
def _mesh_of_group(group: Any, device: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device)


def _factored(parameter: Any, key: Any) -> torch.Size:
    sizes = list(parameter.size())
    sizes[_FACTORED[key]] = 1
    return torch.Size(sizes)


class MarkedShards(Unmarked):
    """The marks of the parameters of some models, by the parameters' identities."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._marks: dict[int, ShardMark] = {}
        for model in models:
            for node in modules_in(unwrap(model)):
                for name, mark in vars(node).get(_MARKS, {}).items():
                    parameter = getattr(node, name, None)
                    if parameter is not None and mark is not None:
                        self._marks[id(parameter)] = mark

    def __bool__(self) -> bool:
        return bool(self._marks)

    def has(self, parameter: Any) -> bool:
        return id(parameter) in self._marks

    def whole(self, parameter: Any) -> Any:
        return self.like(parameter, parameter)

    def state_like(self, parameter: Any, key: Any) -> Any:
        mark = self._marks.get(id(parameter))
        if mark is None or key not in _FACTORED or parameter.dim() < 2:
            return self.whole(parameter)
        return self.like(parameter, torch.empty(_factored(parameter, key), device=parameter.device), key)

    def like(self, parameter: Any, value: Any, key: Any = None) -> Any:
        mark = self._marks.get(id(parameter))
        if mark is None or not isinstance(value, torch.Tensor):
            return value
        if key in _FACTORED and parameter.dim() > 1:
            if mark.dim == parameter.dim() + _FACTORED[key] or value.size() != _factored(parameter, key):
                return value  # a mean over what this rank has: no shard of anything
        elif value.size() != parameter.size():
            return value
        if is_sharded(parameter):
            raise ConfigError(
                "a parameter that you marked with ckpt.mark_sharded is now a DTensor, so ckpt already knows its "
                "shards. Remove the mark, or exclude the parameter from FSDP: fully_shard(..., ignored_params=...)."
            )
        return mark.around(value)

    def in_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if not self._marks:
            return dict(state)
        made = {id(value): self.whole(value) for value in state.values() if self.has(value)}
        return {name: made.get(id(value), value) for name, value in state.items()}
