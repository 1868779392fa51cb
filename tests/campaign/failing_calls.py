"""Every system call of a save and of a resume fails once, in every way that it can."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.errors import CkptError
from tests.campaign import kills
from tests.campaign.calls import Call, Shim, parse
from tests.campaign.children import Child, Voice
from tests.campaign.training import Training
from tests.campaign.trials import AMENDED, SAME, Steps, Trial, options, save_steps
from tests.campaign.verdicts import BROKEN, LOST, STUCK, WRONG, Failure, Found


@dataclass(frozen=True)
class Scenario:
    """A save or a resume of which each call is made to fail. `steps` saves are in the root beforehand."""

    name: str
    resumes: bool = False
    naming: str = "keep"
    steps: int = 2
    large: bool = False
    wait: bool = True
    leftovers: bool = False


SAVES = (
    Scenario("first save", steps=0),
    Scenario("next save, an old one goes"),
    Scenario("save over the same name", naming="same name"),
    Scenario("end of an epoch, its last step is amended", naming=AMENDED),
    Scenario("background save", wait=False),
    Scenario("save of several blocks", large=True),
)
RESUMES = (
    Scenario("resume", resumes=True),
    Scenario("resume after a cut-off save", resumes=True, leftovers=True),
    Scenario("resume after a cut-off replacement", resumes=True, naming="same name", leftovers=True),
    Scenario("resume after a cut-off amendment", resumes=True, naming=AMENDED, leftovers=True),
    Scenario("resume of several blocks", resumes=True, large=True),
)


@dataclass(frozen=True)
class Strike:
    """A trial to be made: this call of that scenario fails in this way."""

    scenario: Scenario
    call: Call
    fault: str


Run = Callable[..., Child]


def prepare(scenario: Scenario, folder: Path, run: Run) -> list[Call]:
    """Make the root that a scenario begins with, and list its calls by a dry run."""
    root = folder / template(scenario)
    root.mkdir(parents=True)
    if scenario.steps:
        _ended(run(save_steps, str(root), scenario.naming, scenario.steps, large=scenario.large))
    if scenario.leftovers:  # killed when the files are written, and the manifest is not
        _cut_off(scenario, root, folder, run)
    return _listed(scenario, root, folder / "dry-run", run)


def _cut_off(scenario: Scenario, root: Path, folder: Path, run: Run) -> None:
    calls = _listed(Scenario("save", naming=scenario.naming), root, folder / "dry-run", run)
    last = max(call.number for call in calls if call.name == "rename")
    run(kills.killed_at, str(root), scenario.naming, last).wait("the save that is cut off")


def _listed(scenario: Scenario, root: Path, scratch: Path, run: Run) -> list[Call]:
    shutil.copytree(root, scratch / "root")
    try:
        _ended(run(_dry_run, str(scratch), scenario))
        return parse((scratch / "calls").read_text())
    finally:
        shutil.rmtree(scratch)


def _ended(child: Child) -> Any:
    ended = child.wait("a preparation")
    if ended.failure is not None or ended.status:
        raise Found(BROKEN, f"a preparation ended with {ended.status}: {ended.failure}")
    return ended.value


def template(scenario: Scenario) -> str:
    return f"template-{scenario.name.replace(' ', '-').replace(',', '')}"


def strikes(calls: dict[Scenario, list[Call]], seed: int) -> list[Strike]:
    """Every fault of every call, in an order in which each call comes once before any comes twice."""
    order = random.Random(f"{seed}/strikes")
    rounds: dict[int, list[Strike]] = {}
    for scenario, found in calls.items():
        for call in found:
            faults = call.faults()
            order.shuffle(faults)
            for number, fault in enumerate(faults):
                rounds.setdefault(number, []).append(Strike(scenario, call, fault))
    for each in rounds.values():
        order.shuffle(each)
    return [strike for number in sorted(rounds) for strike in rounds[number]]


def strike(trial: Trial, planned: Strike) -> None:
    scenario, call = planned.scenario, planned.call
    trial.scenario = f"{scenario.name}: {planned.fault} at call {call.number}, {call.name} {call.path}"
    shutil.copytree(trial.shared / template(scenario), trial.root)
    (_strike_resume if scenario.resumes else _strike_save)(trial, planned)


def _strike_save(trial: Trial, planned: Strike) -> None:
    """The save fails with a clear error or succeeds; then the same process saves again, and what was durable stays."""
    scenario = planned.scenario
    child = trial.start(_save, str(trial.root), scenario, planned.call.number, planned.fault)
    told = child.hear("tried ")
    before = _durable(child)
    if told is not None:
        crash = trial.random.random() < 0.4
        if crash:
            child.kill()
        else:
            _observe(trial, before, scenario)
            child.say("go on")
    ended = child.wait("the process of the failed save")
    if ended.failure is not None:
        _raised(ended.failure, "the save", "saving again" in ended.told)
    trial.check(_durable(child), naming=scenario.naming, large=scenario.large)


def _durable(child: Child) -> int:
    return max((int(line.split()[1]) for line in child.told if line.startswith("durable ")), default=0)


def _raised(failure: Failure, what: str, again: bool) -> None:
    failure.check("a save after the fault was over" if again else what)
    raise Found(STUCK, f"the fault is over, and {'a save of the same name' if again else 'the run'} fails: {failure}")


def _observe(trial: Trial, durable: int, scenario: Scenario) -> None:
    """Another process looks, while the run that has met the fault is still there."""
    ended = trial.run("a load beside", _load, str(trial.root), scenario.large)
    if ended.failure is not None:
        ended.failure.check("a load after the failed save")
        if durable:
            raise Found(LOST, f"step {durable} was durable, and nothing loads: {ended.failure}")
        return
    if ended.value["wrong"]:
        raise Found(WRONG, f"after the failed save: {'; '.join(ended.value['wrong'])}")
    if ended.value["step"] < durable:
        raise Found(LOST, f"step {durable} was durable, step {ended.value['step']} is loaded after the failed save")


def _load(voice: Voice, root: str, large: bool) -> dict[str, Any]:
    training = Training(large=large)
    with training.manager(root) as manager:
        restored = manager.load_state()
        return {"step": restored.step, "wrong": training.disagreements(restored)}


def _save(voice: Voice, root: str, scenario: Scenario, number: int, fault: str) -> None:
    shim = Shim()
    shim.watch(root)
    training = Training(large=scenario.large)
    with training.manager(root, **options(scenario.naming, wait=scenario.wait)) as manager:
        restored = manager.resume()
        voice.tell(f"durable {restored.step if restored else 0}")
        steps = Steps(training, manager, scenario.naming)
        step = steps.train()
        shim.arm(number, fault)
        try:
            name = steps.save()
            manager.wait()
        except CkptError as error:
            shim.disarm()
            Failure.of(error).check("the save")
            name = None
        shim.disarm()
        if name is not None:
            voice.tell(f"durable {step}")
        voice.tell(f"tried {name}")
        voice.heed()
        voice.tell("saving again")
        # under the name of the save that failed
        manager.save_state(SAME if scenario.naming == "same name" else None, wait=True)
        voice.tell(f"durable {step}")


def _strike_resume(trial: Trial, planned: Strike) -> None:
    """The resume fails with a clear error, or gives the newest state; then the same process tries again, and saves."""
    scenario = planned.scenario
    durable = scenario.steps
    ended = trial.run(
        "the process of the failed resume", _resume, str(trial.root), scenario, planned.call.number, planned.fault
    )
    for value in [line.split(" ", 1)[1] for line in ended.told if line.startswith("resumed ")]:
        step, _, wrong = value.partition(" ")
        if wrong:
            raise Found(WRONG, f"resumed step {step}, but {wrong}")
        if int(step) < durable:
            raise Found(LOST, f"step {durable} was durable, resumed was step {step}")
    if ended.failure is not None:
        _raised(ended.failure, "the resume", "saving again" in ended.told)
    trial.check(ended.durable() or durable, naming=scenario.naming, large=scenario.large)


def _resume(voice: Voice, root: str, scenario: Scenario, number: int, fault: str) -> None:
    shim = Shim()
    shim.watch(root)
    shim.arm(number, fault)
    try:
        _resumed(voice, root, scenario, Training(large=scenario.large))
    except CkptError as error:
        Failure.of(error).check("the resume")
    shim.disarm()
    training = Training(large=scenario.large)
    with training.manager(root, **options(scenario.naming, wait=True)) as manager:
        restored = manager.resume()
        steps = Steps(training, manager, scenario.naming)
        step = steps.train()
        voice.tell(f"resumed {restored.step if restored else 0}")
        voice.tell("saving again")
        steps.save()
        voice.tell(f"durable {step}")


def _resumed(voice: Voice, root: str, scenario: Scenario, training: Training) -> None:
    with training.manager(root, **options(scenario.naming, wait=True)) as manager:
        restored = manager.resume()
        wrong = training.disagreements(restored) if restored else []
        voice.tell(f"resumed {restored.step if restored else 0} {'; '.join(wrong)}".strip())


def _dry_run(voice: Voice, scratch: str, scenario: Scenario) -> None:
    shim = Shim()
    listing = os.open(f"{scratch}/calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    root = f"{scratch}/root"
    shim.watch(root)
    training = Training(large=scenario.large)
    if scenario.resumes:
        shim.list_to(listing)
        shim.arm(0, "")
        _resumed(voice, root, scenario, training)
        return
    with training.manager(root, **options(scenario.naming, wait=scenario.wait)) as manager:
        manager.resume()
        steps = Steps(training, manager, scenario.naming)
        steps.train()
        shim.list_to(listing)
        shim.arm(0, "")
        steps.save()
        manager.wait()
        shim.disarm()
