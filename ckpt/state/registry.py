"""The objects that a manager takes care of, by their keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ckpt.errors import ConfigError
from ckpt.formats.layout import is_sharded, local_tensor
from ckpt.formats.native.tensor_subclasses import is_packed, pieces
from ckpt.state import rng
from ckpt.state.accumulation import Windows, holds_unsharded, obstacle
from ckpt.state.comm_hooks import lacking_state
from ckpt.state.deepspeed.engine import KEY, engines_in, is_partitioned, with_engines
from ckpt.state.deepspeed.parts import EnginePart, PartitionsPart
from ckpt.state.model import ModelPart
from ckpt.state.objects import KINDS, Found
from ckpt.state.optimizer import OptimizerPart
from ckpt.state.parts import GradientsPart, ObjectPart, OwnPart, Part, has_state
from ckpt.state.zero_redundancy import ZeroRedundancyPart, is_zero_redundancy

_TAKEN = (*KINDS, "custom", "rng", "generators", "loaders", "gradients", KEY, "state", "manifest")

_IN_WINDOW = "saved in the middle of an accumulation window"
_WITHOUT = "the next update is made without them"

Watcher = Callable[[Iterable[torch.optim.Optimizer]], None]


class StateRegistry:
    """Parts, of which the main rank's state is saved, and generators, which every rank has of its own.

    `find` says what there is. It is asked again at every `look`: objects may come later. The `watchers` are given the
    optimizers that have come. `gradients`: whether they are saved; if none, where a window is open.
    """

    def __init__(self, find: Callable[[], Found], watchers: Iterable[Watcher] = (), *, gradients: bool | None) -> None:
        self.models: dict[str, nn.Module] = {}
        self.parts: dict[str, Part] = {}
        self.generators: dict[str, Any] = {}
        self._find = find
        self._windows = Windows()
        self._watchers = (*watchers, self._windows.watch)
        self._found = Found()
        self._registered: dict[str, Part] = {}
        self._gradients = gradients
        self._engines: dict[str, EnginePart] = {}

    def look(self) -> None:
        """Take care of what there is now."""
        found = self._find()
        if found.identities() == self._found.identities():
            return
        _refuse_unmanageable({**found.models, **found.optimizers, **found.others, **found.custom})
        engines = {key: self._engine_part(key, one) for key, one in engines_in(found.models).items()}
        common = {one.key: one for one in engines.values()}
        parts = {**_found_parts(with_engines(found)), **common, **self._registered}
        known = self._stepping
        self._found, self.models, self._engines = found, found.models, engines
        self.parts = {key: part for key, part in parts.items() if key not in found.left_out}
        new = [one for one in self._stepping if not any(one is other for other in known)]
        for watch in self._watchers:
            watch(new)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers themselves, without what Accelerate wraps around them."""
        found = []
        for part in self.parts.values():
            if isinstance(part, OptimizerPart):
                inner: Any = part.around if isinstance(part, ZeroRedundancyPart) else part.optimizer
                while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
                    inner = inner.optimizer
                found.append(inner)
        return found

    def optimizers_by_key(self) -> dict[str, torch.optim.Optimizer]:
        keys = (key for key, part in self.parts.items() if isinstance(part, OptimizerPart))
        return dict(zip(keys, self.optimizers, strict=True))

    def registered(self) -> list[Any]:
        """The objects behind parts that are neither models nor optimizers."""
        return [part.value for part in self.parts.values() if isinstance(part, ObjectPart)]

    def steppers(self) -> list[Any]:
        """Whatever steps parameters here: optimizers of torch and of others, and engines."""
        return [*self._found.optimizers.values(), *self._engines.values()]

    @property
    def _stepping(self) -> list[Any]:
        """What hooks around steps can be registered with."""
        return [*self.optimizers, *(one for one in self._engines.values() if one.stepped is not None)]

    def _engine_part(self, key: str, engine: Any) -> EnginePart:
        known = self._engines.get(key)
        return known if known is not None and known.engine is engine else EnginePart(_engine_key(key), engine)

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
                for value in state.values() if isinstance(state, dict) else ():
                    if type(value) is torch.Tensor:  # most are, and training waits
                        yield value
                    elif isinstance(value, torch.Tensor):
                        parts = pieces(value).values() if is_packed(value) else (value,)
                        yield from (local_tensor(one) if is_sharded(one) else one for one in parts)

    def own(self, rank: int) -> dict[str, OwnPart]:
        """What a rank saves for itself alone, at any moment."""
        parts: dict[str, OwnPart] = self._gradients_part(rank) if self._gradients else {}
        for engine in self._engines.values():
            if is_partitioned(engine.engine):
                key = f"{engine.key}-{rank:05d}"
                parts[key] = PartitionsPart(key, engine.engine)
        return parts

    def _gradients_part(self, rank: int, of: frozenset[int] | None = None) -> dict[str, OwnPart]:
        key = f"gradients-{rank:05d}"
        return {key: GradientsPart(key, self.models, of=of)}

    def own_now(self, rank: int) -> tuple[dict[str, OwnPart], dict[str, str]]:
        """What a rank saves for itself alone, and what a checkpoint of this moment will lack, each with the reason."""
        return self._with_window(rank, self.own(rank), lacking_state(self.models))

    def own_then(self, rank: int, saved: Collection[str]) -> dict[str, OwnPart]:
        """What a rank takes back of a checkpoint that has this of it."""
        part = self._gradients_part(rank) if self._gradients is None else {}
        return {**self.own(rank), **{key: one for key, one in part.items() if key in saved}}

    def _with_window(
        self, rank: int, own: dict[str, OwnPart], lacking: dict[str, str]
    ) -> tuple[dict[str, OwnPart], dict[str, str]]:
        """Gradients of a window that is open are saved, or it is said why they are not."""
        if any(one.in_window for one in self._engines.values()):
            lacking["gradients"] = f"{_IN_WINDOW}, whose gradients DeepSpeed keeps to itself; {_WITHOUT}"
        if holds_unsharded(self.models):
            lacking["gradients"] = f"{_IN_WINDOW}, whose gradients FSDP 2 has not divided yet; {_WITHOUT}"
        if self._gradients:
            return own, lacking
        waiting = self._windows.open(self.optimizers)
        if not waiting:
            return own, lacking
        why = obstacle(self.models, waiting)
        if self._gradients is None and why is None:
            of = frozenset(id(one) for each in waiting for group in each.param_groups for one in group["params"])
            return {**own, **self._gradients_part(rank, of)}, lacking
        lacking["gradients"] = f"{_IN_WINDOW}, without its gradients, {why or 'with gradients=False'}; {_WITHOUT}"
        return own, lacking

    def release(self) -> None:
        """Leave the optimizers as they were."""
        self._windows.release()

    def leave_windows(self) -> None:
        """Clear gradients that wait: a state that was loaded without any would be trained on with them."""
        if self._gradients is None and obstacle(self.models) is None:
            for optimizer in self._windows.open(self.optimizers):
                optimizer.zero_grad()

    def register(self, objects: Mapping[str, Any]) -> None:
        """Take care of more objects; all of them, or none if any cannot be."""
        wrong = [f"{name}: {why}" for name, value in objects.items() if (why := self._obstacle(name, value))]
        if wrong:
            raise ConfigError("cannot register " + "; ".join(wrong) + ".")
        for name, value in objects.items():
            if rng.is_generator(value):
                self.generators[name] = value
            else:
                self._registered[name] = self.parts[name] = _registered_part(name, value)

    def _obstacle(self, name: str, value: Any) -> str | None:
        if name in self.parts or name in self.generators or name in _TAKEN:
            return "there is such a part already"
        if rng.is_generator(value) or has_state(value):
            return None
        return f"a {type(value).__name__} has no state_dict and load_state_dict"


