"""Check whether a training program resumes exactly: a straight run, a killed and resumed one, and the comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import fill

from ckpt.errors import ConfigError
from ckpt.selftest.causes import cause
from ckpt.selftest.compare import Difference, Rank, first_difference
from ckpt.selftest.runs import Program, ProgramError, Run, kill_steps, scratch

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
