"""What a trial may find, and when an error counts as clear."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import CkptError

LOST = "lost"  # what was reported durable does not come back
FRESH = "fresh start"  # a run begins anew, though something was committed
WRONG = "silently wrong"  # a load or a verification succeeds on content that is not what was saved
HANG = "hang"  # a process did not end in time
UNCLEAR = "unclear error"  # not one of ours, without words, or longer than ten lines
STUCK = "cannot go on"  # once the fault is over, the run can still not save
STALL = "stall"  # the memory tier has kept the training thread waiting for more than a second
BROKEN = "broken trial"  # the campaign itself failed: says nothing about the library
FAULTS = (LOST, FRESH, WRONG, HANG, UNCLEAR, STUCK, STALL)

LONGEST = 10  # lines of a clear error


class Found(Exception):  # noqa: N818  (it says what was found, not that something went wrong)
    """Ends a trial: one of `FAULTS`, with the evidence."""

    def __init__(self, fault: str, evidence: str) -> None:
        super().__init__(f"{fault}: {evidence}")
        self.fault = fault
        self.evidence = evidence


@dataclass(frozen=True)
class Verdict:
    """What came of one trial; `fault` is empty if nothing was found. `scenario` says what was done, in a few words."""

    kind: str
    index: int
    scenario: str = ""
    fault: str = ""
    evidence: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Failure:
    """An exception of another process."""

    type: str
    message: str
    trace: str
    ours: bool

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        trace = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, str(error), trace, isinstance(error, CkptError))

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"

    def check(self, during: str) -> None:
        """Refuse an error that its reader could not make use of."""
        if not self.ours:
            raise Found(UNCLEAR, f"{during} raised {self}\n{self.trace}")
        if not self.message.strip():
            raise Found(UNCLEAR, f"{during} raised {self.type} without a word\n{self.trace}")
        if self.message.count("\n") >= LONGEST:
            raise Found(UNCLEAR, f"{during} raised {self.type} with {self.message.count(chr(10)) + 1} lines")


@dataclass
class Ended:
    """How a process ended: its exit status (negative for a signal), what it returned or raised, what it told."""

    status: int
    value: Any = None
    failure: Failure | None = None
    told: list[str] = field(default_factory=list)

    def durable(self) -> int:
        """The newest step that was reported durable; 0 if none was."""
        return max((int(line.split()[1]) for line in self.told if line.startswith("durable ")), default=0)
