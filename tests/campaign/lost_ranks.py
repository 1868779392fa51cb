"""One of two ranks is killed or stopped while both save, or meets a failing call: the other is told, and ends."""

from __future__ import annotations

import signal
import time

from ckpt import RankOptions
from ckpt.errors import CkptError
from tests.campaign.calls import Shim
from tests.campaign.children import Child, Voice
from tests.campaign.jobs import STORES, WORLD, Job
from tests.campaign.training import HOST, Training
from tests.campaign.trials import NAMINGS, Steps, Trial, options, save_every_step
from tests.campaign.verdicts import STUCK, UNCLEAR, WRONG, Ended, Failure, Found

TIMEOUT = 5.0  # what the manager is told
_PATIENCE = 40.0  # how long the other rank may take to end, on a machine that has other work
_FAULTS = ("EIO", "ENOSPC", "EROFS", "EDQUOT", "EINTR", "EMFILE")


def _saving(voice: Voice, rank: int, root: str, spread: str, naming: str, wait: bool) -> None:
    training = Training(spread, rank=rank)
    with training.manager(root, **{**options(naming, wait=wait), "ranks": RankOptions(timeout=TIMEOUT)}) as manager:
        manager.resume()
        voice.tell("ready")
        save_every_step(voice, training, manager, naming, wait, 400)


def rank_lost(number: int, trial: Trial) -> None:
    """SIGKILL or SIGSTOP to one rank; the other ends with an error that names it, and the job can be started again."""
    choice = trial.random
    wait, naming, spread = choice.random() < 0.5, choice.choice(NAMINGS), choice.choice(("ddp", "fsdp", HOST))
    lost, store = trial.index % WORLD, STORES[trial.index // WORLD % len(STORES)]
    words = f"{spread}, {'wait' if wait else 'background'}, {naming}"
    trial.scenario = f"{words}: {signal.Signals(number).name} to rank {lost}, store in {store}"
    job = Job(trial, _saving, str(trial.root), spread, naming, wait, store=store)
    job.ready()
    time.sleep(choice.random() * 0.3)
    job.ranks[lost].signal(number)
    survivor = _survived(job.ranks[1 - lost], f"rank {1 - lost} of a job whose rank {lost} got {number}")
    ended = [survivor]
    if number == signal.SIGSTOP:
        job.ranks[lost].signal(signal.SIGCONT)
        ended.append(_survived(job.ranks[lost], f"rank {lost}, which was stopped and goes on"))
    durable = max(one.durable() for one in [*ended, job.ranks[lost].kill()])
    trial.check(durable, naming=naming)


def _survived(rank: Child, what: str) -> Ended:
    ended = rank.wait(what, _PATIENCE)
    if ended.failure is None:
        raise Found(UNCLEAR, f"{what} ended with {ended.status} and no error\n{rank.log.read_text()[-1000:]}")
    ended.failure.check(what)
    return ended


def rank_call(trial: Trial) -> None:
    """A system call of one rank fails during a save: all ranks raise or none, and the next save succeeds."""
    choice = trial.random
    wait, naming, spread = choice.random() < 0.5, choice.choice(NAMINGS), choice.choice(("ddp", "fsdp", HOST))
    rank = 0 if spread == "ddp" else trial.index % WORLD
    number, fault = choice.randint(1, 60 if rank else 280), choice.choice(_FAULTS)
    words = f"{spread}, {'wait' if wait else 'background'}, {naming}"
    trial.scenario = f"{words}: {fault} at call {number} of rank {rank}"
    job = Job(trial, _struck, str(trial.root), spread, naming, wait, rank, number, fault)
    ended = job.wait("a job with a failing call")
    for one in ended:
        if one.failure is not None:
            one.failure.check("a save of two ranks")
            if "again" in one.told:
                raise Found(STUCK, f"the fault is over, and two ranks cannot save: {one.failure}")
            raise Found(UNCLEAR, f"two ranks could not begin: {one.failure}")
    tried = [[line for line in one.told if line.startswith("tried ")] for one in ended]
    if tried[0] != tried[1]:
        raise Found(WRONG, f"the ranks disagree whether the save succeeded: {tried}")
    trial.check(max(one.durable() for one in ended), naming=naming)


def _struck(
    voice: Voice, rank: int, root: str, spread: str, naming: str, wait: bool, struck: int, number: int, fault: str
) -> None:
    shim = Shim()
    shim.watch(root)
    training = Training(spread, rank=rank)
    with training.manager(root, **options(naming, wait=wait)) as manager:
        manager.resume()
        steps = Steps(training, manager, naming)
        for step in (1, 2, 3):
            steps.train()
            if step == 2 and rank == struck:
                shim.arm(number, fault)
            if step == 3:
                voice.tell("again")
            try:
                steps.save()
                manager.wait()
                voice.tell(f"durable {step}")
            except CkptError as error:
                if step != 2:
                    raise
                shim.disarm()
                Failure.of(error).check("a save of two ranks")
                voice.tell("tried in vain")
            if step == 2 and rank == struck:
                shim.disarm()
