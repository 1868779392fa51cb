"""What the memory tier cost a run, and what it saved after a crash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Statistics:
    """Snapshots taken and left out, and the seconds that training waited for them."""

    taken: int = 0
    skipped: int = 0
    waited: float = 0.0
    crash: dict[str, int] = field(default_factory=dict)  # as `crash_facts` returns it, until a checkpoint has it
    _told: tuple[int, int, float] = (0, 0, 0.0)  # what earlier checkpoints have

    def facts(self) -> dict[str, int | float]:
        """What happened since the last call, for the manifest of the root's next checkpoint; empty if nothing did."""
        now, before, crash = (self.taken, self.skipped, self.waited), self._told, self.crash
        self._told, self.crash = now, {}
        counts = {"snapshots": now[0] - before[0], "left_out": now[1] - before[1], "waited": now[2] - before[2]}
        return {**counts, **crash} if any(counts.values()) or crash else {}

    def __str__(self) -> str:
        left_out = f", {self.skipped:,} left out" if self.skipped else ""
        return f"memory: {self.taken:,} snapshots{left_out}, training waited {self.waited:.2f} s in all"


def crash_facts(crashed_at: int | None, resumed_at: int, root_step: int | None) -> dict[str, int]:
    """A crash that a resume from memory has cured, for `Statistics.crash`; empty if its step is not known."""
    if crashed_at is None or crashed_at < resumed_at:
        return {}
    return {"crashed_at": crashed_at, "resumed_at": resumed_at, "root_step": root_step or 0}


def saving_of(facts: Mapping[str, int | float]) -> str:
    """What the crash in these facts cost with snapshots in memory, and would have cost without; empty for none."""
    steps = [int(facts[key]) for key in ("crashed_at", "resumed_at", "root_step") if key in facts]
    if len(steps) < 3:
        return ""
    crashed_at, resumed_at, root_step = steps
    cost, instead = crashed_at - resumed_at, crashed_at - root_step
    return f"a crash at step {crashed_at:,} cost {cost:,} {'step' if cost == 1 else 'steps'} instead of {instead:,}"
