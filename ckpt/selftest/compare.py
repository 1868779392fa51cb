"""Find the first difference between a killed and resumed run and a straight one, its likely cause and remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt.selftest.trace import Resumed, Saved, Step, Trace, in_order
from ckpt.shown import few

_NAMED = 4  # parameters in a difference


@dataclass(frozen=True)
class Difference:
    """The first value that differs on one rank.

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
            detail = f"{few(names, _NAMED)}: not as they were when {saved.name} was saved"
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
            yield self._difference("end", process, last.number, f"{few(names, _NAMED)} differ at the end", names)
        elif names := tuple(name for name in expected.changed if expected.others[name] != last.others.get(name)):
            detail = f"{few(names, _NAMED)}, which no manager has, differ at the end"
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
        return "gradients", f"gradients of {few(names, _NAMED)}", names
    if straight.rates != step.rates:
        return "rates", f"learning rates {step.rates}, {straight.rates} straight", ()
    if names := _unequal(straight.parameters, step.parameters):
        return "parameters", few(names, _NAMED), names
    if names := _unequal(straight.buffers, step.buffers):
        return "buffers", few(names, _NAMED), names
    return None


def _unequal(first: Mapping[str, str], second: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in {**first, **second} if first.get(name) != second.get(name))


def _shown(losses: Sequence[str]) -> str:
    return ", ".join(losses[:3]) or "none"


_AFTER_STEP = (
    "Code after manager.step() changes {what}, and a save inside step() comes too early for it. Call manager.step() "
    "last in the iteration, after scheduler.step(), averages of weights and evaluation."
)
_FORGOTTEN = (
    "{what} is not managed, so it starts over after a resume. Give it to the manager: scheduler=..., scaler=..., "
    "model={{'model': model, 'average': average}}, or manager.register(name=...)."
)
_CYCLE = (
    "The straight run repeats batches of an earlier pass without asking the loader, as itertools.cycle(loader) does. "
    "It hands out the first pass from memory, which a resume cannot. Write `while True:` around `for batch in loader:`."
)
_AHEAD = (
    "It belongs to step {there} of the straight run: {count} batches were fetched ahead of the step that uses them, "
    "and a resume loses them. Fetch the next batch after manager.step(), or give the loader to manager.batches(loader)."
)
_UNANNOUNCED = (
    "ckpt doesn't know where this loop's data comes from, so a resume starts it over. Pass the loader: "
    "StateManager(dataloader=loader), or iterate over manager.batches(loader). If you draw batches from a generator, "
    "register it: manager.register(generator=g)."
)
_AGAIN = (
    "It belongs to step {there} of the straight run: data that was consumed before the save is read again. The "
    "loop does not iterate over manager.batches(loader) and manager.epochs(n), resume() is called after the loader "
    "started, or data is drawn from a generator that is not in the checkpoint: manager.register(generator=g)."
)
_LEFT_OUT = (
    "It belongs to step {there} of the straight run: {count} batches were left out. Either the script skips by "
    "hand what was consumed, although the loader starts there already (`if step < resume_step: continue`, "
    "skip_first_batches), or something reads ahead around manager.batches: put the prefetcher inside, "
    "manager.batches(Prefetcher(loader))."
)
_UNUSED = (
    "{count} more batches than in the straight run were handed out for this step, and not used. The script skips by "
    "hand what was consumed, although the loader starts there already (`if step < resume_step: continue`: take that "
    "out, or turn following off), or something reads ahead around manager.batches: put the prefetcher inside, "
    "manager.batches(Prefetcher(loader))."
)
_GROUPED = (
    "The same batches in the same order, but with another number of them to an optimizer step: a count that starts "
    "at 0 again (`enumerate(manager.batches(loader))`: write manager.enumerate(loader)), or an accumulation window "
    "that starts afresh."
)
_NEW = (
    "The straight run never had it. The order is drawn afresh (a sampler or stream that is shuffled by the operating "
    "system's entropy, or by a generator that is not in the checkpoint: manager.register(generator=g)), or data "
    "is generated at random when the program starts: seed it."
)
_STEPPED = (
    "The same data, but another optimizer stepped first: a count that decides whose turn it is starts at 0 again "
    "(`enumerate(manager.batches(loader))`: write manager.enumerate(loader)), or is not in the checkpoint."
)
_MADE = (
    "The batches are the same, but the inputs of the model are not: something between them and the model is not in "
    "the checkpoint. A generator that noise is drawn from (manager.register(noise=g)), or another model "
    "(model={...})."
)
_LOSSES = (
    "The batches and the restored state are the same, so the loss depends on something else: a generator that is "
    "not in the checkpoint (register it), or a part that the loss uses and that is not managed (a second model, an "
    "average of weights, a counter, a temperature: manager.register(name=...))."
)
_GRADIENTS = (
    "Batches and losses are the same, the sum of gradients is not: the save fell into an accumulation window, and "
    "its gradients were not kept. Give the manager saving=ckpt.SaveOptions(gradients=True), or save when the window "
    "is complete."
)
_RATES = "The learning rate is not restored: give the manager the scheduler (scheduler=...), or its counter."
_MANAGED = (
    "Gradients and rates are the same, so the optimizer's state is not: it was changed after the save began, or "
    "holds something that its state_dict leaves out."
)
_UNMANAGED = "The optimizer is not managed, so its moments started afresh: give it to the manager (optimizer=...)."
_BUFFERS = (
    "Buffers depend on how often the model was called: another number of batches, an evaluation in train mode, or "
    "ranks whose buffers differ."
)
_STATE = (
    "The checkpoint did not restore these on this rank. They differ between ranks and were saved of one rank for "
    "all, the script changes them between the save and the load, or they belong to a part that is not saved."
)
_EXTRA = (
    "An epoch, or part of one, was trained twice: the loop counts epochs or steps itself (`range(3)`), from 0 "
    "again. Use manager.epochs(n), or start at manager.progress.epoch."
)
_MISSING = "The resumed run skipped steps: it counts by itself what the manager counts too, or left batches out."
_FRESH = "No checkpoint was loaded. Iterate over manager.epochs()/batches(), or call manager.resume() before the loop."
_NONDETERMINISTIC = (
    "Two runs without any kill differ already, so resuming cannot be judged. Seed what is random (torch, "
    "NumPy, random), avoid the operating system's entropy, and use torch.use_deterministic_algorithms(True)."
)


