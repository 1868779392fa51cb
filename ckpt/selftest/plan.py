"""What a process under the selftest is to do: handed over as a file of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One process of a run. `target` is a script, or a file and a function in it (`function` is not empty)."""

    target: str
    function: str = ""
    arguments: list[str] = field(default_factory=list)
    folder: str  # of traces
    process: int  # of this run, from 0 on: each one after the first resumes
    root: str  # of this run's checkpoints
    redirect: bool  # whether managers are given that root, whatever the script says
    kill_at: int | None = None  # the optimizer step after which to die
    save_every: int | None = None
    seed: int = 0
    path: list[str] = field(default_factory=list)  # sys.path of whoever asks

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Plan:
        return cls(**json.loads(path.read_text()))