def _found_parts(found: Found) -> dict[str, Part]:
    # a single model's parameters go by their own names, those of several by the model's name and their own
    prefixed = {"" if len(found.models) == 1 else key.partition(".")[2]: one for key, one in found.models.items()}
    parts: dict[str, Part] = {key: ModelPart(key, one) for key, one in found.models.items()}
    for key, one in found.optimizers.items():
        if is_zero_redundancy(one):
            parts[key] = ZeroRedundancyPart.of(key, one, prefixed)
        else:
            ours = isinstance(one, torch.optim.Optimizer)
            parts[key] = OptimizerPart(key, one, prefixed) if ours else ObjectPart(key, one)
    parts |= {key: ObjectPart(key, one, same_class=True) for key, one in found.others.items()}
    return parts | {key: _registered_part(key, one) for key, one in found.custom.items()}


def _engine_key(model: str) -> str:
    return model.replace("model", KEY, 1)


def _registered_part(key: str, value: Any) -> Part:
    return ModelPart(key, value) if isinstance(value, nn.Module) else ObjectPart(key, value)


def _refuse_unmanageable(objects: Mapping[str, Any]) -> None:
    wrong = []
    for key, value in objects.items():
        if key.partition(".")[0] == "model" and not isinstance(value, nn.Module):
            wrong.append(f"{key} is a {type(value).__name__}, not a torch.nn.Module")
        elif not has_state(value):
            wrong.append(f"{key} is a {type(value).__name__}, which has no state_dict and load_state_dict")
    if wrong:
        raise ConfigError("StateManager: " + "; ".join(wrong) + ".")
