"""The report of a run: what was tried, by which versions, and what was found."""

from __future__ import annotations

import argparse
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from tests.fuzz.judge import KINDS, MEMORY, SECONDS
from tests.fuzz.pool import Found
from tests.fuzz.targets import TARGETS

_LIBRARIES = (
    "torch", "safetensors", "accelerate", "lightning", "deepspeed", "huggingface_hub", "numpy", "hypothesis", "xxhash",
)  # fmt: skip
_WORDS = {
    "crash": "the process died",
    "hang": f"not done within {SECONDS:g} s",
    "error": "another error than `CkptError`",
    "memory": f"more than {MEMORY >> 20} MB beyond the files",
    "outside": "something outside the folders touched, a process started, code run",
    "wrong": "live tensors changed by a load that raised, elements not loaded, control characters shown",
}


@dataclass(frozen=True)
class Report:
    options: argparse.Namespace
    corpus: Sequence[str]
    counts: Mapping[str, int]
    found: Sequence[Found]
    broken: Sequence[str]
    seconds: float

    def summary(self) -> str:
        total = sum(self.counts.values())
        lines = [f"{total:,} inputs in {self.seconds:.0f} s ({total / self.seconds:.0f}/s), {len(self.found)} findings"]
        lines += [f"refused unaltered: {line}" for line in self.broken]
        lines += [
            f"{one.finding.kind}: {one.finding.signature} (input {one.number}, {one.case.seed}, {one.case.target})"
            for one in self.found
        ]
        return "\n".join(lines)

    def markdown(self) -> str:
        total = sum(self.counts.values())
        command = (
            f"python -m tests.fuzz --inputs {self.options.inputs} --seed {self.options.seed} --jobs {self.options.jobs}"
        )
        minutes = f"{self.seconds / 60:.1f} minutes, {total / self.seconds:.0f} inputs/s"
        facts = {
            "command": f"`{command}{' --all' if self.options.all else ''}`",
            "inputs": f"{total:,}",
            "seed": self.options.seed,
            "findings": len(self.found),
            "duration": minutes,
            "corpus": ", ".join(self.corpus),
            "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            "libraries": ", ".join(f"{name} {number}" for name in _LIBRARIES if (number := _version(name))),
        }
        lines = ["# Fuzzing", "", *_ABOUT, "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
        lines += [*self._kinds(), "", *self._table(), ""]
        if self.found:
            lines += ["## Findings", "", *self._findings()]
        return "\n".join(lines).rstrip() + "\n"

    def _kinds(self) -> list[str]:
        counted = Counter(one.finding.kind for one in self.found)
        rows = [f"| {kind} | {_WORDS[kind]} | {counted[kind]} |" for kind in KINDS]
        return ["| finding | what it is | found |", "|---|---|---:|", *rows]

    def _table(self) -> list[str]:
        by_target = Counter(one.case.target for one in self.found)
        rows = [
            f"| {kind} | {name} | {self.counts.get(name, 0):,} | {by_target[name]} |"
            for kind, group in TARGETS.items()
            for name in group
        ]
        return ["| files | operation | inputs | findings |", "|---|---|---:|---:|", *rows]

    def _findings(self) -> list[str]:
        return [
            f"### {one.finding.kind}: {one.finding.signature}\n\ninput {one.number}, "
            f"{one.case.seed}, {one.case.target}; {'; '.join(one.case.how)}\n\n```text\n{one.finding.evidence}\n```\n"
            for one in self.found
        ]


_ABOUT = [
    "Written by `make fuzz REPORT=docs/fuzzing.md`. Files of every kind that ckpt reads, made by the libraries that",
    "write them, are altered: bytes, fields, headers, opcodes, and what lies at a path. Hashes and sizes are then made",
    "anew, so that what is altered gets past them. Each input is put before one operation, which must end in the right",
    "state or in one `CkptError`.",
]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
