"""A run of the fuzzer: the corpus is made, inputs are run in processes, findings are reduced and reported."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.configuration import set_hypothesis_home_dir

from tests.fuzz import seeds, structures
from tests.fuzz.cases import KINDS, Case, Maker
from tests.fuzz.judge import Finding
from tests.fuzz.pool import Found, Outcome, Pool
from tests.fuzz.reduce import reduced
from tests.fuzz.report import Report
from tests.fuzz.targets import TARGETS, import_everything
from tests.fuzz.tree import Tree, read_tree

BATCH = 250  # inputs of a process
_TOLD = 10_000  # where there is no terminal, a line for so many
_STRUCTURES = 4  # every so many batches, one of structures
# by design: state of two ranks in one process, a folder without an optimizer, a model in a pickle, and a universal
# folder of DeepSpeed, which has integers as float32
_REFUSED = {
    ("zero-universal", "load_model of DeepSpeed"),
    *(
        ("own-state", name)
        for name in ("resume", "load_state", "resume and save", "load_model", "load_model of a root")
    ),
    *(("accelerate-sharded", name) for name in ("resume what Accelerate saved", "load_state of Accelerate")),
    *(("accelerate-pickles", name) for name in ("load_model of Accelerate", "merge of Accelerate")),
}
_OF_THE_MACHINE = ("hang", "memory")
CORPUS = Path(__file__).parent / "corpus"


class Fuzzer:
    """What a command line asks for, and the corpus for it."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        import_everything()
        self._options = options
        self._scratch = scratch
        self._trees = _trees(options.corpus, scratch, [] if options.all else list(seeds.SLOW))
        names = {kind: tuple(group) for kind, group in TARGETS.items()}
        chosen = {kind: tuple(name for name in group if _matches(name, options.only)) for kind, group in names.items()}
        self._trees = {name: tree for name, tree in self._trees.items() if chosen[KINDS[name]]}
        self._targets = chosen
        self._maker = Maker(self._trees, chosen, options.seed)
        set_hypothesis_home_dir(scratch / "hypothesis")

    def run(self) -> int:
        began = time.monotonic()
        broken = self._pristine()
        outcome = self._fuzz(began)
        seconds = time.monotonic() - began
        for one in outcome.found if self._options.verbose else ():
            print(f"{one.finding.kind}: {one.finding.signature} (input {one.number}, {one.case.target})", flush=True)
        found = self._reduced(outcome)
        report = Report(self._options, sorted(self._trees), outcome.counts, found, broken, seconds)
        if self._options.report:
            self._options.report.parent.mkdir(parents=True, exist_ok=True)
            self._options.report.write_text(report.markdown())
        if self._options.save:
            _save(self._options.save, found)
        print(report.summary())
        return 1 if found or broken else 0

    def _pristine(self) -> list[str]:
        """Operations that refuse what the libraries wrote: the fuzzer would test nothing behind them."""
        cases = self._maker.pristine()

        def work(start: int, stop: int) -> Iterator[tuple[int, Case]]:
            return ((number, cases[number]) for number in range(start, stop))

        outcome = Pool(self._scratch, self._options.jobs, work).run(_spans(len(cases), self._options.jobs))
        refused = [
            f"{seed}, {target}: {error}" for seed, target, error in outcome.refused if (seed, target) not in _REFUSED
        ]
        return refused + [f"{one.case.seed}, {one.case.target}: {one.finding.signature}" for one in outcome.found]

    def _fuzz(self, began: float) -> Outcome:
        first, count = self._options.first, self._options.inputs
        ranges = [(start, min(start + BATCH, first + count)) for start in range(first, first + count, BATCH)]

        told = 0

        def said(done: int) -> None:
            nonlocal told
            shown = f"{done:,} inputs, {done / max(0.1, time.monotonic() - began):.0f}/s"
            if sys.stderr.isatty():
                print(f"\r{shown} ", end="", file=sys.stderr, flush=True)
            elif done >= told + _TOLD:
                told = done
                print(shown, flush=True)

        return Pool(self._scratch, self._options.jobs, self._work).run(ranges, said)

    def _work(self, start: int, stop: int) -> Iterator[tuple[int, Case]]:
        """The inputs of a batch from a number on. Those before it are made again where they decide about the rest."""
        batch = start // BATCH
        if batch % _STRUCTURES != _STRUCTURES - 1:
            yield from ((number, self._maker.make(number)) for number in range(start, stop))
            return
        drawn = self._drawn(batch)[start - batch * BATCH :]
        for number in range(start, stop):
            place = number - start
            yield number, drawn[place] if place < len(drawn) else self._maker.make(number)

    def _drawn(self, batch: int) -> list[Case]:
        """A batch of structures, the same for the same number."""
        cases: list[Case] = []

        @hypothesis.seed(f"{self._options.seed}/{batch}")
        @settings(
            max_examples=BATCH,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(structures.cases(self._trees, self._targets, KINDS))
        def draw(case: Case) -> None:
            cases.append(case)

        draw()
        return cases[:BATCH]

    def _reduced(self, outcome: Outcome) -> list[Found]:
        """One input for each signature, as small as it could be made."""
        first: dict[tuple[str, str], Found] = {}
        for one in sorted(outcome.found, key=lambda one: sum(map(_weight, one.case.files.values()))):
            first.setdefault((one.finding.kind, one.finding.signature), one)
        return reduced(self._seen_again(list(first.values())), self._trees, self._judged)

    def _seen_again(self, found: list[Found]) -> list[Found]:
        """Without what took time or memory once, after many inputs, and not again in a process of its own."""
        again = self._judged([one.case for one in found])
        for one, finding in zip(found, again, strict=True):
            if finding is None and one.finding.kind in _OF_THE_MACHINE:
                print(f"seen once: {one.finding.kind}: {one.finding.signature} (input {one.number})", flush=True)
        pairs = zip(found, again, strict=True)
        return [one for one, finding in pairs if finding is not None or one.finding.kind not in _OF_THE_MACHINE]

    def _judged(self, cases: list[Case]) -> list[Finding | None]:
        pool = Pool(self._scratch, self._options.jobs, lambda start, stop: iter(list(enumerate(cases))[start:stop]))
        by_number = {one.number: one.finding for one in pool.run(_spans(len(cases), self._options.jobs)).found}
        return [by_number.get(number) for number in range(len(cases))]


def _spans(count: int, parts: int) -> list[tuple[int, int]]:
    ends = [count * part // parts for part in range(parts + 1)]
    return [(start, stop) for start, stop in pairwise(ends) if start < stop]


def _weight(node: object) -> int:
    return len(node) if isinstance(node, bytes) else 100


def _matches(name: str, only: list[str] | None) -> bool:
    return not only or any(word in name for word in only)


def _trees(folder: Path | None, scratch: Path, left_out: list[str]) -> dict[str, Tree]:
    """The corpus from a folder, or made now."""
    if folder is None or not folder.exists():
        made = folder or scratch / "corpus"
        names = [name for name in seeds.MAKERS if name not in left_out]
        environment = {**os.environ, "CKPT_MEMORY_KEEPER": "off", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.fuzz.seeds", str(made), *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise RuntimeError(f"the corpus could not be made:\n{done.stderr[-4000:]}")
        print(done.stdout, end="")
        folder = made
    return {name: read_tree(folder / name) for name in seeds.MAKERS if (folder / name).exists()}


def _save(folder: Path, found: list[Found]) -> None:
    """What was found, each as a file that the tests run again."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in found:
        words = "".join(char if char.isalnum() else "-" for char in f"{one.finding.kind} {one.finding.signature}")
        path = folder / f"{'-'.join(filter(None, words.split('-')))[:120].lower()}.json"
        path.write_text(json.dumps({**one.case.to_json(), "finding": one.finding.to_json()}, indent=1) + "\n")


def replay(folder: Path, scratch: Path, jobs: int) -> list[Found]:
    """Run the inputs that are kept in a folder, and return what is wrong with how they end now."""
    cases = [Case.from_json(json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    pool = Pool(scratch, jobs, lambda start, stop: iter(list(enumerate(cases))[start:stop]))
    return pool.run([(0, len(cases))]).found if cases else []
