"""Find the first difference between a killed and resumed run and a straight one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt.selftest.trace import Resumed, Saved, Step, Trace


@dataclass(frozen=True)
class Difference:
    """The first value that differs, on a rank.

    `what` is one of: nondeterministic, fresh start, state, order (of optimizers), inputs, losses, gradients,
    rates, parameters, buffers, extra steps, missing steps, end, forgotten (models). `process` counts from 0; later ones
    have resumed.
    """

    what: str
    rank: int
    process: int
    step: int
    detail: str
    resumed: Resumed | None = None
    names: tuple[str, ...] = ()
    named: tuple[str, ...] = ()  # what ckpt itself has warned of


@dataclass(frozen=True)
class Rank:
    """One rank's traces: of the straight run, and of each process of the killed one."""

    rank: int
    straight: Trace
    killed: Sequence[Trace]
    expected: Mapping[int, Step] = field(default_factory=dict)

    @classmethod
    def of(cls, rank: int, straight: Trace, killed: Sequence[Trace]) -> Rank:
        return cls(rank, straight, killed, {step.number: step for step in straight.steps})

    def differences(self) -> Iterator[Difference]:
        """The differences in the order in which they arose."""
        for process, trace in enumerate(self.killed):
            if process and trace.resumed is None:
                yield self._difference("fresh start", process, 0, "it loaded no checkpoint and started afresh")
            elif process and (saved := self.saved(process)) is not None:
                yield from self._state(process, saved)
            yield from self._steps(process)
        yield from self._end()

    def saved(self, process: int) -> Saved | None:
        """The save that a process has resumed from."""
        resumed = self.killed[process].resumed
        if resumed is None:
            return None
        saves = [save for trace in self.killed[: process + 1] for save in trace.saves]
        wanted = (resumed.name, resumed.number)
        return next((save for save in reversed(saves) if (save.name, save.number) == wanted), None)

    def _state(self, process: int, saved: Saved) -> Iterator[Difference]:
        resumed = self.killed[process].resumed
        assert resumed is not None
        names = _unequal(saved.tensors, resumed.tensors)
        if names:
            detail = f"{_listed(names)}: not as they were when {saved.name} was saved"
            yield self._difference("state", process, saved.number, detail, names)

    def _steps(self, process: int) -> Iterator[Difference]:
        for step in self.killed[process].steps:
            straight = self.expected.get(step.number)
            if straight is None:
                yield self._difference("extra steps", process, step.number, "the straight run has no such step")
                return
            found = _compare(straight, step)
            if found is not None:
                what, detail, names = found
                yield self._difference(what if process else "nondeterministic", process, step.number, detail, names)
                return

    def _end(self) -> Iterator[Difference]:
        last, expected = self.killed[-1].end, self.straight.end
        if last is None or expected is None:
            return
        process = len(self.killed) - 1
        if last.number < expected.number:
            detail = f"it ended after step {last.number}; the straight run made {expected.number}"
            yield self._difference("missing steps", process, last.number + 1, detail)
        elif names := _unequal(expected.tensors, last.tensors):
            yield self._difference("end", process, last.number, f"{_listed(names)} differ at the end", names)
        elif names := tuple(name for name in expected.changed if expected.others[name] != last.others.get(name)):
            detail = f"{_listed(names)}, which no manager has, differ at the end"
            yield self._difference("forgotten", process, last.number, detail, names)

    def _difference(self, what: str, process: int, step: int, detail: str, names: tuple[str, ...] = ()) -> Difference:
        trace = self.killed[process]
        said = trace.steps[-1].named if trace.steps else trace.resumed.named if trace.resumed else []
        return Difference(what, self.rank, process, step, detail, trace.resumed, names, tuple(dict.fromkeys(said)))


def first_difference(ranks: Sequence[Rank]) -> Difference | None:
    """The earliest difference on any rank: later ones follow from it."""
    found = [difference for rank in ranks if (difference := next(rank.differences(), None)) is not None]
    return min(found, key=lambda difference: (difference.process, difference.step, difference.rank), default=None)


def _compare(straight: Step, step: Step) -> tuple[str, str, tuple[str, ...]] | None:
    """Compare the values of a step in the order in which it computes them: the first that differs causes the rest.

    Which batches the loop received is evidence, not a difference: a script may skip some of them.
    """
    if straight.optimizer != step.optimizer:
        return "order", f"{step.optimizer} was stepped where the straight run steps {straight.optimizer}", ()
    if straight.inputs != step.inputs:
        return "inputs", f"the model was given other inputs ({len(step.inputs)}, {len(straight.inputs)} straight)", ()
    if straight.losses != step.losses:
        return "losses", f"loss {_shown(step.losses)}, {_shown(straight.losses)} straight", ()
    if names := _unequal(straight.gradients, step.gradients):
        return "gradients", f"gradients of {_listed(names)}", names
    if straight.rates != step.rates:
        return "rates", f"learning rates {step.rates}, {straight.rates} straight", ()
    if names := _unequal(straight.parameters, step.parameters):
        return "parameters", _listed(names), names
    if names := _unequal(straight.buffers, step.buffers):
        return "buffers", _listed(names), names
    return None


def _unequal(first: Mapping[str, str], second: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in {**first, **second} if first.get(name) != second.get(name))


def _listed(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _shown(losses: Sequence[str]) -> str:
    return ", ".join(losses[:3]) or "none"
