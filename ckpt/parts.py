"""The parts that a manager keeps: how each gives its state, and takes it back.

A part's state is a tree of values and tensors. When it comes back from a checkpoint the same tree is read twice: once
with `SavedTensor`s in place of tensors, to check that all of it fits before anything is touched, and once for real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ckpt.formats.dtypes import name_of
from ckpt.unwrap import clean_name, gradients, parameter_names, unwrap

_MOMENTS = ("exp_avg", "momentum_buffer", "square_avg", "sum")  # state with the shape of its parameter


class SavedTensor(Protocol):
    """A tensor in a checkpoint that has not been read yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor: ...

    def read_into(self, target: torch.Tensor) -> None: ...


@dataclass
class Notes:
    """What restoring leaves to say: keys that were left out and why, and what is not exactly as it was."""

    skipped: dict[str, str] = field(default_factory=dict)
    approximated: dict[str, str] = field(default_factory=dict)


class Part(Protocol):
    """One object under the manager's care."""

    key: str
    same_class: bool  # whether a saved state fits only an object of the same class

    @property
    def kind(self) -> str:
        """The class of the object."""

    def capture(self) -> Any:
        """The state, as a tree of values and tensors. Tensors are the live ones."""

    def check(self, saved: Any) -> dict[str, str]:
        """What of a saved state does not fit, by key. Changes nothing."""

    def restore(self, saved: Any, read: Callable[[], Any], unfit: Mapping[str, str], notes: Notes) -> None:
        """Take a saved state back, all but what is `unfit`. `read` gives the same tree with its tensors read."""


@dataclass
class ModelPart:
    """Parameters and buffers under names without any wrapper's prefix, and what modules keep as extra state."""

    key: str
    model: nn.Module
    same_class: bool = False

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    @property
    def module(self) -> nn.Module:
        return unwrap(self.model)

    def capture(self) -> dict[str, Any]:
        module = self.module
        return {clean_name(module, name): value for name, value in module.state_dict().items()}

    def check(self, saved: Mapping[str, Any]) -> dict[str, str]:
        live = self.capture()
        unfit = dict.fromkeys(live.keys() - saved.keys(), "missing in the checkpoint")
        unfit |= dict.fromkeys(saved.keys() - live.keys(), "unexpected: the model has no such key")
        for name in live.keys() & saved.keys():
            if problem := _compare(live[name], saved[name]):
                unfit[name] = problem
        return unfit

    def restore(self, saved: Any, read: Callable[[], Any], unfit: Mapping[str, str], notes: Notes) -> None:
        module = self.module
        live = module.state_dict()
        values = None
        for raw in live:
            name = clean_name(module, raw)
            if name in unfit and not _fits_when_cast(live[raw], saved.get(name)):
                continue
            if isinstance(live[raw], torch.Tensor):
                saved[name].read_into(live[raw])
            else:  # extra state, which may hold tensors anywhere
                values = values or read()
                live[raw] = values[name]
        # The tensors are in place already and are copied onto themselves; what counts are hooks and extra state.
        module.load_state_dict(live, strict=False)
        mine = self.capture()
        for name, why in unfit.items():
            was_cast = _fits_when_cast(mine.get(name), saved.get(name))
            (notes.approximated if was_cast else notes.skipped)[f"{self.key}.{name}"] = why


def _compare(live: Any, saved: Any) -> str | None:
    if not isinstance(live, torch.Tensor) or not hasattr(saved, "read_into"):
        both = isinstance(live, torch.Tensor) == hasattr(saved, "read_into")
        return None if both else "a tensor on one side only"
    if tuple(live.shape) != saved.shape:
        return f"shape {list(saved.shape)} in the checkpoint, {list(live.shape)} here"
    if live.dtype != saved.dtype:
        return f"dtype {name_of(saved.dtype)} in the checkpoint, {name_of(live.dtype)} here"
    return None


def _fits_when_cast(live: Any, saved: Any) -> bool:
    return isinstance(live, torch.Tensor) and hasattr(saved, "read_into") and tuple(live.shape) == saved.shape


@dataclass
class GradientsPart:
    """Gradients that wait for the rest of their accumulation window. Every rank has its own."""

    key: str
    models: Mapping[str, nn.Module]
    same_class: bool = False
    kind: str = "gradients"

    def capture(self) -> dict[str, Any]:
        return {key: gradients(unwrap(model)) for key, model in self.models.items()}

    def check(self, saved: Any) -> dict[str, str]:
        return {}  # where a parameter fits, its gradient does

    def restore(self, saved: Any, read: Callable[[], Any], unfit: Mapping[str, str], notes: Notes) -> None:
        values = read()
        for key, model in self.models.items():
            module = unwrap(model)
            found = values.get(key, {})
            for name, parameter in module.named_parameters():
                gradient = found.get(clean_name(module, name))
                parameter.grad = None if gradient is None else gradient.to(parameter.device)


