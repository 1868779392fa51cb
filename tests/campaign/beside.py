"""`prune`, `verify` and `pull` beside a run that saves: neither gets in the way of the other."""

from __future__ import annotations

import select
import shutil
from pathlib import Path

from ckpt import Keep, prune, pull, verify
from ckpt.errors import CkptError, LockedError, MissingError
from tests.campaign import kills
from tests.campaign.children import Voice
from tests.campaign.trials import NAMINGS, Trial
from tests.campaign.verdicts import LOST, UNCLEAR, WRONG, Failure, Found

_SAVES = 25


def beside(tool: str, trial: Trial) -> None:
    """A run saves as fast as it can, and the tool works on its root again and again until it is done."""
    wait, naming = trial.index % 2 == 0, NAMINGS[trial.index // 2 % 3]
    trial.scenario = f"{tool} beside {'waiting' if wait else 'background'} saves, {naming}"
    run = trial.start(kills.saving, 0, str(trial.root), "one", naming, wait, _SAVES)
    run.hear("durable 1")
    busy = trial.start(_repeat, tool, str(trial.root), str(trial.folder / "pulled"))
    ended = run.wait("the run")
    busy.say("enough")
    used = busy.wait(tool)
    rounds = [line for line in used.told if line.startswith(("round", "alarm"))]
    trial.scenario += f", {len(rounds)} times"
    if ended.failure is not None:
        ended.failure.check("a save beside it")
        raise Found(LOST, f"a save failed beside {tool}: {ended.failure}")
    if used.failure is not None:
        used.failure.check(tool)
    alarms = [line for line in used.told if line.startswith("alarm")]
    if alarms:
        raise Found(UNCLEAR, f"{len(alarms)} false alarms in {len(rounds)} rounds: {alarms[0]}")
    if tool == "pull":
        _check_pulled(trial)
    trial.check(ended.durable(), naming=naming)


def _repeat(voice: Voice, tool: str, root: str, target: str) -> None:
    while not select.select([voice.ear], [], [], 0)[0]:
        try:
            alarm = _use(tool, root, target)
        except LockedError:
            alarm = ""
        except CkptError as error:
            alarm = str(error)
            Failure.of(error).check(tool)
        voice.tell("round" if not alarm else f"alarm {alarm}".replace("\n", " "))


def _use(tool: str, root: str, target: str) -> str:
    """One use of the tool; what it reports is an alarm, for nothing is wrong."""
    if tool == "prune":
        prune(root, keep=Keep(last=1), grace=0.0)
    elif tool == "verify":
        return "; ".join(f"{name}: {', '.join(wrong)}" for name, wrong in verify(root).items() if wrong)
    else:
        shutil.rmtree(target, ignore_errors=True)
        pull(root, target)
    return ""


def _check_pulled(trial: Trial) -> None:
    target = Path(trial.folder / "pulled")
    ended = trial.run("verify of what was pulled", _verify, str(target))
    if ended.failure is not None:
        ended.failure.check("verify of what was pulled")
        raise Found(LOST, f"what was pulled cannot be verified: {ended.failure}")
    wrong = {name: problems for name, problems in ended.value.items() if problems}
    if wrong:
        raise Found(WRONG, f"what was pulled is damaged: {wrong}")


def _verify(voice: Voice, root: str) -> dict[str, list[str]]:
    try:
        return verify(root)
    except MissingError:
        return {}
