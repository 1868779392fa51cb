"""FullyShardedDataParallel, whose parameters are pieces of flat tensors: PyTorch itself gives their state out.

What it gives out are tensors of which every rank holds a piece, by the names of the bare model. These calls are
collective: every rank makes them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from ckpt.formats.layout import Layout
from ckpt.state.unwrap import clean_name, modules_in, unwrap


def is_fsdp1(model: nn.Module) -> bool:
    """Whether any module in it is wrapped so. Whoever wraps one has imported it."""
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return fsdp is not None and any(isinstance(one, fsdp.FullyShardedDataParallel) for one in modules_in(model))


def is_flat(model: nn.Module) -> bool:
    """Whether its optimizer sees flat parameters in place of those of the bare model."""
    return not all(one._use_orig_params for one in _wrapped(model))


def layout(model: nn.Module) -> Layout:
    """How it divides every parameter: along dimension 0, among the ranks of its group."""
    ranks = tuple(torch.distributed.get_process_group_ranks(_group(model)))
    return Layout((len(ranks),), ranks, ("S0",))


def _wrapped(model: nn.Module) -> list[Any]:
    return [one for one in model.modules() if hasattr(one, "_fsdp_wrapped_module")]


def _group(model: nn.Module) -> Any:
    return _wrapped(model)[0].process_group


def _anywhere(here: bool, model: nn.Module) -> bool:
    """Whether something holds on any rank. Every rank makes this call."""
    group = _group(model)
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, here, group)
    return any(found)


def _ties(model: nn.Module) -> dict[str, str]:
    """For every tied parameter the name of the one that it is tied to."""
    bare = unwrap(model)
    names = {id(one): clean_name(bare, name) for name, one in bare.named_modules()}

    def full_name(module: nn.Module, parameter: str) -> str:
        return f"{names[id(module)]}.{parameter}".lstrip(".")

    handles = [one._handle for one in _wrapped(model) if one._handle is not None]
    shared = [one for handle in handles for one in handle.flat_param._shared_param_infos]
    return {full_name(one.module, one.param_name): full_name(one.prim_module, one.prim_param_name) for one in shared}


def model_state(model: nn.Module) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state, ties = get_model_state_dict(model), _ties(model)
    return {name: state[ties.get(name, name)] for name in state}


def load_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, state, options=StateDictOptions(strict=False))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    stepped = bool(optimizer.state)
    state = get_optimizer_state_dict(model, optimizer)
    if not stepped:  # it has made some up to have something to show
        optimizer.state.clear()
    if not _anywhere(stepped, model):  # a rank may only hold empty pieces of what has state
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
