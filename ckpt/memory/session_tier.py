"""The memory tier as a session uses it: built, asked at a load, and told what was loaded.

A run without one loads none of the other modules here.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt.compat.accelerate import save_hooks
from ckpt.errors import CkptError
from ckpt.load import select
from ckpt.load.load_state import Restored
from ckpt.load.select import STRAY, in_memory
from ckpt.memory.place import TOKEN, remove_token
from ckpt.memory.statistics import crash_facts, saving_of
from ckpt.ranks.consensus import MAIN
from ckpt.ranks.hosts import count_hosts
from ckpt.root.catalog import History
from ckpt.save.root_writer import RootWriter
from ckpt.save.saver import Saver
from ckpt.storage import Storage
from ckpt.util.console import say
from ckpt.util.option_values import AUTO

if TYPE_CHECKING:
    from ckpt.memory.tier import MemoryTier
    from ckpt.save.cadence import Cadence


_log = logging.getLogger("ckpt")


def build_tier(saver: Saver, every: int | str | None, *, replicas: int, rate: float | None = None) -> MemoryTier | None:
    """The memory tier beside the root of this saver, with a snapshot every so many steps, or so often; None for none.

    `rate`: failures per node per day, if the user has said it, for `every="auto"`.

    A run without one continues from the root alone: what an earlier run has left in memory is then the root's no more.
    """
    root = saver.root
    is_main = root.ranks.rank == MAIN
    if not every:
        if is_main:
            root.lock.call_when_taken(partial(_leave_snapshots, root.storage), if_there=TOKEN)
        return None
    from ckpt.memory.meeting import Meeting  # a run without a tier loads none of it
    from ckpt.memory.replicas import Replicas
    from ckpt.memory.tier import MemoryTier

    meeting = Meeting(root.ranks, root.storage)
    cadence = _cadence_of(root, rate) if every == AUTO else None
    tier = MemoryTier(every, root.ranks, saver, meeting, Replicas(root.ranks, replicas), cadence)
    if is_main:
        root.lock.call_when_taken(partial(_tell_held, weakref.ref(tier)))
    return tier


def _cadence_of(root: RootWriter, rate: float | None) -> Cadence:
    """What chooses the time between snapshots: on the main rank, which knows how often earlier processes failed."""
    from ckpt.save.cadence import Cadence, Failures, Past  # a run that sets the time loads none of it

    def past() -> Past:
        try:
            return Past.of(History.of(root.storage))
        except (CkptError, OSError) as error:  # of the main rank alone, and no error of the training
            _log.warning('memory="auto" does not know how often earlier processes of this run failed: %s', error)
            return Past()

    return Cadence.in_memory(Failures.known(count_hosts(), rate), past)  # a wrong rate is refused on every rank alike


def _tell_held(tier: weakref.ref[MemoryTier]) -> None:
    """Without a strong reference, which would be a cycle: a root that nobody uses any more is free at once."""
    found = tier()
    if found is not None:
        found.root_is_held()


def _leave_snapshots(root: Storage) -> None:
    if remove_token(root):
        _log.warning(
            "an earlier run of %s ended without close(), and may have left snapshots in memory that are newer than "
            "its checkpoints. This run has no memory=, so ckpt will not use those snapshots, now or later.", root.url,
        )  # fmt: skip


_MARK = in_memory("")


def find_snapshots(tier: MemoryTier) -> select.MemoryTier | None:
    """The snapshots in the hosts' memory, for a load; None if there are none. Every rank makes this call."""
    storage = tier.find()
    return select.MemoryTier(storage, tier.hosts) if storage is not None else None


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
        lost = f" and loses {crashed_at - step:,} steps" if crashed_at is not None and crashed_at > step else ""
        _log.warning(
            "ckpt could not use %s. Training had reached step %s; it continues from step %s%s.",
            ", ".join(unusable), "?" if crashed_at is None else f"{crashed_at:,}", f"{step:,}", lost,
        )  # fmt: skip


def memory_facts(tier: MemoryTier) -> dict[str, Any]:
    """What the tier cost and saved since the root's last checkpoint, for the manifest of its next one."""
    facts = tier.statistics.facts()
    return {"memory": facts} if facts else {}


def has_save_hooks(source: object) -> bool:
    """Whether hooks of the user's own save a part of the state into files that a snapshot in memory would lack."""
    accelerator = getattr(source, "accelerator", None)
    return accelerator is not None and bool(save_hooks(accelerator))


def without_this_save(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a source for a snapshot in memory, which does not count as a save: names are numbered by those."""
    return {**state, "saves": state["saves"] - 1} if "saves" in state else state
