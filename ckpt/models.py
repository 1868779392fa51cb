"""Models: their parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ckpt import fsdp1
from ckpt.formats.dtypes import name_of
from ckpt.formats.sharding import Layout, divided, is_sharded
from ckpt.fsdp1 import is_fsdp1
from ckpt.parts import Notes, Read
from ckpt.unwrap import clean_name, unwrap


@dataclass
class ModelPart:
    """Parameters and buffers under names without any wrapper's prefix, and what modules keep as extra state."""

    key: str
    model: nn.Module
    same_class: bool = False
    can_be_spread: bool = True

    @property
    def kind(self) -> str:
        return type(unwrap(self.model)).__name__

    def capture(self) -> dict[str, Any]:
        if is_fsdp1(self.model):
            return fsdp1.model_state(self.model)
        module = unwrap(self.model)
        return {clean_name(module, name): value for name, value in module.state_dict().items()}

    def is_spread(self) -> bool:
        return is_fsdp1(self.model) or any(is_sharded(one) for one in unwrap(self.model).parameters())

    def layouts(self) -> frozenset[Layout]:
        if is_fsdp1(self.model):
            return frozenset({fsdp1.layout(self.model)})
        return divided(unwrap(self.model).parameters())

    def check(self, saved: Mapping[str, Any]) -> dict[str, str]:
        live = self.capture()
        unfit = dict.fromkeys(live.keys() - saved.keys(), "missing in the checkpoint")
        unfit |= dict.fromkeys(saved.keys() - live.keys(), "unexpected: the model has no such key")
        for name in live.keys() & saved.keys():
            if problem := _compare(live[name], saved[name]):
                unfit[name] = problem
        return unfit

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> None:
        live = self.capture()
        values = None
        for name in live:
            if name in unfit and not _fits_when_cast(live[name], saved.get(name)):
                continue
            if isinstance(live[name], torch.Tensor):
                saved[name].read_into(live[name])
            else:  # extra state, which may hold tensors anywhere
                values = values or read()
                live[name] = values[name]
        for name, why in unfit.items():
            was_cast = _fits_when_cast(live.get(name), saved.get(name))
            (notes.approximated if was_cast else notes.skipped)[f"{self.key}.{name}"] = why
        self._load(live)

    def _load(self, state: dict[str, Any]) -> None:
        if is_fsdp1(self.model):
            fsdp1.load_model_state(self.model, state)
            return
        # The tensors are in place already and are copied onto themselves; what counts are hooks and extra state.
        module = unwrap(self.model)
        raw = {clean_name(module, name): name for name in module.state_dict()}
        module.load_state_dict({raw[name]: value for name, value in state.items()}, strict=False)


def _compare(live: Any, saved: Any) -> str | None:
    if not isinstance(live, torch.Tensor) or not hasattr(saved, "read_into"):
        both = isinstance(live, torch.Tensor) == hasattr(saved, "read_into")
        return None if both else "a tensor on one side only"
    if is_lazy(live):
        return "not initialised here yet: run one forward pass first"
    if tuple(live.size()) != saved.shape:
        return f"shape {list(saved.shape)} in the checkpoint, {list(live.size())} here"
    if live.dtype != saved.dtype:
        return f"dtype {name_of(saved.dtype)} in the checkpoint, {name_of(live.dtype)} here"
    return None


def _fits_when_cast(live: Any, saved: Any) -> bool:
    if not isinstance(live, torch.Tensor) or not hasattr(saved, "read_into") or is_lazy(live):
        return False
    return bool(tuple(live.size()) == saved.shape)
