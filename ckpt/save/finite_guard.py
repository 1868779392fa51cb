"""Keeps weights that are NaN or infinite out of checkpoints: looked at before a save, agreed by all ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ckpt.errors import StateError
from ckpt.formats.sharded_tensors import local_tensor
from ckpt.ranks.consensus import MAIN, Ranks, Result, decide_together
from ckpt.ranks.store_and_heartbeats import format_ranks
from ckpt.state.registry import StateRegistry

_KINDS = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip
_PLAIN = (torch.Tensor, nn.Parameter)


def non_finite(models: Mapping[str, nn.Module]) -> list[str]:
    """The parameters of these models that are not finite; of sharded ones this rank's shards are looked at.

    One reduction for all of a kind, the largest absolute value of each, and one transfer for each device.
    """
    found = [(f"{key}: {name}", value) for key, model in models.items() for name, value in _values(model)]
    groups: dict[Any, list[torch.Tensor]] = {}
    for _, value in found:
        groups.setdefault((value.device, value.dtype), []).append(value)
    bad: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for (device, _), values in groups.items():
            largest = nn.utils.get_total_norm(values, math.inf)
            bad.setdefault(device, []).append(~largest.isfinite())
        if not any(bool(torch.stack(flags).any()) for flags in bad.values()):
            return []
        return [name for name, value in found if not bool(value.isfinite().all())]


def _values(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        value: Any = getattr(parameter, "ds_tensor", parameter)  # ZeRO 3: this rank's partition
        value = (local_tensor(value)).detach()
        if type(value) in _PLAIN and value.dtype in _KINDS and value.numel() and not value.is_meta:
            yield name, value


_log = logging.getLogger("ckpt")
_NAMED = 3
ON_NAN = ("warn", "raise", "skip")


class FiniteGuard:
    """What is done when parameters are not finite (`on_nan`)."""

    def __init__(self, ranks: Ranks, registry: StateRegistry, on_nan: str) -> None:
        self._ranks = ranks
        self._registry = registry
        self._on_nan = on_nan

    def passes(self, name: str) -> bool:
        """Whether to save under this name; the same on every rank. Raises where that was asked for."""
        mine = Result.capture(lambda: non_finite(self._registry.models))
        found = decide_together(self._ranks, f"save_state({name!r}) (finite)", mine.then(_shortened), _listed)
        if not found:
            return True
        text = f"these parameters are NaN or infinite: {found}"
        if self._on_nan == "raise":
            raise StateError(
                f"{name} was not saved, because {text}. Earlier checkpoints are kept; load_state() goes back to the "
                "newest. To save anyway, use SaveOptions(on_nan='warn')."
            )
        if self._ranks.rank == MAIN:
            fate = "ckpt saves %s, although %s" if self._on_nan == "warn" else "ckpt skips the save of %s, because %s"
            _log.warning(fate, name, text)
        return self._on_nan == "warn"

    def problem_here(self) -> str:
        """Why this rank's state is not to be saved; empty if it is."""
        found = non_finite(self._registry.models) if self._on_nan in ("raise", "skip") else []
        return f"these parameters are NaN or infinite: {_joined(found)}" if found else ""


def _shortened(found: list[str]) -> dict[str, Any]:
    return {"names": found[:_NAMED], "count": len(found)}


def _listed(answers: list[dict[str, Any]]) -> str:
    """What the ranks have found, in one line; empty if all is finite."""
    ranks = [rank for rank, answer in enumerate(answers) if answer["count"]]
    if not ranks:
        return ""
    first = answers[ranks[0]]
    more = f" and {first['count'] - _NAMED} more" if first["count"] > _NAMED else ""
    where = "" if len(ranks) == len(answers) else f" (on {format_ranks(ranks)})"
    return f"{', '.join(first['names'])}{more}{where}"


def _joined(found: list[str]) -> str:
    return _listed([_shortened(found)])
