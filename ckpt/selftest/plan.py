"""The instructions of a selftest process, passed as a JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


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
