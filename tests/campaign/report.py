"""The table of a campaign, and its report in Markdown and JSON."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.campaign.failing_calls import Scenario
from tests.campaign.kinds import KINDS, Prepared
from tests.campaign.verdicts import BROKEN, FAULTS, FRESH, HANG, STALL, UNCLEAR, Verdict

_SHOWN = 40  # findings in the appendix
_PLURALS = {FRESH: "fresh starts", HANG: "hangs", UNCLEAR: "unclear errors", STALL: "stalls"}


@dataclass(frozen=True)
class Report:
    """What a campaign found, with everything that is needed to run it again."""

    command: str
    seed: int
    date: str
    seconds: float
    verdicts: list[Verdict]
    notes: list[str]

    @property
    def findings(self) -> list[Verdict]:
        return [one for one in self.verdicts if one.fault]

    def table(self) -> str:
        heads = ["kind of fault", "trials", *(_PLURALS.get(fault, fault) for fault in FAULTS)]
        lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
        for name, kind in KINDS.items():
            found = [one for one in self.verdicts if one.kind == name]
            if found:
                lines.append(f"| {kind.words} (`{name}`) | {' | '.join(map(str, _numbers(found)))} |")
        lines.append(f"| **all** | {' | '.join(f'**{number}**' for number in _numbers(self.verdicts))} |")
        return "\n".join(lines)

    def markdown(self) -> str:
        seconds = f"{self.seconds / 60:.1f} minutes" if self.seconds > 120 else f"{self.seconds:.0f} s"
        facts = {"command": f"`{self.command}`", **machine(), "date": self.date, "duration": seconds, "seed": self.seed}
        lines = ["# Fault-injection campaign", "", *(f"- {key}: {value}" for key, value in facts.items())]
        lines += ["", self.table(), "", *_LEGEND, *self.notes, ""]
        if self.findings:
            lines += ["## Findings", "", *self._appendix()]
        return "\n".join(lines).rstrip() + "\n"

    def write(self, path: Path) -> None:
        path.write_text(self.markdown())
        verdicts = [{key: value for key, value in asdict(one).items() if value != ""} for one in self.verdicts]
        data = {**asdict(self), "machine": machine(), "verdicts": verdicts}
        path.with_suffix(".json").write_text(json.dumps(data) + "\n")

    def _appendix(self) -> Iterable[str]:
        for one in self.findings[:_SHOWN]:
            yield f"### {one.fault}: {one.kind} {one.index}\n\n{one.scenario}\n"
            yield f"`{again(one, self.seed)}`\n\n```text\n{one.evidence}\n```\n"
        if len(self.findings) > _SHOWN:
            yield f"And {len(self.findings) - _SHOWN} more."


_LEGEND = [
    "- lost: what was reported durable did not come back. Silently wrong: a load or a verification succeeded on",
    "  content other than what was saved. Hang: a process did not end within its deadline. Unclear error: none of",
    "  ckpt's own, or without words, or longer than ten lines, or a false alarm. Cannot go on: after the fault the run",
    "  could not save.",
]


def again(verdict: Verdict, seed: int) -> str:
    return f"python -m tests.campaign --seed {seed} --only {verdict.kind} --index {verdict.index}"


def _numbers(verdicts: list[Verdict]) -> list[int]:
    counted = Counter(one.fault for one in verdicts)
    return [len(verdicts) - counted[BROKEN], *(counted[fault] for fault in FAULTS)]


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": _system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def coverage(prepared: Prepared, counts: Mapping[str, int]) -> list[str]:
    """How many of the calls of saves and resumes were made to fail."""
    lines = []
    for kind in ("save-call", "resume-call"):
        planned = prepared.strikes.get(kind, [])
        done = planned[: counts.get(kind, 0)]
        if done:
            struck = {(one.scenario, one.call.number) for one in done}
            calls = {(one.scenario, one.call.number) for one in planned}
            lines.append(
                f"- {kind}: {len(struck)} of {len(calls)} calls in {_scenarios(one.scenario for one in planned)} "
                f"scenarios have failed once or more, {len(done)} of {len(planned)} pairs of call and error."
            )
    return lines


def _scenarios(scenarios: Iterable[Scenario]) -> int:
    return len(set(scenarios))
