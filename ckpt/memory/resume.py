"""A resume from memory: where the snapshots are, and what becomes of them after a load."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt.load import select
from ckpt.load.candidates import STRAY, in_memory
from ckpt.load.restored import Restored
from ckpt.memory.statistics import crash_facts, saving_of
from ckpt.ranks.group import MAIN
from ckpt.util.console import say

if TYPE_CHECKING:
    from ckpt.memory.tier import MemoryTier

_log = logging.getLogger("ckpt")
_MARK = in_memory("")


def find_snapshots(tier: MemoryTier | None) -> select.MemoryTier | None:
    """The snapshots in the hosts' memory, for a load; None if there are none. Every rank makes this call."""
    storage = tier.find() if tier is not None else None
    return select.MemoryTier(storage, tier.hosts) if tier is not None and storage is not None else None


def note_load(tier: MemoryTier, restored: Restored | None) -> None:
    """Say what the snapshots in memory have saved, and what the damaged ones cost. Unused, they are removed."""
    if restored is not None and tier.ranks.rank == MAIN:
        _warn_of_damage(restored.passed_over, tier.crashed_at, restored.progress.step)
    if restored is None or not restored.from_memory:
        tier.loaded(None)
        return
    tier.loaded([name.removesuffix(_MARK) for name in restored.passed_over if name.endswith(_MARK)])
    tier.statistics.crash = crash_facts(tier.crashed_at, restored.progress.step, restored.root_step)
    said = saving_of(tier.statistics.crash)
    if said and tier.ranks.rank == MAIN:
        say(said)


def _warn_of_damage(passed_over: Mapping[str, str], crashed_at: int | None, step: int) -> None:
    """Name the snapshots that could not be used, and how many steps that takes training back."""
    unusable = [name for name, why in passed_over.items() if name.endswith(_MARK) and why != STRAY]
    if unusable:
        lost = f": {crashed_at - step:,} steps of it are lost" if crashed_at is not None and crashed_at > step else ""
        _log.warning(
            "could not use %s. Training had reached step %s, and continues from step %s%s.",
            ", ".join(unusable), "?" if crashed_at is None else f"{crashed_at:,}", f"{step:,}", lost,
        )  # fmt: skip


def memory_facts(tier: MemoryTier | None) -> dict[str, Any]:
    """What the tier cost and saved since the root's last checkpoint, for the manifest of its next one."""
    facts = tier.statistics.facts() if tier is not None else {}
    return {"memory": facts} if facts else {}
