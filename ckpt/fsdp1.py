"""FullyShardedDataParallel, whose parameters are pieces of flat tensors: PyTorch itself gives their state out.

What it gives out are tensors of which every rank holds a piece, by the names of the bare model. These calls are
collective: every rank makes them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from ckpt.formats.sharding import Layout


def is_fsdp1(model: nn.Module) -> bool:
    """Whether any module in it is wrapped so. Whoever wraps one has imported it."""
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return fsdp is not None and any(isinstance(one, fsdp.FullyShardedDataParallel) for one in model.modules())


def layout(model: nn.Module) -> Layout:
    """How it divides every parameter: along dimension 0, among the ranks of its group."""
    group: Any = next(one.process_group for one in model.modules() if hasattr(one, "_fsdp_wrapped_module"))
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    return Layout((len(ranks),), ranks, ("S0",))


def model_state(model: nn.Module) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(model)


def load_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, state, options=StateDictOptions(strict=False))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    stepped = bool(optimizer.state)
    state = get_optimizer_state_dict(model, optimizer)
    if not stepped:  # it has made some up to have something to show
        optimizer.state.clear()
        state["state"] = {}
    return dict(state)


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    if state["state"]:
        set_optimizer_state_dict(model, optimizer, state)
        return
    optimizer.state.clear()
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
