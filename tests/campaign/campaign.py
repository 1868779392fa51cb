"""One campaign: what is prepared, which trials are made, what is told."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch._dynamo  # imported before the first fork, so that no trial has to
import torch.distributed.fsdp
import torch.distributed.tensor

from tests.campaign.calls import Shim
from tests.campaign.kinds import KINDS, Kind, Prepared, counts, prepare
from tests.campaign.planted import PLANTED
from tests.campaign.report import Report, again, coverage
from tests.campaign.runner import Runner
from tests.campaign.trials import Trial
from tests.campaign.verdicts import Verdict


@dataclass
class Campaign:
    """Runs what the options of the command ask for. `scratch` is a folder of its own."""

    options: argparse.Namespace
    scratch: Path
    done: int = 0
    planned: int = 0
    begun: float = 0.0

    def run(self) -> int:
        """Prints the table and writes the report. Returns the exit status: 1 if anything was found."""
        torch.set_num_threads(1)
        for name in self.options.plant:
            PLANTED[name]()
        unknown = set(self.options.only or ()) - KINDS.keys()
        if unknown:
            print(f"no such kind: {', '.join(sorted(unknown))}. There are: {', '.join(KINDS)}", file=sys.stderr)
            return 2
        self.begun, date = time.monotonic(), datetime.now(timezone.utc)
        wanted = [kind for name, kind in KINDS.items() if not self.options.only or name in self.options.only]
        chosen = [kind for kind in wanted if Shim.is_loaded() or not kind.shim]
        verdicts, notes = self._trials(chosen)
        if len(chosen) < len(wanted):
            left_out = ", ".join(kind.name for kind in wanted if kind not in chosen)
            notes.append(f"- left out, for there is no C compiler: {left_out}.")
        report = Report(
            command=_command(self.options),
            seed=self.options.seed,
            date=f"{date:%Y-%m-%d %H:%M} UTC",
            seconds=time.monotonic() - self.begun,
            verdicts=sorted(verdicts, key=lambda one: (list(KINDS).index(one.kind), one.index)),
            notes=notes,
        )
        print(report.table())
        if self.options.report is not None:
            report.write(self.options.report)
        return 1 if report.findings else 0

    def _trials(self, chosen: list[Kind]) -> tuple[list[Verdict], list[str]]:
        prepared = self._prepare({kind.name for kind in chosen})
        numbers = counts(self.options.trials, chosen, prepared)
        one = [(kind.name, self.options.index) for kind in chosen]
        trials = iter(one) if self.options.index is not None else _in_turn(numbers)
        self.planned = sum(numbers.values()) if self.options.index is None else len(one)
        runner = Runner(self.options.seed, self.scratch, self.options.jobs, prepared, self._tell)
        return runner.run(trials), coverage(prepared, numbers) if self.options.index is None else []

    def _prepare(self, names: set[str]) -> Prepared:
        folder = self.scratch / "prepare"
        folder.mkdir()
        trial = Trial("prepare", 0, self.options.seed, folder, self.scratch)
        try:
            return prepare(names, self.options.seed, self.scratch, trial)
        finally:
            trial.end()

    def _tell(self, verdict: Verdict) -> None:
        self.done += 1
        if verdict.fault:
            print(f"{verdict.fault}: {verdict.scenario}\n  {again(verdict, self.options.seed)}", file=sys.stderr)
        if self.options.index is not None:
            print(f"{verdict.scenario}: {verdict.fault or 'nothing found'}\n{verdict.evidence}")
        elif self.done % 100 == 0:
            seconds = time.monotonic() - self.begun
            print(f"{self.done} of {self.planned} trials, {seconds:.0f} s", file=sys.stderr)


def _in_turn(numbers: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Trials of all kinds, mixed: the long ones are not left for the end."""
    placed = [((index + 0.5) / count, name, index) for name, count in numbers.items() for index in range(count)]
    return iter([(name, index) for _, name, index in sorted(placed)])


def _command(options: argparse.Namespace) -> str:
    only = f" --only {' '.join(options.only)}" if options.only else ""
    return f"python -m tests.campaign --trials {options.trials} --seed {options.seed} --jobs {options.jobs}{only}"
