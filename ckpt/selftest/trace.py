"""What a selftest process is told, and the trace it writes: a line of JSON per optimizer step, save and resume.

A line is written with one system call, so that a kill right after it leaves it complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """An `optimizer.step()`, the `number`-th of the run over all its processes and optimizers.

    `batches`, `inputs` and `losses` are what the manager yielded to the loop, what the managed models were called with
    and what `backward()` was called on since the step before. Tensors are recorded as digests by name.
    """

    number: int
    optimizer: str
    managed: bool  # whether a manager has this optimizer
    batches: list[str]
    inputs: list[str]
    losses: list[str]
    gradients: dict[str, str]
    rates: list[float]
    parameters: dict[str, str]
    buffers: dict[str, str]
    named: list[str] = field(default_factory=list)  # what ckpt itself has warned of, or called approximated, so far
    start: dict[str, str] = field(default_factory=dict)  # digests of what it starts from, at its first input


@dataclass(frozen=True)
class Saved:
    """A call of `save_state`: the state, and the batches, inputs and losses since the last step.

    `start` has what the next step would start from, if nothing else is done before it. `forgotten` are schedulers and
    scalers of the program that no manager has; `schedulers` tells whether there is a managed one.
    """

    number: int
    name: str
    progress: dict[str, int]
    batches: list[str]
    inputs: list[str]
    losses: list[str]
    tensors: dict[str, str]
    start: dict[str, str] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)
    schedulers: bool = False


@dataclass(frozen=True)
class Resumed:
    """A loaded checkpoint: the state after the load, and what ckpt itself says is not exact."""

    number: int
    name: str
    tensors: dict[str, str]
    named: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class End:
    """The end of the program. `others` are models that no manager has, `changed` those whose tensors changed."""

    number: int
    tensors: dict[str, str]
    others: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    loaders: bool = False  # a DataLoader was iterated over


Record = Step | Saved | Resumed | End
_KINDS: dict[str, type[Record]] = {kind.__name__: kind for kind in (Step, Saved, Resumed, End)}


@dataclass
class Trace:
    """The records of a process, in order."""

    records: list[Record] = field(default_factory=list)

    @property
    def steps(self) -> list[Step]:
        return [record for record in self.records if isinstance(record, Step)]

    @property
    def saves(self) -> list[Saved]:
        return [record for record in self.records if isinstance(record, Saved)]

    @property
    def resumed(self) -> Resumed | None:
        """The first load of the process."""
        return next((record for record in self.records if isinstance(record, Resumed)), None)

    @property
    def end(self) -> End | None:
        return next((record for record in self.records if isinstance(record, End)), None)


def trace_file(folder: Path, process: int, rank: int) -> Path:
    return folder / f"process-{process}-rank-{rank}.jsonl"


def read_trace(folder: Path, process: int, rank: int) -> Trace:
    """The trace of a process; empty if it was killed before its first record."""
    path = trace_file(folder, process, rank)
    lines = path.read_text().splitlines() if path.exists() else []
    return Trace([_parse(line) for line in lines])


class TraceWriter:
    """Appends records to the file of a process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, record: Record) -> None:
        line = json.dumps({"kind": type(record).__name__, **asdict(record)}) + "\n"
        os.write(self._file, line.encode())


def _parse(line: str) -> Record:
    found: dict[str, Any] = json.loads(line)
    return _KINDS[found.pop("kind")](**found)


def in_order(steps: Sequence[Step], what: str) -> Iterator[tuple[int, str]]:
    """Every batch, or every input, in order, with the number of the step that used it."""
    for step in steps:
        for digest in getattr(step, what):
            yield step.number, digest


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A process of a run. `target` is a script or, if `function` is not empty, the file of that function."""

    target: str
    function: str = ""
    arguments: list[str] = field(default_factory=list)
    folder: str  # of traces
    process: int  # its number in the run, from 0: all but the first resume
    root: str  # of this run's checkpoints
    redirect: bool  # whether managers use that root, whatever the script says
    kill_at: int | None = None  # the optimizer step after which it kills itself
    save_every: int | None = None
    seed: int = 0
    path: list[str] = field(default_factory=list)  # sys.path of the process that runs the selftest

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Plan:
        return cls(**json.loads(path.read_text()))
