"""Where a manager finds what it takes care of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from ckpt.errors import ConfigError
from ckpt.root.retention import Keep

KINDS = ("model", "optimizer", "scheduler", "scaler", "dataloader")
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Found:
    """Objects by key, as they are at one moment. What is `left_out` is there, but neither saved nor loaded."""

    models: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)  # schedulers and scalers: each fits its own class only
    custom: dict[str, Any] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()

    def identities(self) -> tuple[Any, ...]:
        """What two looks share if they have found the same objects under the same keys."""
        groups = (self.models, self.optimizers, self.others, self.custom)
        return self.left_out, [(key, id(one)) for group in groups for key, one in group.items()]


class Source(Protocol):
    """Gives a manager its objects, whenever it looks, and what is to be done around a save and a load."""

    @property
    def root(self) -> str | None:
        """Where to save, unless the manager is told."""

    @property
    def keep(self) -> Keep | None:
        """Which checkpoints to keep, unless the manager is told."""

    @property
    def gradients(self) -> bool:
        """Whether to keep gradients, unless the manager is told."""

    def find(self) -> Found:
        """The objects that are there now. Refuses to go on without one that was there before."""

    def loaders(self) -> dict[str, Any]:
        """The loaders that go by a name of their own."""

    def name(self) -> str | None:
        """What to call the next checkpoint; none for the manager's own way."""

    def before_save(self, folder: str) -> None:
        """A checkpoint is about to be saved in that folder."""

    def after_save(self) -> None:
        """It has been taken."""

    def before_load(self, folder: str) -> None:
        """The checkpoint in that folder is about to be loaded."""

    def state(self) -> dict[str, Any]:
        """What is to be kept for each rank, beside the objects."""

    def go_back(self, state: dict[str, Any]) -> None:
        """Take that back."""


class Given:
    """The objects that were given to the manager, once and for all."""

    root: str | None = None
    keep: Keep | None = None
    gradients = False

    def __init__(self, **objects: Any) -> None:
        found = {kind: named(kind, one) for kind, one in objects.items()}
        others = {**found["scheduler"], **found["scaler"]}
        self._found = Found(found["model"], found["optimizer"], others)
        self._loaders = found["dataloader"]

    def find(self) -> Found:
        return self._found

    def loaders(self) -> dict[str, Any]:
        return self._loaders

    def name(self) -> str | None:
        return None

    def before_save(self, folder: str) -> None: ...

    def after_save(self) -> None: ...

    def before_load(self, folder: str) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def go_back(self, state: dict[str, Any]) -> None: ...


def find_source(accelerator: Any, **objects: Any) -> Source:
    """The accelerator, or the objects themselves."""
    if accelerator is None:
        return Given(**objects)
    given = [kind for kind, one in objects.items() if one is not None]
    if given:
        raise ConfigError(
            f"StateManager: accelerator= brings all that it has prepared, so {', '.join(given)} cannot be given as "
            "well. Pass them through accelerator.prepare(...), or give others to register(name=...)."
        )
    from ckpt.state.accelerator import Accelerated

    return Accelerated(accelerator)


def named(kind: str, value: Any) -> dict[str, Any]:
    """One object, a sequence or a dict of named ones, as objects by key: `model`, `model.0`, `model.generator`."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {f"{kind}.{_checked(name)}": one for name, one in value.items()}
    if isinstance(value, list | tuple):
        return {f"{kind}.{index}": one for index, one in enumerate(value)}
    return {kind: value}


def is_part_name(name: Any) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _checked(name: Any) -> str:
    if not is_part_name(name):
        raise ConfigError(f"{name!r} cannot name a part: use letters, digits, '_' and '-'. It becomes a file's name.")
    return str(name)
