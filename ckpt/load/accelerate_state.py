"""The state that Accelerate saved, under the keys that a manager gives to its parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import DamagedError
from ckpt.formats.foreign import accelerate
from ckpt.formats.layout import Box
from ckpt.formats.native.documents import Encoder, refuse
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.tensors import narrowed
from ckpt.load.rank_state import check_rank_state
from ckpt.root.folder import Folder
from ckpt.state.objects import KINDS
from ckpt.state.optimizer import by_name
from ckpt.state.parts import ENGINE

CUSTOM = "custom"  # objects of the user's own
UNKNOWN_PROGRESS = (
    "Accelerate does not save how many epochs, batches and steps were done: counting begins at 0. Set manager.progress "
    "before the loop if they matter"
)
NO_GENERATORS = "no random generators were saved: those here are left as they are"
_NUMBER = re.compile(r"(.*?)(\d+)\D*")


@dataclass(frozen=True)
class ForeignPart:
    """The state of a part: values with references to tensors, and the tensors, not read yet."""

    values: Any
    tensors: Mapping[str, PiecedTensor | torch.Tensor]

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self.tensors[name].dtype, tuple(self.tensors[name].shape)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A tensor, or a box of it."""
        tensor = self.tensors[name]
        if isinstance(tensor, PiecedTensor):
            return tensor.read(box or tensor.box)
        return narrowed(tensor, box.ranges) if box else tensor


class AccelerateState:
    """The state in a folder of Accelerate.

    `live` are the keys of a manager's parts: the first model of the folder is its first model, and so on. Without them
    the keys are `model`, or `model.0`, `model.1` where there are several.
    """

    def __init__(self, folder: Folder, live: Iterable[str] = ()) -> None:
        self.saved = accelerate.AccelerateCheckpoint(folder)
        self.name = folder.name
        found = _keyed(self.saved.parts(), list(live))
        with _damage_named(folder.where, "an optimizer"):
            _name_parameters(found)
        problems: list[str] = []
        self.parts = {key: encoded_part(key, tree, problems) for key, tree in found.items()}
        refuse(problems)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """A rank's own state, as a manager saves it."""
        states = self.saved.random_states(rank)
        _, number = split_name(self.name)
        saves = 0 if number is None else 1 + number
        source = {"step": states.get("step", 0), "sync_gradients": True, "saves": saves, "loaders": {}}
        state = {"generators": {}, "loaders": {}, "source": source}
        if "random_state" not in states:
            return check_rank_state({**state, "lacking": {"rng": NO_GENERATORS}}, self.name)
        with _damage_named(self.name, "random generators"):
            rng = accelerate.rng_states(states)
        return check_rank_state({"rng": rng, **state}, self.name)


def kind_of(key: str) -> str:
    """`model` for `model.0`; `custom` for what was registered under a name of its own."""
    head = key.partition(".")[0]
    return head if head in (*KINDS, ENGINE) else CUSTOM


def _keyed(found: Mapping[str, Mapping[int, Any]], live: list[str]) -> dict[str, Any]:
    parts = {}
    for kind, trees in found.items():
        live_keys = dict(enumerate(key for key in live if kind_of(key) == kind))
        several = len(trees) > 1 or kind in (CUSTOM, "dataloader")
        for number, tree in trees.items():
            parts[live_keys.get(number, f"{kind}.{number}" if several else kind)] = tree
    return parts


def _name_parameters(parts: dict[str, Any]) -> None:
    """Key the state of optimizers by parameter name. Of several models under FSDP, each optimizer's gives a prefix."""
    models = [key for key in parts if kind_of(key) == "model"]
    optimizers = [key for key in parts if kind_of(key) == "optimizer"]
    for number, key in enumerate(optimizers):
        if not {"state", "param_groups"} <= parts[key].keys():
            continue  # not the state of an optimizer of torch
        prefix = f"{models[number].partition('.')[2]}." if 1 < len(models) > number else ""
        parts[key] = by_name(parts[key], prefix)


@contextmanager
def _damage_named(where: str, what: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(
            f"{where} does not hold the state of {what}: {type(error).__name__}: {error}. Load another save."
        ) from error


def encoded_part(key: str, tree: Any, problems: list[str]) -> ForeignPart:
    """The state of a part as a checkpoint has it. Values that no file can hold are added to the problems."""
    encoder = Encoder(prefix=key, problems=problems)
    return ForeignPart(encoder.encode(tree), encoder.tensors)


def split_name(name: str) -> tuple[str, int | None]:
    """A folder's name before its last number, and that number, if there is one: the highest is the newest."""
    match = _NUMBER.fullmatch(name)
    return (match.group(1), int(match.group(2))) if match else (name, None)
