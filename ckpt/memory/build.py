"""Builds the memory tier of a manager, or what stands for it in a run without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.memory.places import Places
from ckpt.memory.root_token import remove_token
from ckpt.memory.tier import MemoryTier
from ckpt.ranks.group import MAIN
from ckpt.save.saver import Saver


def build_tier(
    saver: Saver, every: int | None, rescue: bool, storage_options: Mapping[str, Any] | None
) -> MemoryTier | None:
    """The memory tier beside the root of this saver, with a snapshot every so many steps; None for none.

    A run without one continues from the root alone: what an earlier run has left in memory is then the root's no more.
    """
    root = saver.root
    is_main = root.ranks.rank == MAIN
    if not every:
        root.on_hold = (lambda: remove_token(root.storage)) if is_main else None
        return None
    places = Places(root.storage, rescue, storage_options, root.hosts.separate_roots)
    tier = MemoryTier(every, root.ranks, saver, places)
    root.on_hold = tier.root_is_held if is_main else None
    return tier
