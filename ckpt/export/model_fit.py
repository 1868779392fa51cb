"""What of a saved model fits a live one: names, shapes, dtypes, and tensors that are tied here and not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt.export.transformers_names import ReadableTensor
from ckpt.formats.foreign.tied_weights import equal_bytes
from ckpt.formats.native.dtypes import name_of
from ckpt.formats.pieces import PiecedTensor
from ckpt.state.model import tensors_in
from ckpt.state.parts import TIED_HERE


def misfits(live: Mapping[str, Any], saved: Mapping[str, ReadableTensor]) -> dict[str, str]:
    """What does not fit, by name. A tied tensor may be there under another of its names; floating point is cast."""
    found = {id(value) for name, value in live.items() if name in saved}
    tensors = tensors_in(live)
    wrong = {name: "missing there" for name, value in tensors.items() if name not in saved and id(value) not in found}
    wrong |= {name: "unexpected: the model has no such tensor" for name in saved if name not in tensors}
    for name in tensors.keys() & saved.keys():
        if tuple(tensors[name].size()) != saved[name].shape:
            wrong[name] = f"shape {list(saved[name].shape)} there, {list(tensors[name].size())} here"
        elif not _is_castable(saved[name].dtype, tensors[name].dtype):
            wrong[name] = f"dtype {name_of(saved[name].dtype)} there, {name_of(tensors[name].dtype)} here"
    return wrong | _contradictions({name: tensors[name] for name in tensors if name not in wrong}, saved)


def _is_castable(saved: torch.dtype, live: torch.dtype) -> bool:
    """Whether values remain what they are, except for rounding: not 300 as a byte, or 0.5 as a whole number."""
    return saved == live or (saved.is_floating_point and live.is_floating_point) or _holds(live, saved)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    try:
        return torch.promote_types(wide, narrow) == wide
    except RuntimeError:  # dtypes of 8 bits and less are promoted to nothing
        return False


def rounded(live: Any, saved: ReadableTensor) -> str | None:
    if saved.dtype == live.dtype or _holds(live.dtype, saved.dtype):
        return None
    return f"rounded from {name_of(saved.dtype)} to {name_of(live.dtype)}"


def _contradictions(live: Mapping[str, Any], saved: Mapping[str, ReadableTensor]) -> dict[str, str]:
    """Names of tied tensors whose values differ there: the last one read would win."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, value in live.items():
        if name in saved and (kept := first.setdefault(id(value), name)) != name and _differ(saved[kept], saved[name]):
            found[name] = f"other values there than {kept}, {TIED_HERE}"
    return found


def _differ(first: ReadableTensor, second: ReadableTensor) -> bool:
    if not isinstance(first, PiecedTensor) or not isinstance(second, PiecedTensor):
        return False  # what Transformers makes of several tensors
    return set(first.pieces) != set(second.pieces) and not equal_bytes(first, second)


def other_state(live: Mapping[str, Any]) -> list[str]:
    """What modules keep that is no tensor, in `_extra_state`."""
    return [name for name, value in live.items() if not isinstance(value, torch.Tensor) and value is not None]


def with_aliases(names: set[str], live: Mapping[str, Any]) -> set[str]:
    """The names, and the other names of the same tensors."""
    filled = {id(live[name]) for name in names}
    return {name for name, value in live.items() if id(value) in filled}