def cause(difference: Difference, rank: Rank) -> str:
    """One or two sentences: the likely cause of a difference, and what to write instead.

    What was forgotten, or done after the save, is known from the traces. Only then the kind of difference decides.
    """
    if difference.what in _LATER:
        if objects := _forgotten_objects(difference, rank):
            return _FORGOTTEN.format(what=" and ".join(objects))
        if lost := _done_after_save(difference, rank):
            return _AFTER_STEP.format(what=" and ".join(lost))
        if models := _forgotten_models(difference, rank):
            return _FORGOTTEN.format(what=" and ".join(models))
    return _CAUSES[difference.what](difference, rank)


def _forgotten_objects(difference: Difference, rank: Rank) -> list[str]:
    """Schedulers that no manager has, where learning rates differ; scalers, where what they scale does."""
    forgotten = dict.fromkeys(name for saved in rank.straight.saves for name in saved.forgotten)
    scalers = [name for name in forgotten if "Scaler" in name]
    if difference.what == "rates":
        return [name for name in forgotten if name not in scalers]
    return scalers if difference.what in ("losses", "gradients", "parameters") else []


def _forgotten_models(difference: Difference, rank: Rank) -> list[str]:
    """Models that no manager has, and that change, where the data or the loss may come from one."""
    made_by_models = difference.what in ("forgotten", "losses")
    return rank.straight.end.changed if made_by_models and rank.straight.end is not None else []


