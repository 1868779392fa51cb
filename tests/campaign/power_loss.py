"""Power failures: the calls of a run are recorded and cut, and a run resumes from what a disk may then hold."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.campaign import kills
from tests.campaign.calls import Shim
from tests.campaign.children import Voice
from tests.campaign.crashed_disk import Disk, Record, read_trace
from tests.campaign.jobs import Job
from tests.campaign.trials import NAMINGS, Trial
from tests.campaign.verdicts import BROKEN, Ended, Found

_SAVES = 5


@dataclass(frozen=True)
class Recorded:
    """A run whose calls are recorded."""

    spread: str
    naming: str
    wait: bool

    @property
    def words(self) -> str:
        return f"{self.spread}, {'wait' if self.wait else 'background'}, {self.naming}"


RUNS = tuple(
    Recorded(spread, naming, wait) for spread in ("one", "fsdp") for naming in NAMINGS for wait in (True, False)
)


class _Marking(Voice):
    """Reports go between the recorded calls."""

    def __init__(self, voice: Voice) -> None:
        self.ear = voice.ear
        self._voice = voice
        self._shim = Shim()

    def tell(self, line: str) -> None:
        self._shim.mark(line)
        self._voice.tell(line)


def power_loss(trial: Trial) -> None:
    run = RUNS[trial.index % len(RUNS)]
    records = _recorded(trial, run)
    first = next(number for number, record in enumerate(records) if record.path == "durable 1")
    start = 0 if trial.random.random() < 0.2 else first
    cut = trial.random.randrange(start, len(records)) + 1
    last = records[cut - 1]
    trial.scenario = f"{run.words}: cut after {last.name} {last.path}, {cut} of {len(records)}"
    disk = Disk()
    for record in records[:cut]:
        disk.apply(record)
    disk.crash(trial.folder / "disk", trial.random)
    durable = _durable(records[:cut])
    # a removal that is half done may leave a manifest without its files, but never that of the newest
    trial.check(durable, root=trial.folder / "disk", naming=run.naming, untouched=False)


def _durable(records: list[Record]) -> int:
    marks = [record.path for record in records if record.name == "mark" and record.path.startswith("durable ")]
    return max((int(mark.split()[1]) for mark in marks), default=0)


def _recorded(trial: Trial, run: Recorded) -> list[Record]:
    """The record of a run: made once in a campaign."""
    path = trial.shared / f"trace-{RUNS.index(run)}"
    if not path.exists():
        made = trial.folder / "trace"
        _check(trial.run("the recorder", _record, trial, made, run))
        os.replace(made, path)
    return read_trace(path)


def _record(voice: Voice, trial: Trial, path: Path, run: Recorded) -> None:
    """In a process of its own, which forks the run: what is recorded is shared with it."""
    root = trial.folder / "recorded"
    root.mkdir()
    trace = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    Shim().watch(root, trace)
    arguments = (str(root), run)
    if run.spread == "one":
        _check(trial.run("the recorded run", _saving, 0, *arguments))
    else:
        job = Job(trial, _saving, *arguments)
        for ended in job.wait("the recorded run"):
            _check(ended)
        assert job.agent is not None
        job.agent.kill()


def _saving(voice: Voice, rank: int, root: str, run: Recorded) -> None:
    kills.saving(_Marking(voice), rank, root, run.spread, run.naming, run.wait, _SAVES)


def _check(ended: Ended) -> None:
    if ended.status != 0:
        raise Found(BROKEN, f"a recorded run ended with {ended.status}: {ended.failure}")
