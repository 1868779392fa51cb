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
from ckpt.formats.native.json_values import Encoder, refuse
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.tensor_bytes import narrowed
from ckpt.root.folder import Folder
from ckpt.state.deepspeed.engine import KEY
from ckpt.state.objects import KINDS
from ckpt.state.optimizer import by_name

CUSTOM = "custom"  # objects of the user's own
UNKNOWN_PROGRESS = (
    "Accelerate does not save how many epochs, batches and steps were done: counting begins at 0. Set manager.progress "
    "before the loop if they matter"
)
_NUMBER = re.compile(r"(.*?)(\d+)\D*")


@dataclass(frozen=True)
class ForeignPart:
    """The state of a part: values in which tensors stand as references, and the tensors, not read yet."""

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


class Foreign:
    """The state in a folder of Accelerate.

    `live` are the keys of a manager's parts: the first model of the folder is its first model, and so on. Without them
    parts go by `model`, or `model.0`, `model.1` where there are several.
    """

    def __init__(self, folder: Folder, live: Iterable[str] = ()) -> None:
        self.saved = accelerate.AccelerateCheckpoint(folder)
        self.name = folder.name
        found = _keyed(self.saved.parts(), list(live))
        with _explained(folder.where, "an optimizer"):
            _name_parameters(found)
        problems: list[str] = []
        self.parts = {key: _encoded(key, tree, problems) for key, tree in found.items()}
        refuse(problems)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """What is a rank's own, as a manager saves it."""
        states = self.saved.random_states(rank)
        with _explained(self.name, "random generators"):
            rng = accelerate.rng_states(states)
        _, number = split_name(self.name)
        saves = 0 if number is None else 1 + number
        source = {"step": states.get("step", 0), "sync_gradients": True, "saves": saves, "loaders": {}}
        return {"rng": rng, "generators": {}, "loaders": {}, "source": source}


def kind_of(key: str) -> str:
    """`model` of `model.0`. What was registered by a name of its own is custom."""
    head = key.partition(".")[0]
    return head if head in (*KINDS, KEY) else CUSTOM


def _keyed(found: Mapping[str, Mapping[int, Any]], live: list[str]) -> dict[str, Any]:
    parts = {}
    for kind, trees in found.items():
        here = dict(enumerate(key for key in live if kind_of(key) == kind))
        several = len(trees) > 1 or kind in (CUSTOM, "dataloader")
        for number, tree in trees.items():
            parts[here.get(number, f"{kind}.{number}" if several else kind)] = tree
    return parts


def _name_parameters(parts: dict[str, Any]) -> None:
    """Let the state of optimizers be by name. Under FSDP each has a model, and of several that is told by a prefix."""
    models = [key for key in parts if kind_of(key) == "model"]
    optimizers = [key for key in parts if kind_of(key) == "optimizer"]
    for number, key in enumerate(optimizers):
        if not {"state", "param_groups"} <= parts[key].keys():
            continue  # of no optimizer of torch
        prefix = f"{models[number].partition('.')[2]}." if 1 < len(models) > number else ""
        parts[key] = by_name(parts[key], prefix)


@contextmanager
def _explained(where: str, what: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(
            f"{where} does not hold the state of {what}: {type(error).__name__}: {error}. Take another save."
        ) from error


def _encoded(key: str, tree: Any, problems: list[str]) -> ForeignPart:
    encoder = Encoder(prefix=key, problems=problems)
    return ForeignPart(encoder.encode(tree), encoder.tensors)


def split_name(name: str) -> tuple[str, int | None]:
    """What stands before the last number in a folder's name, and that number, if there is one: it tells the newest."""
    match = _NUMBER.fullmatch(name)
    return (match.group(1), int(match.group(2))) if match else (name, None)
