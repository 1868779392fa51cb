"""FullyShardedDataParallel (FSDP 1), whose parameters are parts of flat tensors: state goes through PyTorch's calls.

PyTorch returns sharded tensors by the names of the bare model. These calls are collective: every rank makes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ckpt.compat.torch import tied_in
from ckpt.errors import UnsupportedError
from ckpt.formats.layout import Layout, Members
from ckpt.formats.sharded_tensors import group_layout, over_ranks
from ckpt.state.unwrap import clean_name, unwrap


def is_flat(model: nn.Module) -> bool:
    """Whether the optimizer has flat parameters instead of those of the bare model."""
    from torch.distributed.fsdp import FlatParameter

    return any(isinstance(parameter, FlatParameter) for parameter in model.parameters())


def layout(model: nn.Module, members: Members) -> Layout:
    """The layout of every parameter: sharded along dimension 0 over the ranks of the process group, and, with
    HYBRID_SHARD, replicated over such groups."""
    return over_ranks(group_layout(_group(model)), members)


def _wrappers(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel.fsdp_modules(model)


def _group(model: nn.Module) -> Any:
    return _wrappers(model)[0].process_group


def _anywhere(here: bool, model: nn.Module) -> bool:
    """Whether `here` is true on any rank. Collective: every rank makes this call."""
    group = _group(model)
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, here, group)
    return any(found)


def _ties(model: nn.Module) -> dict[str, str]:
    """The name of every tied parameter, with the name of the parameter that it is tied to."""
    bare = unwrap(model)
    names = {id(module): clean_name(bare, name) for name, module in bare.named_modules()}

    def full_name(module: nn.Module, parameter: str) -> str:
        return f"{names[id(module)]}.{parameter}".lstrip(".")

    shared = [info for wrapper in _wrappers(model) for info in tied_in(wrapper)]
    return {
        full_name(info.module, info.param_name): full_name(info.prim_module, info.prim_param_name) for info in shared
    }


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
    try:
        state = get_optimizer_state_dict(model, optimizer)
    except ValueError as error:
        if 0 in torch.distributed.get_process_group_ranks(_group(model)):
            raise
        raise UnsupportedError(  # it broadcasts from rank 0
            "PyTorch gives this state of an optimizer under FSDP 1 only to a process group that has rank 0 of the job, "
            f"and this one has not ({error}). Use FSDP 2 (fully_shard), or use_orig_params=True."
        ) from error
    if not stepped:  # the call has initialised it
        optimizer.state.clear()
    if not _anywhere(stepped, model):  # a rank may hold only empty shards of parameters that have state
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
