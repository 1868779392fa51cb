"""Runs trials, a few at a time, each in a process that is forked from this one."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.campaign.children import Child, Voice
from tests.campaign.kinds import KINDS, Prepared
from tests.campaign.trials import Trial
from tests.campaign.verdicts import BROKEN, HANG, Found, Verdict

_LONGEST = 240.0  # seconds of one trial
_LINES = 20  # of evidence
_CODE = re.compile(r"(?:/[^/\s\"']+)+/(?=(?:ckpt|formats|storage|tests|site-packages|python3\.\d+)/)")


@dataclass
class Runner:
    """Makes trials of (kind, index) pairs. `folder` is scratch, and is left as it was."""

    seed: int
    folder: Path
    jobs: int
    prepared: Prepared
    tell: Callable[[Verdict], None]

    def run(self, trials: Iterator[tuple[str, int]]) -> list[Verdict]:
        active: dict[Child, tuple[str, int, float]] = {}
        verdicts: list[Verdict] = []
        try:
            while True:
                while len(active) < self.jobs and (one := next(trials, None)) is not None:
                    active[self._start(*one)] = (*one, time.monotonic())
                if not active:
                    return verdicts
                for child in self._ended(active):
                    verdicts.append(self._verdict(child, *active.pop(child)))
                    self.tell(verdicts[-1])
        finally:
            for child in active:
                _kill_all_of(child)

    def _start(self, kind: str, index: int) -> Child:
        sys.stdout.flush()
        folder = self.folder / f"{kind}-{index}"
        folder.mkdir()
        trial = Trial(kind, index, self.seed, folder, self.folder)
        return Child(folder / "log", _one, trial, self.prepared)

    def _ended(self, active: dict[Child, tuple[str, int, float]]) -> list[Child]:
        poll = select.poll()
        for child in active:
            poll.register(child.handle, select.POLLIN)
        ready = {handle for handle, _ in poll.poll(1000)}
        late = time.monotonic() - _LONGEST
        return [child for child, (_, _, begun) in active.items() if child.handle in ready or begun < late]

    def _verdict(self, child: Child, kind: str, index: int, begun: float) -> Verdict:
        seconds = time.monotonic() - begun
        late = seconds > _LONGEST
        if late:
            _kill_all_of(child)
        ended = child.kill() if late else child.wait("a trial")
        log = child.log.read_text(errors="replace")[-2000:]
        shutil.rmtree(child.log.parent, ignore_errors=True)
        if late:
            return Verdict(
                kind, index, fault=HANG, evidence=f"the trial took more than {_LONGEST:g} s", seconds=seconds
            )
        if ended.value is None:
            evidence = f"the trial's process ended with {ended.status}: {ended.failure}\n{log}"
            return Verdict(kind, index, fault=BROKEN, evidence=evidence, seconds=seconds)
        return Verdict(**{**ended.value, "seconds": round(seconds, 3)})


def _kill_all_of(child: Child) -> None:
    """The trial and what it has started: they are a process group of their own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _one(voice: Voice, trial: Trial, prepared: Prepared) -> dict[str, Any]:
    os.setsid()
    fault, evidence = "", ""
    try:
        KINDS[trial.kind].trial(trial, prepared)
    except Found as found:
        fault, evidence = found.fault, found.evidence
    finally:
        trial.end()
    return asdict(Verdict(trial.kind, trial.index, _short(trial.scenario, trial), fault, _short(evidence, trial)))


def _short(text: str, trial: Trial) -> str:
    """Without paths of this machine, and twenty lines at most."""
    known = {str(trial.root): "ROOT", str(trial.folder): "TRIAL", str(trial.shared): "SCRATCH"}
    for word, shown in {**known, socket.gethostname(): "HOST"}.items():
        text = re.sub(rf"(?<!\w){re.escape(word)}\b", shown, text)
    lines = _CODE.sub("", text).splitlines()
    return "\n".join(lines if len(lines) <= _LINES else [*lines[:5], "...", *lines[6 - _LINES :]])
