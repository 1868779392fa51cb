"""A mixture of experts, spread over ranks in every way: its experts are one tensor, or have names of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt
from tests.helpers.pipelines import Job

EXPERTS, WIDTH = 8, 6


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Experts(nn.Module):
    """All experts in one tensor for each weight, or those of some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(WIDTH, EXPERTS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        up, down = (one.to_local() if isinstance(one, DTensor) else one for one in (self.up, self.down))
        return torch.einsum("bi,eij,je->bj", inputs, up, down).clone()


class NamedExperts(nn.Module):
    """Experts that have their numbers as names, which are the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH) for number in range(EXPERTS)})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([expert(inputs) for expert in self.all.values()]).sum(0)


class Mixture(nn.Module):
    def __init__(self, seed: int, experts: Callable[[], nn.Module] = Experts) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.dense, self.experts = nn.Linear(WIDTH, WIDTH), experts()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.dense(inputs)
        mine = self.experts(torch.tanh(outputs))
        together = mine.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(together)  # the value is that of all experts, the gradient that of this rank's
        joined: torch.Tensor = outputs + mine + (together - mine).detach()
        return joined


def _job(model: nn.Module) -> Job:
    def train(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        torch.autograd.backward((model(inputs[:, :WIDTH]) - targets[:, :WIDTH]).pow(2).mean())

    return Job([model], train)


def _keep(experts: Any, place: int, places: int) -> None:
    """Leave this rank its experts, as plain parameters."""
    with torch.no_grad():
        experts.up = nn.Parameter(experts.up.chunk(places, 0)[place].clone())
        experts.down = nn.Parameter(experts.down.chunk(places, 1)[place].clone())


def _whole(seed: int) -> Job:
    return _job(Mixture(seed))


def _marked(model: Mixture, mesh: Any) -> Job:
    ckpt.mark_sharded(model.experts, mesh=mesh, names=["up"])
    ckpt.mark_sharded(model.experts, 1, mesh=mesh, names=["down"])
    fully_shard(model, ignored_params=set(model.experts.parameters()))
    return _job(model)


def _plain(seed: int) -> Job:
    model = Mixture(seed)
    _keep(model.experts, dist.get_rank(), ranks())
    return _marked(model, None)


def _plain_copies(seed: int) -> Job:
    """Experts over two ranks, and as many copies as there are pairs."""
    mesh = init_device_mesh("cpu", (ranks() // 2, 2), mesh_dim_names=("dp", "ep"))
    model = Mixture(seed)
    _keep(model.experts, mesh["ep"].get_local_rank(), 2)
    return _marked(model, mesh["ep"])


def _unmarked(seed: int) -> Job:
    model = Mixture(seed)
    _keep(model.experts, dist.get_rank(), ranks())
    fully_shard(model, ignored_params=set(model.experts.parameters()))
    return _job(model)


def _spread(experts: Any, mesh: Any) -> None:
    experts.up = nn.Parameter(distribute_tensor(experts.up.detach(), mesh, [Shard(0)]))
    experts.down = nn.Parameter(distribute_tensor(experts.down.detach(), mesh, [Shard(1)]))


def _dtensors(seed: int) -> Job:
    model = Mixture(seed)
    _spread(model.experts, init_device_mesh("cpu", (ranks(),), mesh_dim_names=("ep",)))
    fully_shard(model, ignored_params=set(model.experts.parameters()))
    return _job(model)


def _unflattened(seed: int) -> Job:
    """As torchtitan's ParallelDims: dense and sparse meshes that are made from one of all ranks, and joined again."""
    world = init_device_mesh("cpu", (ranks(),), mesh_dim_names=("world",))
    dense = world._unflatten(0, (1, ranks() // 2, 2), ("pp", "dp_shard", "cp"))
    sparse = world._unflatten(0, (1, ranks() // 2, 2), ("pp", "efsdp", "ep"))
    model = Mixture(seed)
    _spread(model.experts, sparse["ep"])
    fully_shard(model.experts, mesh=sparse["efsdp"])
    fully_shard(model, mesh=dense["dp_shard", "cp"]._flatten("fsdp"))
    return _job(model)


def _named(seed: int) -> Job:
    model = Mixture(seed, NamedExperts)
    here, each = dist.get_rank() if dist.is_initialized() else 0, EXPERTS // ranks()
    assert isinstance(model.experts, NamedExperts)
    for number in range(EXPERTS):
        if number // each != here:
            del model.experts.all[str(number)]
    if dist.is_initialized():
        fully_shard(model, ignored_params=set(model.experts.parameters()))
    return _job(model)


WAYS: dict[str, Callable[[int], Job]] = {
    "whole": _whole,
    "plain": _plain,
    "plain copies": _plain_copies,
    "DTensors": _dtensors,
    "unflattened": _unflattened,
    "named": _named,
    "unmarked": _unmarked,
}
