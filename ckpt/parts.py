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

from ckpt.errors import UnsupportedError
from ckpt.formats.sharding import Layout, empty_like, is_sharded, local_tensor
from ckpt.fsdp1 import is_fsdp1
from ckpt.unwrap import clean_name, gradients, unwrap

Like = Callable[[str, torch.dtype, tuple[int, ...]], Any]  # for a saved tensor, a sharded one to spread it like


class SavedTensor(Protocol):
    """A tensor in a checkpoint that has not been read yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor: ...

    def read_into(self, target: torch.Tensor) -> None: ...


class Read(Protocol):
    """Reads a part's tree. Tensors are whole and plain, but for those that `like` finds a sharded one to follow."""

    def __call__(self, like: Like | None = None) -> Any: ...


@dataclass
class Notes:
    """What restoring leaves to say: keys that were left out and why, and what is not exactly as it was."""

    skipped: dict[str, str] = field(default_factory=dict)
    approximated: dict[str, str] = field(default_factory=dict)
    resharded: dict[str, str] = field(default_factory=dict)


class Part(Protocol):
    """One object under the manager's care."""

    key: str
    same_class: bool  # whether a saved state fits only an object of the same class
    can_be_spread: bool  # whether all ranks have it, so that each may write a piece

    @property
    def kind(self) -> str:
        """The class of the object."""

    def capture(self) -> Any:
        """The state, as a tree of values and tensors. Tensors are the live ones."""

    def is_spread(self) -> bool:
        """Whether its tensors are such that every rank holds a piece."""

    def layouts(self) -> frozenset[Layout]:
        """The ways in which its tensors are divided; none if every rank has all of them."""

    def check(self, saved: Any) -> dict[str, str]:
        """What of a saved state does not fit, by key. Changes nothing."""

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> None:
        """Take a saved state back, all but what is `unfit`. `read` gives the same tree with its tensors read."""


@dataclass
class GradientsPart:
    """Gradients that wait for the rest of their accumulation window. Every rank has its own."""

    key: str
    models: Mapping[str, nn.Module]
    same_class: bool = False
    can_be_spread: bool = False
    kind: str = "gradients"

    def capture(self) -> dict[str, Any]:
        if any(is_fsdp1(model) for model in self.models.values()):
            raise UnsupportedError(f"{self.key}: FSDP 1 does not give gradients out by parameter. Use fully_shard.")
        return {key: _pieces(gradients(unwrap(model))) for key, model in self.models.items()}

    def is_spread(self) -> bool:
        return False

    def layouts(self) -> frozenset[Layout]:
        return frozenset()

    def check(self, saved: Any) -> dict[str, str]:
        return {}  # where a parameter fits, its gradient does

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> None:
        values = read()
        for key, model in self.models.items():
            module = unwrap(model)
            found = values.get(key, {})
            for name, parameter in module.named_parameters():
                gradient = found.get(clean_name(module, name))
                parameter.grad = None if gradient is None else _as_gradient(gradient, parameter)


def _pieces(found: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: local_tensor(one) if is_sharded(one) else one for name, one in found.items()}


def _as_gradient(gradient: torch.Tensor, parameter: nn.Parameter) -> Any:
    if not is_sharded(parameter):
        return gradient.to(parameter.device)
    spread = empty_like(parameter, gradient.dtype)
    local_tensor(spread).copy_(gradient)
    return spread


@dataclass
class ObjectPart:
    """Anything with `state_dict` and `load_state_dict`: schedulers, scalers, and objects of the user's own."""

    key: str
    value: Any
    same_class: bool = False
    can_be_spread: bool = False

    @property
    def kind(self) -> str:
        return type(self.value).__name__

    def is_spread(self) -> bool:
        return False

    def layouts(self) -> frozenset[Layout]:
        return frozenset()

    def capture(self) -> Any:
        return self.value.state_dict()

    def check(self, saved: Any) -> dict[str, str]:
        return {}  # only the object itself can tell

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> None:
        self.value.load_state_dict(read())
