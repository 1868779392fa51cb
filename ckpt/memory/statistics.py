"""What the memory tier cost a run, and what it saved after a crash."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Statistics:
    """Snapshots taken and left out, and the seconds that training waited for them."""

    taken: int = 0
    skipped: int = 0
    waited: float = 0.0

    def __str__(self) -> str:
        left_out = f", {self.skipped:,} left out" if self.skipped else ""
        return f"memory: {self.taken:,} snapshots{left_out}, training waited {self.waited:.2f} s in all"


def saving(crashed_at: int | None, resumed_at: int, root_step: int | None) -> str:
    """What a crash cost with snapshots in memory, and would have cost without; empty if that is not known."""
    if crashed_at is None or crashed_at < resumed_at:
        return ""
    cost, instead = crashed_at - resumed_at, crashed_at - (root_step or 0)
    steps = "step" if cost == 1 else "steps"
    return f"a crash at step {crashed_at:,} cost {cost:,} {steps} instead of {instead:,}"
