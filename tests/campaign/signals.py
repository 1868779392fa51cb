"""SIGTERM, SIGINT and fork at random moments of a run that saves."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from ckpt import list_checkpoints
from ckpt.errors import CkptError
from tests.campaign.children import Voice
from tests.campaign.jobs import Job
from tests.campaign.training import SPREADS, Training
from tests.campaign.trials import NAMINGS, Steps, Trial, options, save_every_step
from tests.campaign.verdicts import HANG, LOST, STUCK, UNCLEAR, WRONG, Ended, Failure, Found

_TERMINATED = 128 + signal.SIGTERM
_FORKS = ("leaves the context", "saves", "exits", "trains on")


def terminated(trial: Trial) -> None:
    """SIGTERM: all ranks save the step they are at, the same one, and exit with 143."""
    choice = trial.random
    spread, wait = SPREADS[trial.index % 3], choice.random() < 0.5
    everybody = choice.random() < 0.5
    trial.scenario = f"{spread}, {'wait' if wait else 'background'}: SIGTERM to {'all' if everybody else 'one'}"
    arguments = (str(trial.root), spread, wait, choice.choice((1, 3, 1000)))
    ranks = [trial.start(_training, 0, *arguments)] if spread == "one" else Job(trial, _training, *arguments).ranks
    for rank in ranks:
        rank.hear("step 2")
    time.sleep(choice.random() * 0.2)
    for rank in ranks if everybody else [choice.choice(ranks)]:
        rank.signal(signal.SIGTERM)
    ended = [rank.wait("a rank that was told to terminate") for rank in ranks]
    steps = {_last_step(one) for one in ended}
    for one in ended:
        if one.failure is not None:
            one.failure.check("a run that was told to terminate")
        if one.status != _TERMINATED:
            raise Found(LOST, f"told to terminate, a rank ended with {one.status}: {one.failure}")
    if len(steps) > 1:
        raise Found(WRONG, f"told to terminate, the ranks stopped at steps {sorted(steps)}")
    trial.check(steps.pop())


def _last_step(ended: Ended) -> int:
    return int([line for line in ended.told if line.startswith("step ")][-1].split()[1])


def _training(voice: Voice, rank: int, root: str, spread: str, wait: bool, every: int) -> None:
    training = Training(spread, rank=rank)
    with training.manager(root, **options("keep", wait=wait), save_every=every) as manager:
        manager.resume()
        for _ in range(5000):
            if spread != "one":
                dist.all_reduce(torch.ones(1))  # as a step of training does
            step = training.advance()
            voice.tell(f"step {step}")
            manager.step()
            time.sleep(0.002)


def interrupted(trial: Trial) -> None:
    """SIGINT: the program ends, or catches it and saves again."""
    choice = trial.random
    wait, naming, catches = choice.random() < 0.5, choice.choice(NAMINGS), trial.index % 2 == 1
    trial.scenario = f"{'wait' if wait else 'background'}, {naming}: SIGINT, {'caught' if catches else 'ends it'}"
    if choice.random() < 0.5:
        trial.run("a first run", _saving, str(trial.root), naming, wait, False, 3)
    child = trial.start(_saving, str(trial.root), naming, wait, catches, 300)
    if choice.random() < 0.85:
        child.hear("ready")
    else:
        child.hear("begun")  # hits the resume
    time.sleep(choice.random() * 0.12)
    child.signal(signal.SIGINT)
    ended = child.wait("an interrupted run")
    if ended.failure is not None and ended.failure.type != "KeyboardInterrupt":
        ended.failure.check("an interrupted run")
        raise Found(STUCK, f"an interrupted run could not go on: {ended.failure}")
    trial.check(ended.durable(), naming=naming)


def _saving(voice: Voice, root: str, naming: str, wait: bool, catches: bool, most: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    training = Training()
    voice.tell("begun")
    with training.manager(root, **options(naming, wait=wait)) as manager:
        try:
            manager.resume()
            voice.tell("ready")
            save_every_step(voice, training, manager, naming, wait, most)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            if not catches or not any(one.committed for one in list_checkpoints(root)):
                raise
            # the step in hand may be half done: go back to what is saved, as one would in a notebook
            manager.load_state()
            step = training.advance()
            manager.step()
            manager.save_state("by-hand", wait=True)
            voice.tell(f"durable {step}")


def forked(trial: Trial) -> None:
    """A fork in the middle of a save: the parent goes on, and the child can do what it likes and ends."""
    choice = trial.random
    wait, naming, what = trial.index % 3 == 0, choice.choice(NAMINGS), _FORKS[trial.index % len(_FORKS)]
    trial.scenario = f"{'wait' if wait else 'background'}, {naming}: a forked child {what}"
    ended = trial.run("a run that forks", _forking, str(trial.root), naming, wait, what, choice.random() * 0.02)
    if ended.failure is not None:
        ended.failure.check("a run that forks")
        raise Found(STUCK, f"a run that has forked cannot go on: {ended.failure}")
    for line in ended.told:
        if line.startswith("child "):
            raise Found(HANG if line == "child hangs" else UNCLEAR, f"a forked child that {what}: {line}")
    trial.check(ended.durable(), naming=naming)


def _forking(voice: Voice, root: str, naming: str, wait: bool, what: str, delay: float) -> None:
    training = Training()
    with training.manager(root, **options(naming, wait=wait)) as manager:
        manager.resume()
        steps = Steps(training, manager, naming)
        for number in range(6):
            step = steps.train()
            steps.save()
            if number == 3:
                time.sleep(delay)
                child = os.fork()
                if not child:
                    _in_child(voice, manager, steps, what)
            voice.tell(f"durable {step if wait else step - 1}")
        manager.wait()
        voice.tell(f"durable {step}")
        _reap(voice, child)


def _in_child(voice: Voice, manager: Any, steps: Steps, what: str) -> None:
    """Never returns. Refusing is as good as doing it: the run belongs to the parent."""
    try:
        if what == "leaves the context":
            manager.__exit__(None, None, None)
        elif what == "saves":
            manager.save_state("of-a-child", wait=True)
        elif what == "trains on":
            steps.train()
            steps.save()
            manager.wait()
    except CkptError:
        pass
    except BaseException as error:
        voice.tell(f"child raised {Failure.of(error)}".replace("\n", " "))
    finally:
        os._exit(0)


def _reap(voice: Voice, child: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return
        time.sleep(0.01)
    voice.tell("child hangs")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
