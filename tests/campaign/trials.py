"""What every kind of fault works with: a scratch folder, a random generator, and the check that follows a fault."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt import Every, Keep, RankOptions, SaveOptions, StateManager, list_checkpoints, verify
from ckpt.errors import CkptError
from ckpt.formats.checkpoint_name import name_of_step
from tests.campaign.children import DEADLINE, Child, Voice
from tests.campaign.training import Training
from tests.campaign.verdicts import FRESH, LOST, STUCK, WRONG, Ended, Found

SAME = "latest"
AMENDED = "end of an epoch"  # it amends the checkpoint of the epoch's last step
_EPOCHS = 1_000_000
NAMINGS = ("keep", "same name", AMENDED)


@dataclass
class Trial:
    """One trial: reproducible from its seed, kind and index. `shared` is the folder of the whole campaign."""

    kind: str
    index: int
    seed: int
    folder: Path
    shared: Path
    scenario: str = ""
    children: list[Child] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.seed}/{self.kind}/{self.index}")

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def start(self, function: Callable[..., Any], *args: Any) -> Child:
        child = Child(self.folder / f"log-{next(self._numbers)}", function, *args)
        self.children.append(child)
        return child

    def run(self, what: str, function: Callable[..., Any], *args: Any, seconds: float = DEADLINE) -> Ended:
        return self.start(function, *args).wait(what, seconds)

    def end(self) -> None:
        for child in self.children:
            child.kill()

    def check(
        self,
        durable: int,
        *,
        root: Path | None = None,
        naming: str = "keep",
        untouched: bool = True,
        large: bool = False,
    ) -> int:
        """A fresh process resumes: what was durable is there and agrees with itself, and it can save again.

        Where nobody else has touched the files (`untouched`), all that is committed must be intact, and no two
        checkpoints may have one sequence number. Returns the step that was resumed.
        """
        where = str(root or self.root)
        ended = self.run("a resume after the fault", _resume, where, naming, untouched, large)
        if ended.failure is not None and "saving" in ended.told:
            ended.failure.check("a save after the fault")
            raise Found(STUCK, f"after the fault a run resumed, and could not save: {ended.failure}")
        if ended.failure is not None:
            ended.failure.check("the resume after the fault")
            raise Found(LOST, f"step {durable} was durable, and nothing loads: {ended.failure}")
        if ended.status != 0 or ended.value is None:
            raise Found(LOST, f"the resume after the fault ended with {ended.status}\n{self.log()}")
        found = ended.value
        if found["wrong"]:
            raise Found(WRONG, f"resumed step {found['step']}, but {'; '.join(found['wrong'])}")
        if durable and not found["step"]:
            raise Found(FRESH, f"step {durable} was durable, and the run began anew")
        if found["step"] < durable:
            why = "; ".join(found["passed_over"].values())
            raise Found(LOST, f"step {durable} was durable, resumed was step {found['step']}. {why}")
        return int(found["step"])

    def log(self) -> str:
        return self.children[-1].log.read_text(errors="replace")[-2000:]


def options(naming: str, *, wait: bool, last: int = 2) -> dict[str, Any]:
    keep = Keep(last=last) if naming != "same name" else None
    more: dict[str, Any] = {"save_every": Every(epoch_end=True)} if naming == AMENDED else {}
    return {"keep": keep, "saving": SaveOptions(background=not wait), "ranks": RankOptions(timeout=30.0), **more}


class Steps:
    """The steps of a run, each saved in one way: under its own name, always under the same one, or, when its epoch has
    ended, once more, so that its checkpoint is amended."""

    def __init__(self, training: Training, manager: StateManager, naming: str) -> None:
        self._training, self._manager, self._naming = training, manager, naming
        self._epochs: Iterator[int] | None = None
        if naming == AMENDED:
            self._epochs = manager.epochs(_EPOCHS)
            next(self._epochs)

    def train(self) -> int:
        """Everything of a step but the save of `save`. Returns the step."""
        step = self._training.advance()
        self._manager.step()
        if self._naming == AMENDED:
            self._manager.save_state()
            self._training.end_epoch()
        return step

    def save(self) -> str | None:
        """Save the step. Returns what its checkpoint is called."""
        if self._epochs is None:
            return self._manager.save_state(SAME if self._naming == "same name" else None)
        try:
            next(self._epochs)
        except CkptError:  # a generator that has raised is at its end
            self._epochs = self._manager.epochs(_EPOCHS)
            next(self._epochs)
            raise
        return name_of_step(self._training.counter.count)


def save_every_step(voice: Voice, training: Training, manager: StateManager, naming: str, wait: bool, most: int) -> int:
    """Train and save every step. Reports a step when it is durable: with `wait` at once, else by the next save.

    Returns the last step.
    """
    step, steps = 0, Steps(training, manager, naming)
    for _ in range(most):
        step = steps.train()
        steps.save()
        voice.tell(f"durable {step if wait else step - 1}")
    return step


def save_steps(voice: Voice, root: str, naming: str, count: int, *, large: bool = False, wait: bool = True) -> None:
    """Resume, make some steps with a save each, and report what is durable."""
    training = Training(large=large)
    with training.manager(root, **options(naming, wait=wait)) as manager:
        manager.resume()
        steps = Steps(training, manager, naming)
        for _ in range(count):
            step = steps.train()
            steps.save()
            if wait:
                voice.tell(f"durable {step}")
        manager.wait()
        voice.tell(f"durable {step}")


def _resume(voice: Voice, root: str, naming: str, untouched: bool, large: bool) -> dict[str, Any]:
    training = Training(large=large)
    damaged = _damaged(root) if untouched else []
    with training.manager(root, **options(naming, wait=True)) as manager:
        restored = manager.resume()
        found: dict[str, Any] = {"step": 0, "wrong": [], "passed_over": {}}
        if restored is not None:
            wrong = training.disagreements(restored, generators=not restored.approximated)
            found = {"step": restored.step, "wrong": wrong + damaged, "passed_over": dict(restored.passed_over)}
        if not found["wrong"]:
            voice.tell("saving")
            steps = Steps(training, manager, naming)
            steps.train()
            steps.save()
            found["wrong"] += _afterwards(root, manager.progress.step, untouched=untouched, large=large)
    return found


def _damaged(root: str) -> list[str]:
    """Checkpoints that are committed, and yet not intact."""
    committed = [one.name for one in list_checkpoints(root) if one.committed]
    wrong = verify(root) if committed else {}
    return [f"{name} is committed, and {'; '.join(wrong[name])}" for name in committed if wrong[name]]


def _afterwards(root: str, step: int, *, untouched: bool, large: bool) -> list[str]:
    """What is wrong with the checkpoints of a root after a save of this step."""
    there = [one.manifest for one in list_checkpoints(root) if one.manifest is not None]
    wrong = [] if there and there[0].step == step else [f"the save of step {step} after it is not the newest"]
    numbers = [one.sequence for one in there]
    if untouched and len(set(numbers)) < len(numbers):
        wrong.append(f"two checkpoints have one sequence number: {numbers}")
    again = Training(large=large)
    with again.manager(root, ranks=RankOptions(handle_sigterm=False)) as manager:
        restored = manager.load_state()
        if restored.step != step:
            wrong.append(f"after a save of step {step} a load gives step {restored.step}")
        wrong += again.disagreements(restored)
    return wrong
