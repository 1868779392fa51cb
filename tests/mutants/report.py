"""What became of each mutant, for a terminal and as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.mutants.catalogue import Mutant

KILLED, SURVIVED, TIMEOUT, STALE, BROKEN = "killed", "survived", "timeout", "stale", "broken"
REQUIRED = 0.95


@dataclass(frozen=True)
class Verdict:
    """The result for one mutant, with the test that noticed it, or with what went wrong."""

    mutant: Mutant
    result: str
    by: str = ""
    seconds: float = 0.0

    @property
    def line(self) -> str:
        return f"{self.result:8} {self.mutant.id} ({self.seconds:.1f} s) {self.by}".rstrip()


def suffices(verdicts: Sequence[Verdict]) -> bool:
    """Whether enough were killed, and none is stale or could not be tried."""
    counts = Counter(one.result for one in verdicts)
    return not counts[STALE] and not counts[BROKEN] and counts[KILLED] >= REQUIRED * len(verdicts)


def summary(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(one.result for one in verdicts)
    share = 100 * counts[KILLED] / max(1, len(verdicts))
    others = ", ".join(f"{counts[kind]} {kind}" for kind in (SURVIVED, TIMEOUT, STALE, BROKEN) if counts[kind])
    return f"{counts[KILLED]} of {len(verdicts)} mutants killed ({share:.1f} %)" + (f"; {others}" if others else "")


def table(verdicts: Sequence[Verdict]) -> str:
    """In columns, for a terminal."""
    rows = [("mutant", "file", "what it breaks", "killed by", "result"), *(_row(one) for one in verdicts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def markdown(verdicts: Sequence[Verdict], command: str, machine: str) -> str:
    lines = [
        "# Mutants",
        "",
        "Small bugs, each planted alone where data would be lost or wrong, and the test that notices it. They are in",
        "`tests/mutants/`; the tests of the suite are run against each of them.",
        "",
        f"{summary(verdicts)}, by `{command}` on {machine}.",
        "",
        "| mutant | file | what it breaks | killed by | result |",
        "|---|---|---|---|---|",
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in _row(one)) + " |" for one in verdicts),
    ]
    return "\n".join(lines) + "\n"


def _row(one: Verdict) -> tuple[str, str, str, str, str]:
    return one.mutant.id, one.mutant.file, one.mutant.breaks, one.by, one.result
