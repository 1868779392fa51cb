"""Tensor subclasses that consist of other tensors, such as the states of 8-bit optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from ckpt.errors import DamagedError, UnsupportedError

# the only classes that a checkpoint may name: its content cannot choose code to run
_KNOWN = {
    "torchao.optim.subclass_8bit": "OptimState8bit",
    "torchao.optim.subclass_4bit": "OptimState4bit",
    "torchao.optim.subclass_fp8": "OptimStateFp8",
}


def is_packed(value: Any) -> bool:
    """Whether this is a tensor of a known subclass."""
    kind = type(value)
    return kind.__name__ == _KNOWN.get(kind.__module__)


def pieces(tensor: Any) -> dict[str, torch.Tensor]:
    """The live inner tensors by name."""
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def about(tensor: Any) -> tuple[str, Any]:
    """The kind of a packed tensor, and the context that rebuilding it needs beside its inner tensors."""
    _, context = tensor.__tensor_flatten__()
    return type(tensor).__module__, context


def check_known(kind: str) -> None:
    if kind not in _KNOWN:
        raise DamagedError(f"the state holds a tensor of an unknown kind, {kind!r}. Was it written by a newer ckpt?")


def pack(kind: str, tensors: Mapping[str, torch.Tensor], context: Any) -> Any:
    """A packed tensor made of these inner tensors."""
    check_known(kind)
    try:
        subclass = getattr(import_module(kind), _KNOWN[kind])
    except ImportError as error:
        raise UnsupportedError(
            f"the state holds a {_KNOWN[kind]}, and {kind} is not here: pip install torchao ({error})"
        ) from error
    return subclass.__tensor_unflatten__(tensors, context, None, None)
