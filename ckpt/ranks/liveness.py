"""Liveness of the ranks that are waited for: for how long each has sent no heartbeat."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

_LONGEST = 20.0  # seconds between two checks


@dataclass
class LivenessWatch:
    """One wait for other ranks: when each rank's heartbeat count last changed."""

    timeout: float
    longest: float = _LONGEST
    _seen: dict[int, tuple[int, float]] = field(default_factory=dict)
    _next: float = 0.0

    def is_due(self) -> bool:
        """Whether to check again: not at every poll, since a check costs one request per rank."""
        now = time.monotonic()
        due = now >= self._next
        if due:
            self._next = now + min(self.timeout / 8, self.longest)
        return due

    def silent(self, counts: dict[int, int]) -> list[int]:
        """The ranks whose heartbeat count has not changed for the timeout."""
        now = time.monotonic()
        for rank, count in counts.items():
            if rank not in self._seen or self._seen[rank][0] != count:
                self._seen[rank] = (count, now)
        return [rank for rank in counts if now - self._seen[rank][1] >= self.timeout]


def format_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
