"""Keeps weights that are NaN or infinite out of checkpoints: looked at before a save, agreed by all ranks."""

from __future__ import annotations

import logging
from typing import Any

from ckpt.errors import StateError
from ckpt.ranks.consensus import Result, decide_together
from ckpt.ranks.group import MAIN, Ranks
from ckpt.ranks.store import format_ranks
from ckpt.state.finite import non_finite
from ckpt.state.registry import StateRegistry

_log = logging.getLogger("ckpt")
_NAMED = 3
ON_NAN = ("warn", "raise", "skip")


class FiniteGuard:
    """What is done when parameters are not finite (`on_nan`): None looks at nothing."""

    def __init__(self, ranks: Ranks, registry: StateRegistry, on_nan: str | None) -> None:
        self._ranks = ranks
        self._registry = registry
        self._on_nan = on_nan

    def passes(self, name: str) -> bool:
        """Whether to save under this name; the same on every rank. Raises where that was asked for."""
        if self._on_nan is None:
            return True
        mine = Result.capture(lambda: non_finite(self._registry.models))
        found = decide_together(self._ranks, f"save_state({name!r}) (finite)", mine.then(_shortened), _listed)
        if not found:
            return True
        text = f"parameters are NaN or infinite: {found}"
        if self._on_nan == "raise":
            raise StateError(
                f"{name}: {text}. Nothing was saved, and earlier checkpoints are kept: load_state() goes back to the "
                "newest. To save all the same, SaveOptions(on_nan='warn')."
            )
        if self._ranks.rank == MAIN:
            kept = "is saved all the same" if self._on_nan == "warn" else "is not saved; earlier checkpoints are kept"
            _log.warning("%s %s: %s", name, kept, text)
        return self._on_nan == "warn"

    def problem_here(self) -> str:
        """Why this rank's state is not to be saved; empty if it is."""
        found = non_finite(self._registry.models) if self._on_nan in ("raise", "skip") else []
        return f"parameters are NaN or infinite: {_joined(found)}" if found else ""


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
