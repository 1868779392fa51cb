"""The objects that a manager saves and loads, by key, and the interface of what provides them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ckpt.errors import ConfigError
from ckpt.root.retention import Keep
from ckpt.state.unwrap import is_instance

KINDS = ("model", "optimizer", "scheduler", "scaler", "dataloader")
_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Stateful(Protocol):
    """An object that returns its state and loads it again, as torch's optimizers, schedulers and scalers do."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(frozen=True)
class ManagedObjects:
    """The managed objects by key, at one moment. `left_out` are keys of objects that are neither saved nor loaded."""

    models: Mapping[str, nn.Module] = field(default_factory=dict)
    optimizers: Mapping[str, Stateful] = field(default_factory=dict)
    others: Mapping[str, Stateful] = field(default_factory=dict)  # schedulers, scalers: state fits the same class only
    custom: Mapping[str, Stateful] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()

    def identities(self) -> tuple[Any, ...]:
        """A value that is equal for the same objects under the same keys."""
        groups = (self.models, self.optimizers, self.others, self.custom)
        return self.left_out, [(key, id(value)) for group in groups for key, value in group.items()]


class ObjectSource(Protocol):
    """Provides a manager's objects, its defaults, and hooks around a save and a load."""

    @property
    def root(self) -> str | None:
        """Where to save, if the manager is given no root."""

    @property
    def keep(self) -> Keep | None:
        """Which checkpoints to keep, if the manager is given no `keep`."""

    @property
    def gradients(self) -> bool:
        """Whether to save gradients, if `SaveOptions.gradients` is None."""

    def find(self) -> ManagedObjects:
        """The present objects. Raises `StateError` if an object that was there before is gone."""

    def loaders(self) -> dict[str, Any]:
        """Data loaders by key."""

    def on_loader(self, told: Callable[[], None]) -> None:
        """Call a function whenever a loader has been added, until `release`."""

    def release(self) -> None:
        """The manager is closed."""

    def name(self) -> str | None:
        """The name of the next checkpoint; None for the manager's own naming."""

    def before_save(self, folder: str) -> None:
        """Called before a checkpoint is saved to a folder."""

    def after_save(self) -> None:
        """Called when the state of a save has been captured."""

    def before_load(self, folder: str) -> None:
        """Called before the checkpoint in a folder is loaded."""

    def state(self) -> dict[str, Any]:
        """State of the source itself, saved for each rank beside the objects."""

    def go_back(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; an empty dict if the checkpoint has none."""


class GivenObjects:
    """The objects that were given to the manager's constructor. They never change."""

    root: str | None = None
    keep: Keep | None = None
    gradients = False

    def __init__(self, **objects: Any) -> None:
        found = {kind: named(kind, value) for kind, value in objects.items()}
        others = {**found["scheduler"], **found["scaler"]}
        self._found = ManagedObjects(found["model"], found["optimizer"], others)
        self._loaders = found["dataloader"]
        _refuse_no_loaders(self._loaders)

    def find(self) -> ManagedObjects:
        return self._found

    def loaders(self) -> dict[str, Any]:
        return self._loaders

    def on_loader(self, told: Callable[[], None]) -> None: ...

    def release(self) -> None: ...

    def name(self) -> str | None:
        return None

    def before_save(self, folder: str) -> None: ...

    def after_save(self) -> None: ...

    def before_load(self, folder: str) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def go_back(self, state: dict[str, Any]) -> None: ...


def named(kind: str, value: Any) -> dict[str, Any]:
    """Objects by key, for one object, `Joined` ones, a sequence, or a dict: `model`, `model.0`, `model.generator`.

    The optimizers in a container of them are joined: `optimizer`; if they are of several classes, `optimizer.AdamW`.
    A dict of optimizers by names of parameters, which have dots (`{"layers.0.weight": optimizer}`), is one optimizer.
    """
    found = _named(kind, value)
    return _without_containers(found) if kind == "optimizer" else found


def _without_containers(optimizers: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, optimizer in optimizers.items():
        inner: dict[str, Any] = {}
        if isinstance(getattr(optimizer, "optimizers", None), list | tuple):
            from ckpt.state.joined import contained_optimizers

            inner = dict(contained_optimizers(optimizer))
        apart = "-" if "." in key else "."
        found |= {f"{key}{apart}{kind}" if len(inner) > 1 else key: joined for kind, joined in inner.items()}
        found |= {} if inner else {key: optimizer}
    return found


def _named(kind: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if is_instance(value, "ckpt.state.joined.Joined"):
        return {kind: value.as_one(kind)}
    if isinstance(value, Mapping):
        _refuse_state(kind, value)
        if kind == "optimizer" and any("." in name for name in value if isinstance(name, str)):
            from ckpt.state.joined import Joined

            return {kind: Joined(value).as_one(kind)}
        return {f"{kind}.{_checked(name)}": item for name, item in value.items()}
    if isinstance(value, list | tuple):
        return {f"{kind}.{index}": item for index, item in enumerate(value)}
    return {kind: value}


def _refuse_state(kind: str, value: Mapping[Any, Any]) -> None:
    """Refuse a state_dict in place of its object: it could be saved, and nothing would ever load it."""
    of_model = bool(value) and all(isinstance(item, torch.Tensor) for item in value.values())
    if of_model or {"state", "param_groups"} <= value.keys():
        raise ConfigError(
            f"StateManager got a state_dict as {kind}=. Pass the object itself, {kind}={kind}: ckpt calls its "
            "state_dict() at every save, and loads into it."
        )


def _refuse_no_loaders(loaders: Mapping[str, Any]) -> None:
    """Refuse what gives no batches: whatever cannot be iterated over, and text."""
    wrong = [
        f"{key} ({type(loader).__name__})"
        for key, loader in loaders.items()
        if isinstance(loader, str | bytes) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__"))
    ]
    if wrong:
        raise ConfigError(f"ckpt can't iterate over {', '.join(wrong)}: pass the loader that your loop iterates over.")


def is_part_name(name: Any) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _checked(name: Any) -> str:
    if not is_part_name(name):
        raise ConfigError(
            f"{name!r} is not a valid part name, because it becomes a file name: use letters, digits, '_' and '-'."
        )
    return str(name)
