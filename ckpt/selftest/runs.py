"""Run the user's program straight, then killed and resumed, and collect the trace of each process."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.errors import ConfigError
from ckpt.selftest.plan import Plan
from ckpt.selftest.trace import Trace, read_trace

PLACEHOLDER = "{root}"
_TAIL = 15  # lines of a program's output that an error shows
_REDIRECTED = (
    "\nIts checkpoints are saved into a folder of the test's own. If the script uses that folder itself, pass its "
    "path: {root} in an argument stands for it, as in --output_dir {root}."
)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program to test, and the options of the selftest."""

    target: str
    function: str = ""
    arguments: tuple[str, ...] = ()
    processes: int = 1  # ranks, started by torchrun if more than one
    kills: int = 3
    save_every: int | None = None
    seed: int = 0
    timeout: float = 600.0
    say: Callable[[str], None] = lambda text: None
    start: Callable[[Program, Path, Path], tuple[int | None, str]] = lambda program, plan, log: in_a_process(
        program, plan, log
    )

    def __post_init__(self) -> None:
        wrong = []
        if not Path(self.target).is_file():
            wrong.append(f"{self.target} is not a file")
        if self.kills < 1:
            wrong.append(f"kills={self.kills}: at least 1 is needed")
        if self.processes < 1:
            wrong.append(f"processes={self.processes}: at least 1 is needed")
        if self.save_every is not None and self.save_every < 1:
            wrong.append(f"save_every={self.save_every}: at least 1 is needed")
        if self.timeout <= 0:
            wrong.append(f"timeout={self.timeout:g}: must be positive")
        if wrong:
            raise ConfigError("selftest: " + "; ".join(wrong) + ".")


@dataclass
class Run:
    """A run of the program: its processes in order, each with a trace per rank."""

    program: Program
    folder: Path
    traces: list[list[Trace]] = field(default_factory=list)  # [process][rank]

    def straight(self) -> None:
        self._start(None)

    def killed(self, steps: Sequence[int]) -> None:
        """Run one process per step, each killed after its step, and a last one to the end of the program."""
        for step in (*steps, None):
            self._start(step)

    def _start(self, kill_at: int | None) -> None:
        process = len(self.traces)
        plan = self._plan(process, kill_at)
        path = self.folder / f"plan-{process}.json"
        plan.write(path)
        status, output = self.program.start(self.program, path, self.folder / f"log-{process}")
        self.traces.append([read_trace(self.folder, process, rank) for rank in range(self.program.processes)])
        ended = all(trace.end is not None for trace in self.traces[-1])
        if ended and status == 0:
            return
        if kill_at is None or not all(
            trace.steps[-1:] and trace.steps[-1].number == kill_at for trace in self.traces[-1]
        ):
            hint = _REDIRECTED if plan.redirect and process == 0 else ""
            raise ProgramError(process, status, output + hint)

    def _plan(self, process: int, kill_at: int | None) -> Plan:
        root = str(self.folder / "root")
        program = self.program
        return Plan(
            target=str(Path(program.target).resolve()),
            function=program.function,
            arguments=[argument.replace(PLACEHOLDER, root) for argument in program.arguments],
            folder=str(self.folder),
            process=process,
            root=root,
            redirect=not program.function and not any(PLACEHOLDER in argument for argument in program.arguments),
            kill_at=kill_at,
            save_every=program.save_every,
            seed=program.seed,
            path=[folder for folder in sys.path if folder],
        )


class ProgramError(Exception):
    """The user's program failed, or did not end in time."""

    def __init__(self, process: int, status: int | None, output: str) -> None:
        self.process = process
        how = "did not end in time" if status is None else f"ended with status {status}"
        when = "run straight, without a kill" if process == 0 else f"resumed after kill {process}"
        super().__init__(f"the program, {when}, {how}:\n{output}")


@contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ckpt-selftest-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kill_steps(straight: Trace, kills: int, seed: int) -> list[int]:
    """The steps after which to kill, in order: each follows another save, so that each kill resumes from another."""
    last = straight.steps[-1].number if straight.steps else 0
    saves = sorted({save.number for save in straight.saves if 0 < save.number < last})
    chance = random.Random(seed)  # noqa: S311
    chosen = sorted(chance.sample(saves, min(kills, len(saves))))
    following = {save: next((later for later in saves if later > save), last) for save in saves}
    return [chance.randint(save + 1, following[save]) for save in chosen]


def in_a_process(program: Program, plan: Path, log: Path) -> tuple[int | None, str]:
    """Run a plan in a new interpreter, or under torchrun; return its exit status (None: not in time) and last lines.

    Its whole process group is killed before this returns.
    """
    # a file and not a pipe: a process that outlives its launcher would keep that open
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603
            _command(program, plan), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    status: int | None = None
    try:
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(program.timeout)
    finally:
        _kill_group(process.pid)
        process.wait()
    return status, last_lines(log)


def last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_TAIL:])


def _command(program: Program, plan: Path) -> list[str]:
    launcher = []
    if program.processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(program.processes)]
    return [sys.executable, *launcher, "-m", "ckpt.selftest.child", str(plan)]


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
