"""Processes that run inputs: forked from one that has imported torch, killed when stuck, begun anew when they crash."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import pickle
import selectors
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.cases import Case
from tests.fuzz.judge import SECONDS, Finding, Judge

_PATIENCE = SECONDS + 5.0  # seconds after which an input is stuck where no signal helps

Work = Callable[[int, int], Iterator[tuple[int, Case]]]  # the inputs of a range of numbers, from a number on


@dataclass(frozen=True)
class Found:
    """A finding, with the input that showed it."""

    number: int
    case: Case
    finding: Finding


@dataclass
class Outcome:
    """What came of a run: inputs by operation, and findings."""

    counts: Counter[str] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)
    refused: list[tuple[str, str, str]] = field(default_factory=list)  # seed, operation, error


@dataclass
class _Child:
    """A process at work on a range: which input it is at, and since when."""

    process: int
    pipe: int
    slot: int
    stop: int
    at: int
    since: float = math.inf  # until it has begun: hypothesis draws a batch first
    buffer: bytes = b""
    finished: bool = False


class Pool:
    """Runs ranges of inputs in several processes at the same time."""

    def __init__(self, scratch: Path, jobs: int, work: Work) -> None:
        self._scratch = scratch
        self._jobs = jobs
        self._work = work
        self.outcome = Outcome()

    def run(self, ranges: Iterable[tuple[int, int]], said: Callable[[int], None] = lambda done: None) -> Outcome:
        waiting = deque(ranges)
        free = list(range(self._jobs))
        children: dict[int, _Child] = {}
        with selectors.DefaultSelector() as selector:
            try:
                while waiting or children:
                    while waiting and free:
                        child = self._start(free.pop(), *waiting.popleft())
                        children[child.pipe] = child
                        selector.register(child.pipe, selectors.EVENT_READ)
                    for key, _ in selector.select(1.0):
                        self._hear(children[key.fd])
                    for child in [one for one in children.values() if self._has_ended(one)]:
                        selector.unregister(child.pipe)
                        del children[child.pipe]
                        os.close(child.pipe)
                        free.append(child.slot)
                        if not child.finished and child.at + 1 < child.stop:
                            waiting.appendleft((child.at + 1, child.stop))
                    said(self.outcome.counts.total())
            finally:
                for child in children.values():
                    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it may have ended by itself
                        os.kill(child.process, signal.SIGKILL)
                        os.waitpid(child.process, 0)
        return self.outcome

    def _start(self, slot: int, start: int, stop: int) -> _Child:
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            os.close(reading)
            _serve(f"{self._scratch}/{slot}", self._log(slot), writing, self._work(start, stop))
        os.close(writing)
        return _Child(process, reading, slot, stop, start)

    def _log(self, slot: int) -> str:
        return f"{self._scratch}/{slot}.log"

    def _hear(self, child: _Child) -> None:
        data = os.read(child.pipe, 1 << 20)
        child.finished = child.finished or not data
        *lines, child.buffer = (child.buffer + data).split(b"\n")
        for line in lines:
            self._note(child, json.loads(line))

    def _note(self, child: _Child, said: dict[str, Any]) -> None:
        if "at" in said:
            child.at, child.since = said["at"], time.monotonic()
            return
        self.outcome.counts[said["target"]] += 1
        if said["refused"]:
            self.outcome.refused.append((said["seed"], said["target"], said["refused"]))
        if shown := said["finding"]:
            case = Case.from_json(shown.pop("case"))
            self.outcome.found.append(Found(child.at, case, Finding(**shown)))

    def _has_ended(self, child: _Child) -> bool:
        """Whether it is done, has crashed, or was stuck and is killed now."""
        if time.monotonic() - child.since > _PATIENCE and not child.finished:
            os.kill(child.process, signal.SIGKILL)
            self._bury(child, "hang")
            return True
        if not child.finished:
            return False
        status = os.waitpid(child.process, 0)[1]
        child.finished = status == 0
        if status:
            self._count_lost(child, f"crash: {os.waitstatus_to_exitcode(status)}")
        return True

    def _bury(self, child: _Child, kind: str) -> None:
        os.waitpid(child.process, 0)
        self._count_lost(child, kind)

    def _count_lost(self, child: _Child, kind: str) -> None:
        log = Path(self._log(child.slot)).read_text(errors="replace")[-4000:]
        if not kind.startswith("hang") and "Traceback (most recent" in log:
            raise RuntimeError(f"a process of the fuzzer itself failed:\n{log}")
        case: Case = pickle.loads(Path(f"{self._log(child.slot)}.case").read_bytes())
        self.outcome.counts[case.target] += 1
        frames = [line.strip() for line in log.splitlines() if "File " in line]
        ours = next((line for line in frames if "/tests/" not in line and "site-packages" not in line), "?")
        where = ours.rpartition("/")[2].replace('", line', ":")
        finding = Finding(kind.partition(":")[0], f"{kind} in {where}", log)
        self.outcome.found.append(Found(child.at, case, finding))


def _serve(folder: str, log: str, pipe: int, work: Iterator[tuple[int, Case]]) -> None:
    """In a child: run the inputs and say what came of each. Does not return."""
    status = 1
    with open(log, "w") as file:
        try:
            os.dup2(file.fileno(), 2)
            faulthandler.enable(file)
            judge = Judge(folder)
            for number, case in work:
                _keep(log + ".case", case)
                _say(pipe, {"at": number})
                faulthandler.dump_traceback_later(SECONDS + 2, file=file)
                finding = judge.run(case)
                faulthandler.cancel_dump_traceback_later()
                shown = {"case": case.to_json(), **finding.to_json()} if finding else None
                _say(pipe, {"target": case.target, "seed": case.seed, "refused": judge.refused, "finding": shown})
            status = 0
        except BaseException:
            traceback.print_exc(file=file)
        file.flush()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(status)


def _keep(path: str, case: Case) -> None:
    """Where the parent finds it if this process does not come back from it."""
    with open(path, "wb") as file:
        pickle.dump(case, file)


def _say(pipe: int, what: dict[str, Any]) -> None:
    data = json.dumps(what).encode("utf-8", "surrogatepass") + b"\n"
    while data:
        data = data[os.write(pipe, data) :]
