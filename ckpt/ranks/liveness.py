"""How long ranks that are waited for have been silent."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

_LOOK = 20.0  # seconds between two looks, at most


@dataclass
class LivenessWatch:
    """Ranks that are waited for: when each was last seen to be alive."""

    timeout: float
    longest: float = _LOOK
    _seen: dict[int, tuple[int, float]] = field(default_factory=dict)
    _next: float = 0.0

    def is_due(self) -> bool:
        """Whether it is time to look again: not at every turn, since it costs a question for each rank."""
        now = time.monotonic()
        due = now >= self._next
        if due:
            self._next = now + min(self.timeout / 8, self.longest)
        return due

    def silent(self, beats: dict[int, int]) -> list[int]:
        """The ranks that have shown nothing for as long as the timeout."""
        now = time.monotonic()
        for rank, beat in beats.items():
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = (beat, now)
        return [rank for rank in beats if now - self._seen[rank][1] >= self.timeout]


def format_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
