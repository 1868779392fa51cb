"""Builds the memory tier of a manager, or what stands for it in a run without one."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt.memory.root_token import remove_token
from ckpt.ranks.group import MAIN
from ckpt.save.saver import Saver
from ckpt.storage import Storage

if TYPE_CHECKING:
    from ckpt.memory.tier import MemoryTier

_log = logging.getLogger("ckpt")


def build_tier(
    saver: Saver, every: int | None, storage_options: Mapping[str, Any] | None, *, rescue: bool, replicas: int
) -> MemoryTier | None:
    """The memory tier beside the root of this saver, with a snapshot every so many steps; None for none.

    A run without one continues from the root alone: what an earlier run has left in memory is then the root's no more.
    """
    root = saver.root
    is_main = root.ranks.rank == MAIN
    if not every:
        root.on_hold = partial(_leave_snapshots, root.storage) if is_main else None
        return None
    from ckpt.memory.places import Places  # a run without a tier loads none of it
    from ckpt.memory.replicas import Replicas
    from ckpt.memory.tier import MemoryTier

    places = Places(root.storage, rescue, storage_options, root.hosts.separate_roots)
    tier = MemoryTier(every, root.ranks, saver, places, Replicas(root.ranks, replicas))
    root.on_hold = partial(_tell_held, weakref.ref(tier)) if is_main else None
    return tier


def _tell_held(tier: weakref.ref[MemoryTier]) -> None:
    """Without a strong reference, which would be a cycle: a root that nobody uses any more is free at once."""
    found = tier()
    if found is not None:
        found.root_is_held()


def _leave_snapshots(root: Storage) -> None:
    if remove_token(root):
        _log.warning(
            "a run of %s has ended without close(), and may have left snapshots in memory that are newer than its "
            "checkpoints. A run without memory= does not use them, nor will a later one.", root.url,
        )  # fmt: skip
