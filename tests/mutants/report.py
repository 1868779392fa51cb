"""What became of each mutant, for a terminal and as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from tests.mutants.operators import Mutant

KILLED, HUNG, SURVIVED, EQUIVALENT = "killed", "hung", "survived", "equivalent"
VITAL, ALL = 0.95, 0.85  # of those that are not equivalent
_JUDGED = Path(__file__).parent / "judged.yaml"


@dataclass(frozen=True)
class Verdict:
    """The result for one mutant, with the test that noticed it, or why none can."""

    mutant: Mutant
    result: str
    by: str = ""
    seconds: float = 0.0

    @property
    def line(self) -> str:
        return f"{self.result:8} {self.mutant.id} ({self.seconds:.1f} s) {self.by}".rstrip()


@cache
def _reasons() -> dict[str, str]:
    found: dict[str, str] = yaml.safe_load(_JUDGED.read_text()) or {}
    return found


def judged(one: Verdict) -> Verdict:
    """A survivor that somebody has looked at and found to change nothing is equivalent, with the reason."""
    reason = _reasons().get(one.mutant.id)
    return replace(one, result=EQUIVALENT, by=reason) if one.result == SURVIVED and reason else one


def keep(path: Path, one: Verdict) -> None:
    """Write down what became of a mutant, for a run that goes on with others."""
    with open(path, "a") as file:
        file.write(json.dumps([one.mutant.id, one.result, one.by, one.seconds]) + "\n")


def noticed_before(path: Path, mutants: Sequence[Mutant]) -> Iterator[Verdict]:
    """What earlier runs have noticed of these mutants."""
    known = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        name, result, by, seconds = json.loads(line)
        known[name] = (result, by, seconds)
    for one in mutants:
        if known.get(one.id, ("",))[0] in (KILLED, HUNG):
            yield Verdict(one, *known[one.id])


def share(verdicts: Sequence[Verdict]) -> tuple[int, int]:
    """How many were noticed, and of how many that could be."""
    counts = Counter(one.result for one in verdicts)
    return counts[KILLED] + counts[HUNG], len(verdicts) - counts[EQUIVALENT]


def suffices(verdicts: Sequence[Verdict]) -> bool:
    noticed, of = share(verdicts)
    vital, of_vital = share([one for one in verdicts if one.mutant.vital])
    return noticed >= ALL * of and vital >= VITAL * of_vital


def summary(verdicts: Sequence[Verdict]) -> str:
    rows = [("all", verdicts), ("where a run could be lost", [one for one in verdicts if one.mutant.vital])]
    return "\n".join(f"{name}: {_told(found)}" for name, found in rows)


def _told(verdicts: Sequence[Verdict]) -> str:
    counts, (noticed, of) = Counter(one.result for one in verdicts), share(verdicts)
    parts = ", ".join(f"{counts[kind]} {kind}" for kind in (KILLED, HUNG, SURVIVED, EQUIVALENT))
    return f"{noticed} of {of} noticed ({100 * noticed / max(1, of):.1f} %): {parts}"


def markdown(verdicts: Sequence[Verdict], command: str, machine: str) -> str:
    of_part = sorted({_part(one) for one in verdicts})
    lines = [
        "# Mutants",
        "",
        "Small bugs, drawn from the syntax tree of the library by a seed, each planted alone in a copy. The tests that",
        "call the function are run against it, those of its package first, up to 50 seconds of them. Nobody",
        "chooses a bug, and no bug names a test. The operators are in `tests/mutants/operators.py`.",
        "",
        f"`{command}` on {machine}:",
        "",
        *(f"- {line}" for line in summary(verdicts).splitlines()),
        "",
        "| package | noticed | of | survived | equivalent |",
        "|---|---|---|---|---|",
        *(_row_of_part(part, [one for one in verdicts if _part(one) == part]) for part in of_part),
        "",
        "## What survived",
        "",
        *_rows(verdicts, SURVIVED, "tests that it passed"),
        "",
        "## What changes nothing",
        "",
        *_rows(verdicts, EQUIVALENT, "why"),
        "",
        "## What was noticed",
        "",
        *_rows(verdicts, KILLED, "by"),
        *_rows(verdicts, HUNG, "by")[2:],
    ]
    return "\n".join(lines) + "\n"


def _part(one: Verdict) -> str:
    return "/".join(one.mutant.file.split("/")[:-1])


def _row_of_part(part: str, verdicts: Sequence[Verdict]) -> str:
    counts, (noticed, of) = Counter(one.result for one in verdicts), share(verdicts)
    return f"| {part} | {noticed} | {of} | {counts[SURVIVED]} | {counts[EQUIVALENT]} |"


def _rows(verdicts: Sequence[Verdict], result: str, by: str) -> list[str]:
    found = [one for one in verdicts if one.result == result]
    rows = [(f"`{one.mutant.file}`", f"`{one.mutant.function}`", f"`{one.mutant.change}`", one.by) for one in found]
    cells = [("file", "function", "change", by), ("---",) * 4, *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
