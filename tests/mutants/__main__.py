"""`python -m tests.mutants`: draw small bugs, plant them one by one, and see whether the tests that reach it notice.

Exit status 1 if too few are killed: 95 % where a bug loses a run, 85 % of all.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import platform
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.mutants import reach, report
from tests.mutants.operators import ROOT, Mutant, draw, mutants_of, sources
from tests.mutants.pool import Session, Worker, copy_tree
from tests.mutants.reach import Reach
from tests.mutants.report import Verdict, judged

KEPT = ROOT / "build" / "mutants.jsonl"  # what became of each, as it comes
REACH = ROOT / "build" / "reach.json.gz"
_NOT_RUN = (4, 5)  # pytest's exit statuses: no such test, and none left to run
_ROUNDS = (4.0, 12.0, 34.0)  # seconds of tests: most bugs are noticed by the first few


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


class Judge:
    """Plants mutants and runs their tests, without those that fail without a mutant too."""

    def __init__(self, found: Reach) -> None:
        self._reach = found
        self._fit: dict[str, bool] = {}
        self._lock = threading.Lock()

    def judge(self, worker: Worker, mutant: Mutant) -> Verdict:
        left, began, tried = self._reach.tests_of(mutant), time.monotonic(), 0
        for seconds in _ROUNDS:
            tests, left = self._reach.within([one for one in left if self._fit.get(one, True)], seconds)
            while tests:
                with worker.mutated(mutant):
                    session = worker.run(tests, 40 + 5 * sum(self._reach.seconds[one] for one in tests))
                passed = tests[: session.passed]
                if session.status == 0:
                    tried += len(tests)
                    break
                if session.status in _NOT_RUN:  # a test has changed since the suite was traced
                    told = "\n".join(session.output)
                    there = [one for one in tests if one.partition("[")[0] not in told]
                    tests = there if there != tests else []
                    continue
                if not session.failed or self._is_fit(worker, session.failed[0]):
                    result = report.KILLED if session.status is not None else report.HUNG
                    return Verdict(mutant, result, _noticed(session), time.monotonic() - began)
                tests = [one for one in tests if one not in passed and one != session.failed[0]]
        return Verdict(mutant, report.SURVIVED, f"{tried} tests", time.monotonic() - began)

    def _is_fit(self, worker: Worker, test: str) -> bool:
        """Whether a test passes without a mutant, where and as it has failed with one."""
        with self._lock:
            known = self._fit.get(test)
        if known is None:
            known = worker.run([test], 40 + 5 * self._reach.seconds.get(test, 60)).status == 0
            with self._lock:
                self._fit[test] = known
        return known


def _noticed(session: Session) -> str:
    if session.failed:
        return session.failed[0]
    return "out of time" if session.status is None else " / ".join(session.output[-2:])


def trace(jobs: int, arguments: Sequence[str]) -> int:
    """Run the suite, or a part of it, and add to what is known which test calls what."""
    found = Reach.read(REACH) if REACH.exists() else Reach()
    command = [sys.executable, "-m", "pytest", "-n", str(jobs), "--dist", "worksteal", "-p", "tests.mutants.reach"]
    with tempfile.TemporaryDirectory(prefix="ckpt-reach-") as name:
        folder = Path(name)
        done = subprocess.run([*command, *arguments], cwd=ROOT, env=reach.environment(folder), check=False)
        found.gather(folder)
    REACH.parent.mkdir(exist_ok=True)
    found.write(REACH)
    return done.returncode


def chosen(options: argparse.Namespace) -> list[Mutant]:
    if not options.mutants:
        return draw(options.count, options.seed)
    drawn = [one for path in sources() for one in mutants_of(path)]
    found = [one for one in drawn if any(one.id == p or fnmatch.fnmatch(one.id, p) for p in options.mutants)]
    if not found:
        sys.exit(f"no mutant is called {' or '.join(options.mutants)}")
    return found


def main() -> int:
    options, began = arguments(), time.monotonic()
    if options.trace is not None:
        return trace(options.jobs, options.trace)
    mutants = chosen(options)
    if options.list:
        print("\n".join(one.id for one in mutants))
        return 0
    verdicts = list(report.noticed_before(KEPT, mutants)) if options.resume else []
    done_before = {one.mutant for one in verdicts}
    left, judge = [one for one in mutants if one not in done_before], Judge(Reach.read(REACH))
    random.Random(options.seed).shuffle(left)  # so that a run that is stopped has measured a sample
    with workers(options.jobs) as free, ThreadPoolExecutor(options.jobs) as pool:

        def one(mutant: Mutant) -> Verdict:
            worker = free.get()
            try:
                return judge.judge(worker, mutant)
            finally:
                free.put(worker)

        for done in as_completed([pool.submit(one, mutant) for mutant in left]):
            verdicts.append(judged(done.result()))
            report.keep(KEPT, verdicts[-1])
            print(f"[{len(verdicts)}/{len(mutants)}] {verdicts[-1].line}", flush=True)
    verdicts.sort(key=lambda one: (one.mutant.file, one.mutant.start))
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    command = f"make mutants COUNT={options.count} SEED={options.seed}"
    print(f"\n{report.summary(verdicts)}\nin {time.monotonic() - began:.0f} s")
    if options.report:
        Path(options.report).write_text(report.markdown(verdicts, command, machine))
    return 0 if report.suffices(verdicts) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("mutants", nargs="*", help="their ids, or patterns such as 'ckpt/root/*'; else some are drawn")
    parser.add_argument("--count", type=int, default=400, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="how many run at the same time")
    parser.add_argument("--report", help="write a Markdown table there")
    parser.add_argument("--resume", action="store_true", help="do not plant again what was noticed by an earlier run")
    parser.add_argument("--list", action="store_true", help="print the ids and plant nothing")
    parser.add_argument(
        "--trace", nargs=argparse.REMAINDER, help="run the suite with these options, and note what it calls"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
