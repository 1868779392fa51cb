"""Measures this code beside another checkout of it, such as the commit before a change, in one run.

Each checkout is measured in processes of its own, by turns (A B B A ...), so that both see the same drift of the
machine. Every round starts new processes, and their first sample is not counted. Only public names of ckpt are used,
and these must exist in both checkouts. Reported are ratios, this checkout to the other one; the exit status is 1 if one
of them exceeds 1 by more than the threshold. Given this checkout itself, the ratios show how much noise there is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import compare
from benchmarks.against.tasks import MARK, RANKS, SOURCE, TASKS
from benchmarks.compare import Change
from benchmarks.merge import write_source
from benchmarks.shared import machine
from benchmarks.shared.measure import folder_in
from benchmarks.shared.report import Run, parser
from benchmarks.shared.results import Samples

THIS, OTHER = "this checkout", "other checkout"
CHILD = Path(__file__).resolve().parent / "child.py"
HERE = CHILD.parent.parent.parent


class Child:
    """A process that takes samples of one task, with the ckpt of one checkout."""

    def __init__(self, task: str, checkout: Path, folder: Path, megabytes: int) -> None:
        folder.mkdir(parents=True)
        self.checkout, self.log = checkout, folder.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*_launcher(task), str(CHILD), task, str(checkout), str(folder), str(megabytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,  # which has nothing to import
                env={**os.environ, "PYTHONPATH": str(checkout), "GLOO_SOCKET_IFNAME": "lo"},
            )

    def sample(self) -> dict[str, float]:
        """Seconds by metric. The answer must come from the checkout that is meant."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith(MARK):
                return self._checked(json.loads(line.removeprefix(MARK)))
        raise RuntimeError(f"measuring {self.checkout} failed:\n{self.log.read_text()[-4000:]}")

    def _checked(self, answer: dict[str, object]) -> dict[str, float]:
        imported, expected = Path(str(answer["ckpt"])).resolve(), self.checkout / "ckpt/__init__.py"
        if imported != expected:
            raise RuntimeError(f"{expected} is to be measured, but {imported} was imported")
        samples = answer["samples"]
        assert isinstance(samples, dict)
        return samples

    def close(self) -> None:
        """An empty standard input ends it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # torchrun then ends its ranks
            self.process.wait(60)


def _launcher(task: str) -> list[str]:
    if task not in RANKS:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS[task])]


def measure_round(task: str, number: int, checkouts: dict[str, Path], root: Path, run: Run) -> None:
    """Samples of one task from new processes, by turns."""
    options = run.options
    with ExitStack() as stack:
        children: dict[str, Child] = {}
        for name, checkout in checkouts.items():
            folder = root / f"{task}-{number}-{name.partition(' ')[0]}"
            children[name] = Child(task, checkout, folder, options.megabytes)
            stack.callback(children[name].close)
        for child in children.values():
            child.sample()
        for turn in range(options.samples):
            order = list(children) if (turn + number) % 2 == 0 else list(children)[::-1]
            for name in order:
                for metric, took in children[name].sample().items():
                    run.samples.add(name, metric, took)
    print(f"{task}, round {number + 1} of {options.rounds}: {options.samples} samples of each", flush=True)


def measured(tasks: Sequence[str], run: Run) -> list[Change]:
    checkouts = {OTHER: run.options.checkout, THIS: HERE}
    with folder_in(run.options.root) as root:
        if "merge" in tasks:
            write_source(run.options.megabytes, root / SOURCE)
        for number in range(run.options.rounds):
            for task in tasks:
                measure_round(task, number, checkouts, root, run)
    return found_in(run.samples)


def found_in(samples: Samples) -> list[Change]:
    """The other checkout is the old one."""
    rows = samples.rows()
    old = {row.metric: row for row in rows if row.subject == OTHER}
    return [Change(old[row.metric], row) for row in rows if row.subject == THIS]


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    options_parser = parser("against", __doc__)
    options_parser.add_argument("checkout", type=Path, help="the root of the other checkout")
    options_parser.add_argument("--tasks", default=",".join(TASKS), help="some of %(default)s")
    options_parser.add_argument("--megabytes", type=int, default=600, help="size of what is saved (default: 600)")
    options_parser.add_argument("--rounds", type=int, default=2, help="how often processes are started (default: 2)")
    options_parser.add_argument("--samples", type=int, default=5, help="samples of a round (default: 5)")
    compare.add_arguments(options_parser)
    options = options_parser.parse_args(arguments)
    options.checkout = options.checkout.resolve()
    if not (options.checkout / "ckpt/__init__.py").is_file():
        options_parser.error(f"{options.checkout} has no ckpt/__init__.py: give the root of a checkout")
    unknown = set(options.tasks.split(",")) - TASKS.keys()
    if unknown:
        options_parser.error(f"--tasks: there is no {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    tasks = options.tasks.split(",")
    file = "against" if tasks == list(TASKS) else f"against-{'-'.join(tasks)}"
    run = Run("against", options, "torch", operands="OTHER", file=file)
    run.versions["commit of the other checkout"] = machine.commit_of(options.checkout) or "unknown"
    found = measured(tasks, run)
    body = compare.table_of_changes(found, options.threshold, options.statistic)
    worse = [change for change in found if change.exceeds(options.threshold, options.statistic)]
    verdict = f"{len(worse)} of {len(found)} are slower by more than {options.threshold:g} % ({options.statistic})."
    title = f"This code (new) beside another checkout (old), {options.megabytes} MB"
    turns = "By turns, in processes of their own; which ckpt was imported, and every load, was checked."
    run.keep(title, f"{body}\n\n{verdict}", None, turns)
    return 1 if worse else 0
