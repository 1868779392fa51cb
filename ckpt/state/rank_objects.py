"""Objects whose state is each rank's own, as `register(..., per_rank=True)` declares it."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.state.parts import Notes, ObjectPart


@dataclass
class RankObjectPart(ObjectPart):
    """An object that every rank saves, and restores, for itself, whatever the number of ranks."""

    for_any_ranks: bool = True

    @property
    def name(self) -> str:
        """The name that it was registered under: the key has this rank's number after it."""
        return self.key.rpartition("-")[0]

    def missed(self, why: str, notes: Notes, *, strict: bool) -> None:
        notes.approximated[self.name] = f"{why}: this rank is new, and its {self.kind} keeps the state that it has"
