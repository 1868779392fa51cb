"""FullyShardedDataParallel (FSDP 1), whose parameters are parts of flat tensors: state goes through PyTorch's calls.

PyTorch returns sharded tensors by the names of the bare model. These calls are collective: every rank makes them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ckpt.errors import UnsupportedError
from ckpt.formats.layout import Layout, Members
from ckpt.formats.sharded_tensors import group_layout, is_sharded, over_group, over_ranks
from ckpt.state.model import ModelPart
from ckpt.state.optimizer import OptimizerPart, is_joined
from ckpt.state.parts import Unmarked
from ckpt.state.unwrap import clean_name, is_fsdp1, unwrap


@dataclass
class Fsdp1ModelPart(ModelPart):
    """A model in which FullyShardedDataParallel wraps modules."""

    is_collective: ClassVar[bool] = True

    def _state(self) -> dict[str, Any]:
        self._marks()
        return model_state(self.model)

    def _marks(self) -> Unmarked:
        marks = super()._marks()
        if marks:
            raise UnsupportedError(
                f"{self.key}: ckpt.mark_sharded works with fully_shard, but not with FSDP 1 or DeepSpeed."
            )
        return marks

    def is_sharded(self) -> bool:
        return True

    def layouts(self, members: Members) -> frozenset[Layout]:
        return frozenset({layout(self.model, members)})

    def materialise(self, filled: Collection[str]) -> None:
        """FSDP 1 has given its parameters memory."""

    def load(self, state: dict[str, Any], left: Collection[str] = ()) -> None:
        load_model_state(self.model, state)


@dataclass
class Fsdp1OptimizerPart(OptimizerPart):
    """The optimizer of such a model, whose state PyTorch holds as flat tensors."""

    is_collective: ClassVar[bool] = True

    @property
    def _model(self) -> nn.Module:
        return next(model for model in self.models.values() if is_fsdp1(model))

    @property
    def _single(self) -> torch.optim.Optimizer:
        if is_joined(self.optimizer):
            raise UnsupportedError(
                f"{self.key}=ckpt.Joined(...): under FSDP 1 there can be only one optimizer. Use fully_shard."
            )
        optimizer: Any = self.optimizer
        single: torch.optim.Optimizer = optimizer
        return single

    def names(self) -> frozenset[str] | None:
        return None

    def is_sharded(self) -> bool:
        return True

    def layouts(self, members: Members) -> frozenset[Layout]:
        return frozenset({layout(self._model, members)})

    def capture(self) -> dict[str, Any]:
        return optimizer_state(self._model, self._single)

    def _misfits(self, saved: Mapping[str, Any]) -> dict[str, str]:
        unfit = super()._misfits(saved)
        return {} if is_flat(self._model) and "param_groups" not in unfit else unfit  # flat ones have no names

    def _set_state(self, values: Any, unfit: Mapping[str, str]) -> None:
        load_optimizer_state(self._model, self._single, values)

    def _live_state(self) -> Mapping[Any, Any]:
        return {}

    def _parameters_by_name(self) -> dict[str, Any]:
        return model_state(self._model)

    def _other_names(self) -> dict[str, str]:
        return {}  # PyTorch's calls have names of their own


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
    """The name of every tied parameter, with the first name of the same one. With `use_orig_params=False`, modules have
    no parameters, and PyTorch gives the same values under all names."""
    bare, first = unwrap(model), dict[int, str]()
    named = bare.named_parameters(remove_duplicate=False)
    return {clean: first.setdefault(id(value), clean) for name, value in named if (clean := clean_name(bare, name))}


def model_state(model: nn.Module) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state, ties = _marked(get_model_state_dict(model), _group(model)), _ties(model)
    return {name: state[ties.get(name, name)] for name in state}


def _marked(state: Mapping[Any, Any], group: Any) -> dict[Any, Any]:
    """State whose sharded tensors say which ranks hold them."""
    return {name: over_group(value, group) if is_sharded(value) else value for name, value in state.items()}


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
            "under FSDP 1, PyTorch returns this optimizer state only in a process group that contains rank 0 of the "
            f"job, and this group does not ({error}). Use FSDP 2 (fully_shard), or use_orig_params=True."
        ) from error
    if not stepped:  # the call has initialised it
        optimizer.state.clear()
    if not _anywhere(stepped, model):  # a rank may hold only empty shards of parameters that have state
        state["state"] = {}
    entries: Any = state["state"]
    return {**state, "state": {name: _marked(entry, _group(model)) for name, entry in entries.items()}}


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    if state["state"]:
        set_optimizer_state_dict(model, optimizer, state)
        return
    optimizer.state.clear()
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
