"""Folders as DeepSpeed writes them, of two parameters and a buffer, without starting an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

SHAPES = {"embed.weight": (3, 4), "bias": (5,)}
HYPER = {"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-6, "weight_decay": 0.0, "amsgrad": False}
_INNER = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}


def weights(plus: float = 0.0) -> dict[str, torch.Tensor]:
    """Numbers that tell every element from the others."""
    return {
        name: torch.arange(torch.Size(shape).numel()).float().reshape(shape) + plus for name, shape in SHAPES.items()
    }


def model_states(**more: Any) -> dict[str, Any]:
    shapes = [{name: torch.Size(shape) for name, shape in SHAPES.items()}]
    module = {**{name: tensor.bfloat16() for name, tensor in weights().items()}, "seen": torch.ones(2).half()}
    return {"module": module, "buffer_names": ["seen"], "param_shapes": shapes, "shared_params": {}, **more}


def zero_states(stage: int, partition: torch.Tensor, world_size: int, **more: Any) -> dict[str, Any]:
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    return {"optimizer_state_dict": {"zero_stage": stage, "partition_count": world_size, key: [partition], **more}}


def write_save(
    folder: Path, stage: int, world_size: int = 2, inner: Any = None, paddings: Sequence[int] = (), **more: Any
) -> Path:
    """The folder. `inner` is what the optimizer keeps beside each weight, by key; `paddings`: how many elements ZeRO 1
    and 2 leave free behind each; `more` goes to the model's file."""
    folder.mkdir()
    for rank in range(world_size):
        held: dict[str, Any] = {"param_alignment_paddings": [list(paddings)]} if paddings else {}
        if inner is not None:
            held[_INNER[stage]] = _inner(inner, stage, rank, world_size, paddings)
        states = zero_states(stage, partition(weights(), stage, rank, world_size, paddings), world_size, **held)
        torch.save(states, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3:
            torch.save(model_states(**more), folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if stage < 3:
        torch.save(model_states(**more), folder / "mp_rank_00_model_states.pt")
    return folder


def _inner(inner: Mapping[str, Any], stage: int, rank: int, world_size: int, paddings: Sequence[int]) -> dict[str, Any]:
    state = {
        key: partition(value, stage, rank, world_size, paddings) if isinstance(value, dict) else value
        for key, value in inner.items()
        if key != "param_groups"
    }
    return {"state": {0: state}, "param_groups": inner.get("param_groups", [{**HYPER, "params": [0]}])}


def partition(
    tensors: Mapping[str, torch.Tensor], stage: int, rank: int, world_size: int, paddings: Sequence[int] = ()
) -> torch.Tensor:
    """What a rank has of these tensors."""
    if stage < 3:
        free = [torch.full((count,), -1.0) for count in paddings or [0] * len(tensors)]
        each = zip((tensor.flatten() for tensor in tensors.values()), free, strict=True)
        return torch.cat([part for parts in each for part in parts]).chunk(world_size)[rank]
    shares = []
    for tensor in tensors.values():
        share = -(-tensor.numel() // world_size)
        padded = torch.cat([tensor.flatten(), torch.full((world_size * share - tensor.numel(),), -1.0)])
        shares.append(padded[rank * share : (rank + 1) * share])
    return torch.cat(shares)
