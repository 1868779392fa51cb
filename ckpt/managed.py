"""The objects that a manager takes care of, by their keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ckpt import rng
from ckpt.errors import ConfigError
from ckpt.formats.sharding import is_sharded, local_tensor
from ckpt.models import ModelPart
from ckpt.optimizers import OptimizerPart
from ckpt.parts import GradientsPart, ObjectPart, Part

KINDS = ("model", "optimizer", "scheduler", "scaler", "dataloader")
_TAKEN = (*KINDS, "rng", "generators", "loaders", "gradients", "state", "manifest")
_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Managed:
    """Parts, of which the main rank's state is saved, and generators, which every rank has of its own."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, scaler: Any, *, gradients: bool) -> None:
        self.models: dict[str, nn.Module] = named("model", model)
        self.parts: dict[str, Part] = {}
        self.generators: dict[str, Any] = {}
        self._gradients = gradients
        optimizers = named("optimizer", optimizer)
        others = {**named("scheduler", scheduler), **named("scaler", scaler)}
        _refuse_unmanageable({**self.models, **optimizers, **others})
        for key, value in self.models.items():
            self.parts[key] = ModelPart(key, value)
        self._add_optimizers(optimizers)
        for key, value in others.items():
            self.parts[key] = ObjectPart(key, value, same_class=True)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers themselves, without what Accelerate wraps around them."""
        found = []
        for part in self.parts.values():
            if isinstance(part, OptimizerPart):
                inner: Any = part.optimizer
                while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
                    inner = inner.optimizer
                found.append(inner)
        return found

    def model_part(self, key: str) -> ModelPart:
        """The model under a key, to be published."""
        part = self.parts.get(key)
        if not isinstance(part, ModelPart):
            known = ", ".join(name for name, one in self.parts.items() if isinstance(one, ModelPart)) or "none"
            raise ConfigError(f"part={key!r} is no model that is managed here. Models: {known}.")
        return part

    def tensors(self) -> Iterator[torch.Tensor]:
        """The parameters and buffers of models, and what optimizers know of them: most of the state."""
        for model in self.models.values():
            yield from (
                local_tensor(one) if is_sharded(one) else one for one in (*model.parameters(), *model.buffers())
            )
        yield from self._optimizer_state()

    def optimized(self) -> frozenset[int]:
        """The addresses of memory that only optimizers change, in their steps."""
        parameters = (p for one in self.optimizers for group in one.param_groups for p in group["params"])
        pieces = (local_tensor(one) if is_sharded(one) else one for one in parameters)
        return frozenset(one.untyped_storage().data_ptr() for one in (*pieces, *self._optimizer_state()))

    def _optimizer_state(self) -> Iterator[torch.Tensor]:
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                values = state.values() if isinstance(state, dict) else ()
                tensors = (value for value in values if isinstance(value, torch.Tensor))
                yield from (local_tensor(one) if is_sharded(one) else one for one in tensors)

    def own(self, rank: int) -> dict[str, Part]:
        """What a rank saves for itself alone."""
        key = f"gradients-{rank:05d}"
        return {key: GradientsPart(key, self.models)} if self._gradients else {}

    def register(self, objects: Mapping[str, Any]) -> None:
        """Take care of more objects; all of them, or none if any cannot be."""
        wrong = [f"{name}: {why}" for name, value in objects.items() if (why := self._obstacle(name, value))]
        if wrong:
            raise ConfigError("cannot register " + "; ".join(wrong) + ".")
        for name, value in objects.items():
            if rng.is_generator(value):
                self.generators[name] = value
            else:
                self.parts[name] = ModelPart(name, value) if isinstance(value, nn.Module) else ObjectPart(name, value)

    def _add_optimizers(self, optimizers: Mapping[str, Any]) -> None:
        # a single model's parameters go by their own names, those of several by the model's name and their own
        prefixed = {"" if len(self.models) == 1 else key.partition(".")[2]: one for key, one in self.models.items()}
        for key, value in optimizers.items():
            ours = isinstance(value, torch.optim.Optimizer)
            self.parts[key] = OptimizerPart(key, value, prefixed) if ours else ObjectPart(key, value)

    def _obstacle(self, name: str, value: Any) -> str | None:
        if name in self.parts or name in self.generators or name in _TAKEN:
            return "there is such a part already"
        if rng.is_generator(value) or _has_state(value):
            return None
        return f"a {type(value).__name__} has no state_dict and load_state_dict"


def _refuse_unmanageable(objects: Mapping[str, Any]) -> None:
    wrong = []
    for key, value in objects.items():
        if key.partition(".")[0] == "model" and not isinstance(value, nn.Module):
            wrong.append(f"{key} is a {type(value).__name__}, not a torch.nn.Module")
        elif not _has_state(value):
            wrong.append(f"{key} is a {type(value).__name__}, which has no state_dict and load_state_dict")
    if wrong:
        raise ConfigError("StateManager: " + "; ".join(wrong) + ".")


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def named(kind: str, value: Any) -> dict[str, Any]:
    """One object, a sequence or a dict of named ones, as objects by key: `model`, `model.0`, `model.generator`."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {f"{kind}.{_checked(name)}": one for name, one in value.items()}
    if isinstance(value, list | tuple):
        return {f"{kind}.{index}": one for index, one in enumerate(value)}
    return {kind: value}


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot name a part: use letters, digits, '_' and '-'. It becomes a file's name.")
    return name
