"""SIGKILL at random moments of a run that saves, and at every system call of a save."""

from __future__ import annotations

import shutil
import time

from tests.campaign.calls import Call, Shim
from tests.campaign.children import Voice
from tests.campaign.jobs import Job
from tests.campaign.training import Training
from tests.campaign.trials import NAMINGS, Steps, Trial, options, save_every_step
from tests.campaign.verdicts import STUCK, Ended, Found

_MOST = 400  # saves: far more than there is time for


def saving(voice: Voice, rank: int, root: str, spread: str, naming: str, wait: bool, most: int = _MOST) -> None:
    """Resume, and save every step."""
    training = Training(spread, rank=rank)
    with training.manager(root, **options(naming, wait=wait)) as manager:
        restored = manager.resume()
        if restored is not None:
            wrong = training.disagreements(restored)
            assert not wrong, wrong
        voice.tell("ready")
        step = save_every_step(voice, training, manager, naming, wait, most)
        manager.wait()
        voice.tell(f"durable {step}")


def at_random(spread: str, trial: Trial) -> None:
    """Kill a run, and a second one that has resumed from what the first left."""
    wait, naming = (trial.index % 2 == 0), NAMINGS[trial.index // 2 % 3]
    trial.scenario = f"{spread}, {'wait' if wait else 'background'}, {naming}"
    durable = 0
    for _ in range(2):
        arguments = (str(trial.root), spread, naming, wait)
        durable = max(durable, _kill_one(trial, arguments) if spread == "one" else _kill_job(trial, arguments))
    trial.check(durable, naming=naming)


def _kill_one(trial: Trial, arguments: tuple[str, str, str, bool]) -> int:
    child = trial.start(saving, 0, *arguments)
    child.hear("ready")
    time.sleep(trial.random.random() * 0.15)
    return _killed(child.kill())


def _kill_job(trial: Trial, arguments: tuple[str, str, str, bool]) -> int:
    job = Job(trial, saving, *arguments)
    job.ready()
    time.sleep(trial.random.random() * 0.4)
    return max(_killed(ended) for ended in job.kill())


def _killed(ended: Ended) -> int:
    """What a run had made durable. One that had failed by itself, after an earlier kill, is a finding."""
    if ended.failure is not None:
        ended.failure.check("a run after a kill")
        raise Found(STUCK, f"a run after a kill could not go on: {ended.failure}")
    return ended.durable()


def at_call(trial: Trial, naming: str, call: Call, template: str) -> None:
    """SIGKILL instead of one system call of a save."""
    trial.scenario = f"{naming}: SIGKILL at call {call.number}, {call.name} {call.path}"
    shutil.copytree(trial.shared / template, trial.root)
    before = trial.run("the save", killed_at, str(trial.root), naming, call.number).durable()
    trial.check(before, naming=naming)


def killed_at(voice: Voice, root: str, naming: str, number: int) -> None:
    shim = Shim()
    shim.watch(root)
    training = Training()
    with training.manager(root, **options(naming, wait=True)) as manager:
        restored = manager.resume()
        voice.tell(f"durable {restored.step if restored else 0}")
        steps = Steps(training, manager, naming)
        step = steps.train()
        shim.arm(number, "SIGKILL")
        steps.save()
        shim.disarm()
        voice.tell(f"durable {step}")
