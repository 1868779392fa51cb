"""A resume from memory: where the snapshots are, and what becomes of them after a load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.load import select
from ckpt.load.candidates import in_memory
from ckpt.load.restored import Restored
from ckpt.memory.statistics import crash_facts, saving_of
from ckpt.ranks.group import MAIN
from ckpt.util.console import say

if TYPE_CHECKING:
    from ckpt.memory.tier import MemoryTier


def find_snapshots(tier: MemoryTier | None) -> select.MemoryTier | None:
    """The snapshots in the hosts' memory, for a load; None if there are none. Every rank makes this call."""
    storage = tier.find() if tier is not None else None
    return select.MemoryTier(storage, tier.hosts) if tier is not None and storage is not None else None


def note_load(tier: MemoryTier, restored: Restored | None) -> None:
    """Say what the snapshots in memory have saved. Where they were not used, they are removed."""
    if restored is None or not restored.from_memory:
        tier.loaded(None)
        return
    mark = in_memory("")
    tier.loaded([name.removesuffix(mark) for name in restored.passed_over if name.endswith(mark)])
    tier.statistics.crash = crash_facts(tier.crashed_at, restored.progress.step, restored.root_step)
    said = saving_of(tier.statistics.crash)
    if said and tier.ranks.rank == MAIN:
        say(said)


def memory_facts(tier: MemoryTier | None) -> dict[str, Any]:
    """What the tier cost and saved since the root's last checkpoint, for the manifest of its next one."""
    facts = tier.statistics.facts() if tier is not None else {}
    return {"memory": facts} if facts else {}
