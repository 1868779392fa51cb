"""Models spread over ranks in every way, and what it takes to compare them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt.formats.sharded_tensors import is_sharded, local_tensor
from tests.helpers.training import exact


def plain(seed: int) -> nn.Sequential:
    """Ten and three rows over four or eight ranks: uneven pieces, and empty ones."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 10), nn.Tanh(), nn.Linear(10, 3))


def fsdp2(seed: int) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = plain(seed)
    fully_shard(model[0])
    fully_shard(model)
    return model


def hsdp(seed: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = plain(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s")))
    return model


def parallelized(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def tensor_parallel(seed: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    return parallelized(plain(seed), init_device_mesh("cpu", (dist.get_world_size(),)))


def fsdp2_over_tensor_parallel(seed: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelized(plain(seed), mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def _fsdp1(seed: int, *, use_orig_params: bool, with_mesh: bool = False) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if with_mesh else None
    return FullyShardedDataParallel(
        plain(seed), use_orig_params=use_orig_params, device_id=torch.device("cpu"), device_mesh=mesh
    )


def ddp(seed: int) -> nn.Module:
    return DistributedDataParallel(plain(seed)) if dist.is_initialized() else plain(seed)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "tp": tensor_parallel,
    "fsdp2-tp": fsdp2_over_tensor_parallel,
    "fsdp1": lambda seed: _fsdp1(seed, use_orig_params=True),
    "fsdp1-flat": lambda seed: _fsdp1(seed, use_orig_params=False),
    "fsdp1-mesh": lambda seed: _fsdp1(seed, use_orig_params=True, with_mesh=True),
    "ddp": ddp,
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One step with the same data on every rank, so that all ways of spreading compute the same."""
    inputs = torch.linspace(-1, 1, 12).reshape(2, 6) * (1 + number)
    optimizer.zero_grad()
    model(inputs).pow(2).mean().backward()
    optimizer.step()


def whole(value: Any) -> Any:
    """A state with every tensor whole on every rank."""
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [whole(one) for one in value]
    if not is_sharded(value):
        return value
    if hasattr(value, "full_tensor"):
        return value.full_tensor()
    pieces: list[Any] = [None] * dist.get_world_size(value._process_group)
    # as an array: to pickle a tensor takes three times as long
    dist.all_gather_object(pieces, local_tensor(value).numpy(), group=value._process_group)
    return torch.cat([torch.from_numpy(piece) for piece in pieces])


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """All state of a model and its optimizer, whole, as a text that is equal only if every bit is."""
    from ckpt.state.registry import model_part, optimizer_part

    parts = (model_part("model", model), optimizer_part("optimizer", optimizer, {"": model}))
    return exact([whole(part.capture()) for part in parts])
