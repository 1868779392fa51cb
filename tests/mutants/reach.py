"""Which test calls which function of the library, in whatever process, and how long it takes: a plugin of pytest.

python -m tests.mutants --trace     # runs the suite with it, into build/reach.json.gz
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.operators import Mutant

TRACED = Path(__file__).parent / "traced"


def environment(folder: Path) -> dict[str, str]:
    """For the process that runs pytest, and for all that it starts."""
    paths = [str(TRACED), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "CKPT_REACH": str(folder), "PYTHONPATH": os.pathsep.join(paths)}


class Plugin:
    """Tells the tracer of this process, and the file for the others, which test runs."""

    def __init__(self) -> None:
        self._tracer: Any = sys.__dict__["_ckpt_tracer"]
        self._folder = Path(self._tracer.folder)
        os.environ["CKPT_REACH_WORKER"] = str(os.getpid())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        outcomes: list[str] = []
        self._outcomes = outcomes
        self._set(item.nodeid)
        began = time.monotonic()
        try:
            return (yield)
        finally:
            self._set("")
            if outcomes == ["passed"] * 3:
                with open(self._folder / f"passed-{os.getpid()}", "a") as file:
                    file.write(f"{item.nodeid}\t{time.monotonic() - began:.2f}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.append(report.outcome)

    def _set(self, name: str) -> None:
        (self._folder / f"current-{os.getpid()}").write_text(name)
        self._tracer.test(name)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Plugin())


@dataclass
class Reach:
    """What a traced run has found: tests that passed, with their seconds, and the functions that each calls."""

    seconds: dict[str, float] = field(default_factory=dict)
    called: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    tests: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def gather(self, folder: Path) -> None:
        """Add what the processes of a traced run have written."""
        for test, seconds in _lines(folder.glob("passed-*")):
            if re.fullmatch(r"[^\s:]+(::[^:\n]+)+", test):  # others cannot be asked for by their name
                self.seconds[test] = float(seconds)
        for test, function in _lines(folder.glob("reached-*")):
            if test in self.seconds:
                self._add(test, function)

    def write(self, path: Path) -> None:
        numbers: dict[str, int] = {}
        found = {
            test: [seconds, [numbers.setdefault(name, len(numbers)) for name in sorted(self.called[test])]]
            for test, seconds in self.seconds.items()
        }
        path.write_bytes(gzip.compress(json.dumps([list(numbers), found]).encode()))

    @classmethod
    def read(cls, path: Path) -> Reach:
        functions, found = json.loads(gzip.decompress(path.read_bytes()))
        read = cls()
        for test, (seconds, numbers) in found.items():
            read.seconds[test] = seconds
            for number in numbers:
                read._add(test, functions[number])
        return read

    def _add(self, test: str, function: str) -> None:
        self.called[test].add(function)
        self.tests[function].add(test)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that call the function of a mutant: two quick ones of its package, one that does little else,
        one that does much, and so on.

        What stands in a class or in a module is run by those that call its functions.
        """
        name = mutant.function
        found = set(self.tests.get(f"{mutant.file}::{name}", ()))
        while not found and name:
            name = name.rpartition(".")[0]
            prefix = f"{mutant.file}::{name}." if name else f"{mutant.file}::"
            found = {test for function, tests in self.tests.items() if function.startswith(prefix) for test in tests}
        if not found:  # no process that was traced calls it: the tests that lie where it lies
            found = {test for test in self.seconds if test.startswith(_folder(mutant))}
        near = [test for test in self._in_turn(found, 1, slow=0.5) if test.startswith(_folder(mutant))]
        narrow, wide = self._in_turn(found, 1), self._in_turn(found, -1)
        turns = zip_longest(near[::2], near[1::2], narrow, wide)
        return list(dict.fromkeys(test for turn in turns for test in turn if test is not None))

    def _in_turn(self, tests: Iterable[str], sign: int, slow: float = 4) -> list[str]:
        """One of every module, the narrowest (or widest) first, then another one of each; those that take long last."""
        modules: dict[str, list[tuple[bool, int, str]]] = defaultdict(list)
        for test in tests:
            modules[test.partition("::")[0]].append((self.seconds[test] > slow, sign * len(self.called[test]), test))
        turns = [
            (late, turn, width, test) for of in modules.values() for turn, (late, width, test) in enumerate(sorted(of))
        ]
        return [test for _, _, _, test in sorted(turns)]

    def within(self, tests: Sequence[str], seconds: float) -> tuple[list[str], list[str]]:
        """As many of the tests as take that long, and the rest."""
        total, count = 0.0, 0
        while count < len(tests) and (not count or total < seconds):
            total += self.seconds[tests[count]] + 0.05
            count += 1
        return list(tests[:count]), list(tests[count:])


def _folder(mutant: Mutant) -> str:
    """Where the tests of a mutant's package lie."""
    return f"tests/{mutant.file.removeprefix('ckpt/').partition('/')[0]}/"


def _lines(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for path in files:
        for line in path.read_text().splitlines():
            test, tab, value = line.rpartition("\t")
            if tab:
                yield test, value
