"""Which checkpoint continued from which: a run as its attempts, each begun by a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ckpt.tools.report.facts import Save


@dataclass(frozen=True)
class Load:
    """What an attempt began with, and the newer checkpoints that it passed over, with the reasons.

    `is_recorded`: the manifest says so. Otherwise it was concluded from the checkpoint's parent alone.
    """

    name: str
    step: int
    found_in: str = "root"
    passed_over: Mapping[str, str] = field(default_factory=dict)
    more: int = 0  # that were passed over, and are not named
    is_recorded: bool = True
    id: str = ""

    @property
    def reasons(self) -> list[str]:
        """What was passed over and why, each as a sentence that begins with the name."""
        return [why if why.startswith(name) else f"{name}: {why}" for name, why in self.passed_over.items()]


@dataclass
class Attempt:
    """Saves of one process after the other, from a load to the next. Without a load it began afresh."""

    load: Load | None
    saves: list[Save]

    @property
    def is_fallback(self) -> bool:
        return self.load is not None and bool(self.load.passed_over)


def attempts(saves: Sequence[Save]) -> list[Attempt]:
    """The attempts of all runs in a root, oldest first. One that saved nothing has left no trace."""
    by_id = {save.summary.id: save for save in saves}
    found: list[Attempt] = []
    for before, save in pairwise([None, *saves]):
        assert save is not None
        load = _load(before, save, by_id)
        if before is None or load is not None or before.summary.run != save.summary.run:
            found.append(Attempt(load, []))
        found[-1].saves.append(save)
    return found


def _load(before: Save | None, save: Save, by_id: Mapping[str, Save]) -> Load | None:
    if save.resumed:
        said = save.resumed
        skipped, more = said["passed_over"], said.get("more", 0)
        return Load(said["name"], said["step"], said["found_in"], skipped, more, id=said["id"])
    parent = by_id.get(save.summary.parent or "")
    if before is None or parent is None or parent is before or parent.summary.sequence > before.summary.sequence:
        return None
    return Load(parent.name, parent.step, is_recorded=False, id=parent.summary.id)


def passed_over(found: Sequence[Attempt]) -> set[str]:
    """The ids of checkpoints that a later attempt could not use: of a name, the last one that was saved before it."""
    skipped: set[str] = set()
    latest: dict[str, str] = {}
    for attempt in found:
        names = attempt.load.passed_over if attempt.load is not None else ()
        skipped |= {latest[name] for name in names if name in latest}
        latest |= {save.name: save.summary.id for save in attempt.saves}
    return skipped


def restarts(found: Sequence[Attempt]) -> list[Attempt]:
    """The attempts that continued from a checkpoint."""
    return [attempt for attempt in found if attempt.load is not None]


def went_back(saves: Sequence[Save]) -> list[tuple[Save, Save]]:
    """Pairs of present saves in which the later has the lower step: the steps between were trained twice."""
    here = [save for save in saves if save.is_here]
    return [(before, save) for before, save in pairwise(here) if save.step < before.step]
