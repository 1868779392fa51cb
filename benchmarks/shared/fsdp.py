"""A model sharded with FSDP 2, and its AdamW."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WIDTH = 1024


def build(megabytes: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = max(2, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))  # weights and two moments
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    optimizer.zero_grad()  # gradients would be saved too, by ckpt alone
    return model, optimizer


def local_shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's shards of every parameter and of its moments, in one order."""
    found = []
    for parameter in model.parameters():
        moments = optimizer.state[parameter]
        found += [local(tensor) for tensor in (parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"])]
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