def _done_after_save(difference: Difference, rank: Rank) -> list[str]:
    """What changed from the save to the first input of the next step in the straight run, not in the resumed one."""
    saved = rank.saved(difference.process)
    if saved is None or saved.inputs:  # in the middle of a step, which had started before the save
        return []
    expected = rank.expected.get(saved.number + 1)
    step = next((step for step in rank.killed[difference.process].steps if step.number == saved.number + 1), None)
    if expected is None or step is None or not (expected.start and step.start):
        return []
    start = saved.start
    lost = [what for what in start if step.start.get(what) == start[what] != expected.start.get(what)]
    if difference.what == "rates":  # a schedule in stairs: the step that was lost shows later
        return ["learning rates"] if "learning rates" in lost or saved.schedulers else []
    return lost


def _data(difference: Difference, rank: Rank) -> str:
    """The cause of different inputs: the straight run's batches are searched for the first that is not expected."""
    expected, step = rank.expected[difference.step], _step(difference, rank)
    followed = any(straight.batches for straight in rank.straight.steps)
    if followed and not expected.batches and _is_repeated(expected, rank):
        return _CYCLE
    if followed and step.batches == expected.batches:
        return _MADE
    if len(step.batches) > max(len(step.inputs), len(expected.batches)):
        return _UNUSED.format(count=len(step.batches) - len(expected.batches))
    return _order(difference, rank, "batches" if followed else "inputs")


def _order(difference: Difference, rank: Rank, what: str) -> str:
    """Where in the straight run the first unexpected batch, or input, of the resumed one is."""
    straight = list(in_order(rank.straight.steps, what))
    digests = [digest for _, digest in straight]
    resumed_at = difference.resumed.number if difference.resumed else 0
    steps = [step for step in rank.killed[difference.process].steps if step.number > resumed_at]
    found = [digest for _, digest in in_order(steps, what)]
    begin = sum(len(getattr(step, what)) for step in rank.straight.steps if step.number <= resumed_at)
    same = _common_prefix(digests[begin:], found)
    if same == min(len(found), len(digests) - begin):
        return _GROUPED
    unexpected, wanted = found[same], begin + same
    later = next((index for index in range(wanted, len(digests)) if digests[index] == unexpected), None)
    followed = what == "batches"
    if not followed and unexpected == digests[0]:
        return _UNANNOUNCED
    if later is not None:
        text = _LEFT_OUT if followed else _AHEAD
        return text.format(there=straight[later][0], count=later - wanted)
    earlier = next((index for index in range(wanted) if digests[index] == unexpected), None)
    if not followed and rank.straight.end is not None and rank.straight.end.loaders:
        return _UNANNOUNCED
    return _NEW if earlier is None else _AGAIN.format(there=straight[earlier][0])


def _is_repeated(step: Step, rank: Rank) -> bool:
    """Whether all inputs of a step of the straight run were those of steps before it."""
    before = {digest for each in rank.straight.steps if each.number < step.number for digest in each.inputs}
    return bool(step.inputs) and before.issuperset(step.inputs)


def _common_prefix(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (left, right) in enumerate(pairs) if left != right), min(len(first), len(second)))


def _step(difference: Difference, rank: Rank) -> Step:
    """The step of the killed run that differs."""
    return next(step for step in rank.killed[difference.process].steps if step.number == difference.step)


def _parameters(difference: Difference, rank: Rank) -> str:
    return _MANAGED if _step(difference, rank).managed else _UNMANAGED


def _fixed(text: str) -> Callable[[Difference, Rank], str]:
    return lambda difference, rank: text


_CAUSES: dict[str, Callable[[Difference, Rank], str]] = {
    "nondeterministic": _fixed(_NONDETERMINISTIC),
    "fresh start": _fixed(_FRESH),
    "state": _fixed(_STATE),
    "order": _fixed(_STEPPED),
    "inputs": _data,
    "losses": _fixed(_LOSSES),
    "gradients": _fixed(_GRADIENTS),
    "rates": _fixed(_RATES),
    "parameters": _parameters,
    "buffers": _fixed(_BUFFERS),
    "extra steps": _fixed(_EXTRA),
    "missing steps": _fixed(_MISSING),
    "end": _fixed(_STATE),
    "forgotten": _fixed(_STATE),
}
_LATER = ("inputs", "losses", "gradients", "rates", "parameters", "buffers", "end", "forgotten")  # of a resumed run
