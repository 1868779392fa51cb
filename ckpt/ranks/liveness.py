"""Liveness of the ranks that are waited for: for how long each has sent no heartbeat."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

_LONGEST = 20.0  # seconds between two checks
_SPELLED_OUT = 3  # ranks of a run, each with its number
_MOST_RUNS = 8


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


def ranks_by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks that have each value."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def format_ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 1, 2`, `ranks 0 to 62`; of many runs the first ones, and how many ranks more."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > _SPELLED_OUT else ", ".join(map(str, run)) for run in runs]
    more = sum(map(len, runs[_MOST_RUNS:]))
    return f"ranks {', '.join(texts[:_MOST_RUNS])}" + (f" and {more} more" if more else "")
