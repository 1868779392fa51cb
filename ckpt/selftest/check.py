"""Check whether a training program resumes exactly: run it straight, then killed and resumed, and compare."""

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
from textwrap import fill

from ckpt.errors import ConfigError
from ckpt.selftest.compare import Difference, Rank, cause, first_difference
from ckpt.selftest.trace import Plan, Trace, read_trace

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


_WIDTH = 110


@dataclass(frozen=True)
class Report:
    """The result of a selftest; `str()` of it is the text for people."""

    steps: int
    saves: int
    resumed: tuple[tuple[int, int], ...] = ()  # by kill: the step after which, and the step resumed from
    difference: Difference | None = None
    cause: str = ""
    failure: str = ""
    named: tuple[str, ...] = field(default=())

    @property
    def exact(self) -> bool:
        return self.difference is None and not self.failure

    def __str__(self) -> str:
        lines = [f"straight run: {self.steps} optimizer steps, {self.saves} saves"]
        lines += [f"killed after step {killed}, resumed from step {resumed}" for killed, resumed in self.resumed]
        if self.failure:
            return "\n".join([*lines, self.failure])
        if self.difference is None:
            return "\n".join(
                [*lines, "exact: every batch, loss, gradient, learning rate, parameter and buffer is the same"]
            )
        return "\n".join([*lines, *self._explain(self.difference)])

    def _explain(self, found: Difference) -> list[str]:
        after = f", {found.step - found.resumed.number} after the resume" if found.resumed else ""
        where = f"NOT exact: first differs at step {found.step}{after}, on rank {found.rank}, in its {found.what}"
        lines = [where, *_wrapped("what:   ", found.detail), *_wrapped("likely: ", self.cause)]
        return [*lines, *(line for text in self.named[:4] for line in _wrapped("ckpt says: ", text))]


def check(program: Program) -> Report:
    """Run the program straight, then killed and resumed, and compare every step."""
    with scratch() as folder:
        straight, killed = (Run(program, folder / name) for name in ("straight", "killed"))
        for run in (straight, killed):
            run.folder.mkdir()
        program.say("running it straight ...")
        straight.straight()
        reference = straight.traces[0][0]
        kills = _kills(straight, program)
        steps, saves = len(reference.steps), len(reference.saves)
        program.say(f"{steps} optimizer steps, {saves} saves; killing it after step {', '.join(map(str, kills))} ...")
        failure = ""
        try:
            killed.killed(kills)
        except ProgramError as error:
            failure = f"NOT exact: {error}"
        return _judge(straight, killed, kills, failure)


def _kills(straight: Run, program: Program) -> list[int]:
    reference = straight.traces[0][0]
    if not reference.steps:
        raise ConfigError(
            f"{program.target}: no optimizer.step() was seen, so there is nothing to compare. The selftest follows "
            "torch.optim optimizers in the process that it starts."
        )
    kills = kill_steps(reference, program.kills, program.seed)
    if not kills:
        raise ConfigError(
            f"{program.target}: no save between the first and the last of its {len(reference.steps)} optimizer steps, "
            "so there is nothing to resume from. Give it save_every= (ckpt selftest --save-every N), or more steps."
        )
    return kills


def _judge(straight: Run, killed: Run, kills: list[int], failure: str) -> Report:
    reference = straight.traces[0]
    ranks = [
        Rank.of(rank, reference[rank], [process[rank] for process in killed.traces]) for rank in range(len(reference))
    ]
    loads = [process[0].resumed for process in killed.traces[1:]]
    resumed = tuple((kill, load.number) for kill, load in zip(kills, loads, strict=False) if load is not None)
    found = first_difference(ranks)
    steps, saves = len(reference[0].steps), len(reference[0].saves)
    if found is None or failure:
        return Report(steps, saves, resumed, failure=failure)
    return Report(steps, saves, resumed, found, cause(found, ranks[found.rank]), named=found.named)


def _wrapped(label: str, text: str) -> list[str]:
    indent = " " * (len(label) + 2)
    return fill(text, _WIDTH, initial_indent=f"  {label}", subsequent_indent=indent).splitlines()
