"""The parts that a manager keeps: how each gives its state, and takes it back.

A part's state is a tree of values and tensors. When it comes back from a checkpoint, the part first looks at the tree
with `SavedTensor`s in place of tensors, and says what does not fit. Then it says where each tensor shall go. When the
tensors of all parts have been read, it takes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ckpt.errors import UnsupportedError
from ckpt.formats.layout import Layout, empty_like, is_sharded, local_tensor
from ckpt.state.deepspeed.engine import is_engine
from ckpt.state.fsdp1 import is_fsdp1
from ckpt.state.replicated import NONE, Guarantee
from ckpt.state.unwrap import clean_name, gradients, unwrap


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint that has not been read."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


Place = Callable[[SavedTensor], Any]  # the tensor to read a saved one into; None for new memory, LEFT for not at all
LEFT: Any = object()
WHOLE_PART = "\0whole part"  # in a map of what does not fit, the key for the part itself: no state has a key with a NUL


class Read(Protocol):
    """Asks for a part's tensors. What it returns gives the tree with its tensors, once they have been read.

    Into places that are `live`, nothing is read before all of it has been verified on every rank.
    """

    def __call__(self, place: Place | None = None, *, live: bool = False) -> Callable[[], Any]: ...


@dataclass
class Notes:
    """What restoring leaves to say: keys that were left out and why, and what is not exactly as it was."""

    skipped: dict[str, str] = field(default_factory=dict)
    approximated: dict[str, str] = field(default_factory=dict)
    resharded: dict[str, str] = field(default_factory=dict)


def has_state(value: Any) -> bool:
    """Whether an object gives its state and takes it back, as torch's do."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class Part(Protocol):
    """One object under the manager's care."""

    key: str
    same_class: bool  # whether a saved state fits only an object of the same class
    can_be_sharded: bool  # whether all ranks have it, so that each may write a piece

    @property
    def kind(self) -> str:
        """The class of the object."""

    def capture(self) -> Any:
        """The state, as a tree of values and tensors. Tensors are the live ones."""

    def frozen(self) -> frozenset[str]:
        """The names of tensors that training does not change."""

    def about(self, state: Any) -> dict[str, Any]:
        """What others need to know to build the object again, beside its state: JSON."""

    def is_sharded(self) -> bool:
        """Whether its tensors are such that every rank holds a piece."""

    def layouts(self) -> frozenset[Layout]:
        """The ways in which its tensors are divided; none if every rank has all of them."""

    def guaranteed(self, state: Any) -> Guarantee:
        """Which plain tensors of a state that was just captured are the same on every rank by construction."""

    def tied_to_ranks(self, names: Collection[str]) -> dict[str, str]:
        """Of tensors that differed between the ranks that saved them: the keys whose state fits no other ranks, each
        with the tensor's name. The others may be taken from the main rank, as an approximation."""

    def check(self, saved: Any) -> dict[str, str]:
        """What of a saved state does not fit, by key. Changes nothing."""

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> Callable[[], None]:
        """Ask for a saved state, all but what is `unfit`. What is returned takes it, when it has been read."""


class OwnPart(Part, Protocol):
    """What every rank has of its own, and saves for itself alone."""

    def missed(self, why: str, notes: Notes, *, strict: bool) -> None:
        """A checkpoint has none that would be this rank's: say what follows from that, or refuse to go on."""


class Whole:
    """What is saved whole by one rank, all of it each time."""

    def frozen(self) -> frozenset[str]:
        return frozenset()

    def is_sharded(self) -> bool:
        return False

    def layouts(self) -> frozenset[Layout]:
        return frozenset()

    def about(self, state: Any) -> dict[str, Any]:
        return {}

    def guaranteed(self, state: Any) -> Guarantee:
        return NONE

    def tied_to_ranks(self, names: Collection[str]) -> dict[str, str]:
        return {}


@dataclass
class GradientsPart(Whole):
    """Gradients that wait for the rest of their accumulation window. Every rank has its own."""

    key: str
    models: Mapping[str, nn.Module]
    same_class: bool = False
    can_be_sharded: bool = False
    kind: str = "gradients"
    of: frozenset[int] | None = None  # the identities of parameters whose gradients are saved; all, if none

    def capture(self) -> dict[str, Any]:
        if any(is_fsdp1(model) for model in self.models.values()):
            raise UnsupportedError(f"{self.key}: FSDP 1 does not give gradients out by parameter. Use fully_shard.")
        if any(is_engine(model) for model in self.models.values()):
            raise UnsupportedError(f"{self.key}: DeepSpeed keeps gradients to itself. Leave gradients=True out.")
        return {key: _pieces(gradients(unwrap(model), self.of)) for key, model in self.models.items()}

    def check(self, saved: Any) -> dict[str, str]:
        return {}  # where a parameter fits, its gradient does

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> Callable[[], None]:
        values = read()
        return lambda: self._take(values())

    def missed(self, why: str, notes: Notes, *, strict: bool) -> None:
        notes.approximated["gradients"] = f"{why}: the accumulation window begins anew"

    def _take(self, values: Any) -> None:
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
class ObjectPart(Whole):
    """Anything with `state_dict` and `load_state_dict`: schedulers, scalers, and objects of the user's own."""

    key: str
    value: Any
    same_class: bool = False
    can_be_sharded: bool = False

    @property
    def kind(self) -> str:
        return type(self.value).__name__

    def capture(self) -> Any:
        return self.value.state_dict()

    def guaranteed(self, state: Any) -> Guarantee:
        return Guarantee(of_main=getattr(self.value, "of_main_rank", False) is True)

    def check(self, saved: Any) -> dict[str, str]:
        return {}  # only the object itself can tell

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> Callable[[], None]:
        values = read()
        return lambda: self.value.load_state_dict(values())
