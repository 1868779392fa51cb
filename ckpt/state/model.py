"""Models: their parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ckpt.formats.layout import Layout, divided, is_sharded
from ckpt.formats.native.dtypes import name_of
from ckpt.state import fsdp1
from ckpt.state.deepspeed import zero3
from ckpt.state.deepspeed.engine import is_engine, refuse_bare
from ckpt.state.deepspeed.parts import refresh
from ckpt.state.deepspeed.zero3 import is_divided, is_zero3
from ckpt.state.fsdp1 import is_fsdp1
from ckpt.state.model_config import describe
from ckpt.state.parts import LEFT, Notes, Read, SavedTensor
from ckpt.state.replicated import NONE, Guarantee, equal_parameters, ruled_buffers
from ckpt.state.unwrap import clean_names, unwrap


@dataclass
class ModelPart:
    """Parameters and buffers under names without any wrapper's prefix, and what modules keep as extra state."""

    key: str
    model: nn.Module
    same_class: bool = False
    can_be_sharded: bool = True

    @property
    def kind(self) -> str:
        return type(unwrap(self.model)).__name__

    def __post_init__(self) -> None:
        refuse_bare(self.key, self.model)

    def capture(self) -> dict[str, Any]:
        """The state with the parameters and buffers themselves: tied ones are one object, on every rank."""
        return zero3.rows(self._state())

    def places(self) -> dict[str, Any]:
        """The same, but as tensors to read a state into, for `load` to take."""
        return zero3.room(self._state())

    def _state(self) -> dict[str, Any]:
        if is_fsdp1(self.model):
            return fsdp1.model_state(self.model)
        module = unwrap(self.model)
        state = module.state_dict(keep_vars=True)
        return {clean: state[name] for name, clean in clean_names(module, state).items()}

    def frozen(self) -> frozenset[str]:
        """Parameters without gradients, under all their names."""
        module = unwrap(self.model)
        named = module.named_parameters(remove_duplicate=False)
        return frozenset(clean_names(module, (name for name, one in named if not one.requires_grad)).values())

    def about(self, state: Any) -> dict[str, Any]:
        """The configuration that Hugging Face's tools build such a model from, if it has one."""
        return describe(unwrap(self.model), list(tensors_in(state)))

    def guaranteed(self, state: Mapping[str, Any]) -> Guarantee:
        equal, ruled = equal_parameters([self.model]), ruled_buffers(self.model)
        if not equal and not ruled:
            return NONE
        return Guarantee(
            frozenset(name for name, one in state.items() if id(one) in equal),
            frozenset(name for name, one in state.items() if id(one) in ruled),
        )

    def tied_to_ranks(self, names: Collection[str]) -> dict[str, str]:
        """Parameters. Running statistics may be taken from another rank, which has seen other samples."""
        module = unwrap(self.model)
        buffers = set(clean_names(module, (name for name, _ in module.named_buffers())).values())
        return {name: name for name in names if name not in buffers}

    def is_sharded(self) -> bool:
        parameters = unwrap(self.model).parameters()
        return is_fsdp1(self.model) or any(is_sharded(one) or is_divided(one) for one in parameters)

    def layouts(self) -> frozenset[Layout]:
        if is_fsdp1(self.model):
            return frozenset({fsdp1.layout(self.model)})
        if is_zero3(self.model):
            return frozenset({zero3.layout()})
        return divided(unwrap(self.model).parameters())

    def check(self, saved: Mapping[str, Any]) -> dict[str, str]:
        live = self.places()
        there = {id(value) for name, value in live.items() if name in saved}  # a tied one, under any of its names
        missing = [name for name in live.keys() - saved.keys() if not _is_tied(live[name], there)]
        unfit = dict.fromkeys(missing, "missing in the checkpoint")
        unfit |= dict.fromkeys(saved.keys() - live.keys(), "unexpected: the model has no such key")
        for name in live.keys() & saved.keys():
            if problem := _compare(live[name], saved[name]):
                unfit[name] = problem
        return unfit

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> Callable[[], None]:
        live = self.places()
        fitting = {name for name in live if name not in unfit or _fits_when_cast(live[name], saved.get(name))}
        # of a tied one, the last name that was saved counts
        owners = {id(value): name for name, value in live.items() if name in saved}
        places = {
            one.name: live[name] if name in fitting and owners[id(live[name])] == name else LEFT
            for name, one in saved.items()
            if isinstance(one, SavedTensor)
        }
        values = read(lambda one: places.get(one.name), live=True)  # what has no place is in extra state
        for name, why in unfit.items():
            (notes.approximated if name in fitting else notes.skipped)[f"{self.key}.{name}"] = why

        def take() -> None:
            known = values()
            extra = {name: known[name] for name in fitting if not isinstance(live[name], torch.Tensor)}
            self.load({**live, **extra}, left=live.keys() - (fitting & saved.keys()))

        return take

    def load(self, state: dict[str, Any], left: Collection[str] = ()) -> None:
        """Take a state whose tensors are those of `places`, filled already, but for the ones that were `left`."""
        if is_fsdp1(self.model):
            fsdp1.load_model_state(self.model, state)
            return
        # the tensors are in place already, and to copy one onto itself costs nothing: what counts are hooks and extras
        module = unwrap(self.model)
        live = module.state_dict(keep_vars=True)
        raw = clean_names(module, live)
        zero3.fill(live, {name: state[clean] for name, clean in raw.items() if clean not in left})
        there = {name: state[clean] for name, clean in raw.items() if not is_divided(live[name])}
        module.load_state_dict(there, strict=False)
        if is_engine(self.model):
            refresh(self.model)


def _is_tied(value: Any, others: set[int]) -> bool:
    return isinstance(value, torch.Tensor) and id(value) in others


def tensors_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a model's state, without what modules keep beside them."""
    return {name: one for name, one in state.items() if isinstance(one, torch.Tensor) or is_sharded(one)}


def _compare(live: Any, saved: Any) -> str | None:
    if not isinstance(live, torch.Tensor) or not isinstance(saved, SavedTensor):
        both = isinstance(live, torch.Tensor) == isinstance(saved, SavedTensor)
        return None if both else "a tensor on one side only"
    if is_lazy(live):
        return "not initialised here yet: run one forward pass first"
    if tuple(live.size()) != saved.shape:
        return f"shape {list(saved.shape)} in the checkpoint, {list(live.size())} here"
    if live.dtype != saved.dtype:
        return f"dtype {name_of(saved.dtype)} in the checkpoint, {name_of(live.dtype)} here"
    return None


def _fits_when_cast(live: Any, saved: Any) -> bool:
    if not isinstance(live, torch.Tensor) or not isinstance(saved, SavedTensor) or is_lazy(live):
        return False
    return tuple(live.size()) == saved.shape and live.dtype != saved.dtype
