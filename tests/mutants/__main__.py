"""`python -m tests.mutants`: plant one mutant after the other, and see whether the tests notice.

Exit status 1 if fewer than 95 % are killed, or any is stale; 2 if the tests fail without a mutant.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import platform
import queue
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from tests.mutants import report
from tests.mutants.catalogue import Mutant, load, problem
from tests.mutants.pool import Session, Worker, copy_tree
from tests.mutants.report import Verdict

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_PER_FILE = 900.0  # seconds for the tests of one file without a mutant


@contextmanager
def workers(count: int) -> Iterator[queue.Queue[Worker]]:
    """Copies of the tree with a process each, until the context is left."""
    with tempfile.TemporaryDirectory(prefix="ckpt-mutants-") as name, ExitStack() as held:
        folder, free = Path(name).resolve(), queue.Queue[Worker]()
        copy_tree(folder / "pristine")
        with ThreadPoolExecutor(count) as pool:
            started = [pool.submit(Worker, folder / str(number), folder / "pristine") for number in range(count)]
            for one in started:
                free.put(held.enter_context(one.result()))
        yield free


def each(
    free: queue.Queue[Worker], count: int, tasks: Sequence[_Task], do: Callable[[Worker, _Task], _Result]
) -> Iterator[_Result]:
    """Do all tasks, each with a worker of its own; results come as they are ready."""

    def one(task: _Task) -> _Result:
        worker = free.get()
        try:
            return do(worker, task)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(count) as pool:
        for done in as_completed([pool.submit(one, task) for task in tasks]):
            yield done.result()


def judge(worker: Worker, mutant: Mutant) -> Verdict:
    """Plant a mutant, run its tests, and take it out again."""
    stale = problem(mutant)
    if stale:
        return Verdict(mutant, report.STALE, stale)
    with worker.mutated(mutant):
        session = worker.run(mutant.tests, mutant.seconds)
    if session.status is None:
        return Verdict(mutant, report.KILLED if mutant.hangs else report.TIMEOUT, "out of time", session.seconds)
    if session.status == 1 and session.failed:
        return Verdict(mutant, report.KILLED, session.failed[0], session.seconds)
    if session.status == 0:
        return Verdict(mutant, report.SURVIVED, "", session.seconds)
    return Verdict(mutant, report.BROKEN, " / ".join(session.output[-3:]), session.seconds)


def by_file(mutants: Iterable[Mutant]) -> list[list[str]]:
    """All tests that mutants name, once each, file by file."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for test in (test for one in mutants for test in one.tests):
        found[test.partition("::")[0]][test] = None
    return sorted((list(tests) for tests in found.values()), key=len, reverse=True)


def unmutated(free: queue.Queue[Worker], count: int, mutants: Sequence[Mutant]) -> bool:
    """Whether all tests that mutants name pass as the code is."""

    def run(worker: Worker, tests: list[str]) -> tuple[str, Session]:
        return tests[0].partition("::")[0], worker.run(tests, _PER_FILE)

    fine = True
    for file, session in each(free, count, by_file(mutants), run):
        print(f"without a mutant: {file}: {session.passed} passed ({session.seconds:.1f} s)", flush=True)
        if session.status != 0:
            fine = False
            print("\n".join(session.output), flush=True)
    return fine


def chosen(patterns: Sequence[str]) -> list[Mutant]:
    found = [one for one in load() if not patterns or any(fnmatch.fnmatch(one.id, p) for p in patterns)]
    if not found:
        sys.exit(f"no mutant is called {' or '.join(patterns)}")
    return found


def main() -> int:
    options = arguments()
    mutants, began = chosen(options.mutants), time.monotonic()
    with workers(options.jobs) as free:
        valid = [one for one in mutants if problem(one) is None]
        if not options.no_baseline and not unmutated(free, options.jobs, valid):
            print("the tests fail without a mutant: nothing can be said")
            return 2
        verdicts = []
        for verdict in each(free, options.jobs, mutants, judge):
            verdicts.append(verdict)
            print(f"[{len(verdicts)}/{len(mutants)}] {verdict.line}", flush=True)
    order = {one.id: number for number, one in enumerate(mutants)}
    verdicts.sort(key=lambda one: order[one.mutant.id])
    print(f"\n{report.table(verdicts)}\n\n{report.summary(verdicts)} in {time.monotonic() - began:.0f} s")
    if options.report:
        machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
        Path(options.report).write_text(report.markdown(verdicts, "make mutants", machine))
    return 0 if report.suffices(verdicts) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("mutants", nargs="*", help="their ids, or patterns such as 's3-*'; all if none is given")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at the same time")
    parser.add_argument("--report", help="write a Markdown table there")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a mutant first")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