@dataclass
class OptimizerPart:
    """An optimizer's state by parameter name, so that neither order nor wrapping matters when it comes back."""

    key: str
    optimizer: torch.optim.Optimizer
    models: Mapping[str, nn.Module]
    same_class: bool = True

    @property
    def kind(self) -> str:
        return type(self.optimizer).__name__

    def capture(self) -> dict[str, Any]:
        names = self._names()
        raw = self.optimizer.state_dict()
        state = {names[index] if isinstance(index, int) else index: value for index, value in raw["state"].items()}
        groups = [{**group, "params": [names[index] for index in group["params"]]} for group in raw["param_groups"]]
        extra = {key: value for key, value in raw.items() if key not in ("state", "param_groups")}
        return {"state": state, "param_groups": groups, **extra}

    def check(self, saved: Mapping[str, Any]) -> dict[str, str]:
        live_groups, saved_groups = self._groups(), [group["params"] for group in saved["param_groups"]]
        if len(live_groups) != len(saved_groups):
            return {"param_groups": f"{len(saved_groups)} in the checkpoint, {len(live_groups)} here"}
        unfit: dict[str, str] = {}
        for index, (live, old) in enumerate(zip(live_groups, saved_groups, strict=True)):
            where = f"param_groups[{index}]"
            unfit |= {f"{where}.{name}": "missing in the checkpoint" for name in live if name not in old}
            unfit |= {
                f"{where}.{name}": "unexpected: the optimizer has no such parameter" for name in old if name not in live
            }
        return unfit | self._misshapen(saved["state"])

    def restore(self, saved: Any, read: Callable[[], Any], unfit: Mapping[str, str], notes: Notes) -> None:
        notes.skipped.update({f"{self.key}.{name}": why for name, why in unfit.items()})
        if "param_groups" in unfit:
            return
        values = read()
        state = {name: value for name, value in values["state"].items() if f"state.{name}" not in unfit}
        indices = {name: index for index, name in self._names().items()}
        known = {indices[name]: value for name, value in state.items() if name in indices}
        live = self.optimizer.state_dict()["param_groups"]
        groups = [
            {**saved_group, "params": mine["params"]}
            for saved_group, mine in zip(values["param_groups"], live, strict=True)
        ]
        extra = {key: value for key, value in values.items() if key not in ("state", "param_groups")}
        self.optimizer.load_state_dict({"state": known, "param_groups": groups, **extra})
        self._keep_dtypes(known)

    def _keep_dtypes(self, saved: Mapping[int, Any]) -> None:
        """`load_state_dict` casts state to the parameter's dtype: fp32 moments of bf16 weights would lose digits."""
        for index, parameter in enumerate(self._parameters()):
            for key, value in saved.get(index, {}).items() if isinstance(saved.get(index), dict) else ():
                live = self.optimizer.state[parameter].get(key)
                if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor) and live.dtype != value.dtype:
                    self.optimizer.state[parameter][key] = value.to(live.device)

    def _misshapen(self, state: Mapping[str, Any]) -> dict[str, str]:
        """State of a parameter whose shape is another one now. Scalars (a step count) fit any."""
        shapes = {name: tuple(p.shape) for name, p in zip(self._names().values(), self._parameters(), strict=True)}
        unfit = {}
        for name, entries in state.items():
            moments = {key: entries[key] for key in _MOMENTS if isinstance(entries, dict) and key in entries}
            for key, saved in moments.items():
                if name in shapes and saved.shape != shapes[name]:
                    unfit[f"state.{name}"] = f"{key} has shape {list(saved.shape)}, the parameter {list(shapes[name])}"
        return unfit

    def _parameters(self) -> list[torch.Tensor]:
        """In the order by which `state_dict` numbers them."""
        found: dict[int, torch.Tensor] = {}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                found.setdefault(id(parameter), parameter)
        return list(found.values())

    def _groups(self) -> list[list[str]]:
        names = self._names()
        numbered = self.optimizer.state_dict()["param_groups"]
        return [[names[index] for index in group["params"]] for group in numbered]

    def _names(self) -> dict[int, str]:
        """The name of each parameter by its number; those of no managed model go by their number alone."""
        known: dict[int, str] = {}
        for key, model in self.models.items():
            for identity, name in parameter_names(unwrap(model)).items():
                known.setdefault(identity, f"{key}.{name}" if key else name)
        return {i: known.get(id(p), f"@{i}") for i, p in enumerate(self._parameters())}


@dataclass
class ObjectPart:
    """Anything with `state_dict` and `load_state_dict`: schedulers, scalers, and objects of the user's own."""

    key: str
    value: Any
    same_class: bool = False

    @property
    def kind(self) -> str:
        return type(self.value).__name__

    def capture(self) -> Any:
        return self.value.state_dict()

    def check(self, saved: Any) -> dict[str, str]:
        return {}  # only the object itself can tell

    def restore(self, saved: Any, read: Callable[[], Any], unfit: Mapping[str, str], notes: Notes) -> None:
        self.value.load_state_dict(read())
