"""The memory tier, its keeper, and the mirror: killed, frozen, damaged, each while a run trains."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ckpt import list_checkpoints, verify
from ckpt.memory import room
from ckpt.memory.keeper_process import living_keeper
from ckpt.memory.place import MemoryPlace
from ckpt.storage.local import volatile
from tests.campaign import damage
from tests.campaign.children import Voice
from tests.campaign.training import Training
from tests.campaign.trials import Trial, options
from tests.campaign.verdicts import FRESH, LOST, STALL, STUCK, WRONG, Found

LONGEST = 1.0  # seconds that the tier may keep the training thread waiting
_EVERY = 5  # steps between saves to the root
_MOST = 400


def memory(trial: Trial) -> None:
    """A run with snapshots in memory is killed; then, perhaps, what it has left there or in the root is damaged."""
    harm = ("nothing", "newest in memory", "all in memory", "manifests of the root")[trial.index % 4]
    trial.scenario = f"killed, damaged: {harm}"
    with _Keepers(trial):
        child = trial.start(_remembering, str(trial.root), _memory_of(trial), "off", False, _MOST)
        child.hear(f"step {trial.random.choice((3, _EVERY + 1))}")
        time.sleep(trial.random.random() * 0.2)
        child.kill()
        in_root, in_memory = _newest_intact(trial, trial.root), _newest_in_memory(trial)
        least = {"nothing": max(in_root, in_memory), "manifests of the root": in_memory}.get(harm, in_root)
        _harm(trial, harm)
        nothing_left = not in_root and (not in_memory or harm != "nothing")  # nothing was ever saved to the root
        _go_on(trial, least, may_refuse=harm == "manifests of the root", fresh_is_fine=nothing_left)


def keeper(trial: Trial) -> None:
    """The keeper is frozen or killed while a run trains: no step waits for it."""
    how, small = ("SIGSTOP", "SIGKILL")[trial.index % 2], trial.index % 4 >= 2
    trial.scenario = f"keeper, {'held memory' if small else 'files'}: {how}"
    with _Keepers(trial) as keepers:
        child = trial.start(_remembering, str(trial.root), _memory_of(trial), "on", small, 60)
        child.hear(f"step {_EVERY + 1}")
        keepers.send(getattr(signal, how))
        ended = child.wait("a run whose keeper is away")
        keepers.send(signal.SIGCONT)
        if ended.failure is not None:
            ended.failure.check("a run whose keeper is away")
            raise Found(STUCK, f"a run whose keeper is away could not go on: {ended.failure}")
        stalls = [line.partition(" ")[2] for line in ended.told if line.startswith("stall ")]
        if stalls:
            raise Found(STALL, f"{how} of the keeper: steps waited {', '.join(stalls)} s")
        _go_on(trial, _newest_intact(trial, trial.root))


def mirror(trial: Trial) -> None:
    """A run with a mirror is killed; then files of either are damaged, all at once."""
    target = trial.folder / "mirror"
    child = trial.start(_mirroring, str(trial.root), str(target))
    child.hear("ready")
    child.hear("durable 2")
    time.sleep(trial.random.random() * 0.3)
    child.kill()
    places = {"root": trial.root, "mirror": target}
    steps = {name: _newest_intact(trial, place) for name, place in places.items()}
    hurt = (("root",), ("mirror",), ("root", "mirror"))[trial.index % 3]
    group, way = trial.random.choice(list(damage.GROUPS)), trial.random.choice(list(damage.WAYS))
    trial.scenario = f"killed at {steps}, all {group} of the {' and the '.join(hurt)} {way}"
    # each has the other, but for a save that was killed between the two
    mended = {
        name for name, step in steps.items() if group in ("manifests", "copies") and _has_copy(places[name], step)
    }
    for name in hurt:
        damage.strike(places[name], group, way, trial.random)
    least = max((step for name, step in steps.items() if name in mended or name not in hurt), default=0)
    everything = (group, way) == ("files", "removed")
    _go_on(trial, least, mirror=str(target), may_refuse=not least, fresh_is_fine=everything and not least)


def _has_copy(root: Path, step: int) -> bool:
    return (root / f"step-{step:08d}" / damage.COPY).exists()


def _memory_of(trial: Trial) -> str:
    place = trial.folder / "memory"
    place.mkdir(exist_ok=True)
    return str(place)


class _Keepers:
    """The keepers of a trial's runs, ended with it: also one that is stopped, and whose place the run has given up."""

    def __init__(self, trial: Trial) -> None:
        os.environ["CKPT_MEMORY_DIR"] = _memory_of(trial)
        self._processes: set[int] = set()

    def __enter__(self) -> _Keepers:
        return self

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        found = (living_keeper(place) for place in MemoryPlace.list_places())
        self._processes |= {keeper.process for keeper in found if keeper is not None}
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.kill(process, number)


def _remembering(voice: Voice, root: str, place: str, keeper: str, small: bool, most: int) -> None:
    """Train with a snapshot in memory of every step, and a save now and then. Tells what is durable, and who waited."""
    os.environ.update(CKPT_MEMORY_DIR=place, CKPT_MEMORY_KEEPER=keeper)
    if small:
        no_room = SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=1)
        vars(room)["os"] = SimpleNamespace(statvfs=lambda path: no_room)  # the tmpfs is too small
        vars(volatile)["_LARGE"] = 1  # and the keeper holds every file
    training = Training()
    with training.manager(root, memory=1, **options("keep", wait=True)) as manager:
        restored = manager.resume()
        if restored is not None:
            wrong = training.disagreements(restored)
            assert not wrong, wrong
        for _ in range(most):
            step = training.advance()
            waited = _waited(manager.step)
            if waited > LONGEST:
                voice.tell(f"stall {waited:.1f}")
            if step % _EVERY == 0:
                manager.save_state()
                voice.tell(f"durable {step}")
            voice.tell(f"step {step}")
            time.sleep(0.01)


def _waited(call: Any) -> float:
    """Seconds that a call has kept this thread waiting, without those in which others had the processor."""
    before, begun = _waiting_to_run(), time.monotonic()
    call()
    return time.monotonic() - begun - (_waiting_to_run() - before)


def _waiting_to_run() -> float:
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _mirroring(voice: Voice, root: str, mirror: str) -> None:
    training = Training()
    with training.manager(root, mirror=mirror, **options("keep", wait=True, last=3)) as manager:
        manager.resume()
        voice.tell("ready")
        for _ in range(_MOST):
            step = training.advance()
            manager.step()
            manager.save_state()
            voice.tell(f"durable {step}")


def _harm(trial: Trial, what: str) -> None:
    slots = sorted(Path(_memory_of(trial)).glob("ckpt-*/slots/*/"), key=lambda path: path.name)
    if what == "manifests of the root" and trial.root.is_dir():
        damage.strike(trial.root, "manifests and copies", "flipped", trial.random)
    elif what != "nothing":
        for slot in slots[-1:] if what == "newest in memory" else slots:
            files = sorted(path for path in slot.rglob("*") if path.is_file() and path.stat().st_size)
            for path in files if what == "all in memory" else files and [trial.random.choice(files)]:
                damage.WAYS[trial.random.choice(list(damage.WAYS))](path, files, trial.random)


def _newest_in_memory(trial: Trial) -> int:
    """The step of the newest snapshot that is committed in memory, read without the library."""
    found = [json.loads(path.read_bytes()) for path in Path(_memory_of(trial)).glob("ckpt-*/slots/*/manifest.json")]
    return max((int(one["progress"]["step"]) for one in found), default=0)


def _newest_intact(trial: Trial, root: Path) -> int:
    return int(trial.run("a look at it", _newest, str(root)).value or 0) if root.is_dir() else 0


def _newest(voice: Voice, root: str) -> int:
    wrong = verify(root) if list_checkpoints(root) else {}
    return max((one.step or 0 for one in list_checkpoints(root) if one.committed and not wrong[one.name]), default=0)


def _go_on(
    trial: Trial, least: int, *, mirror: str | None = None, may_refuse: bool = False, fresh_is_fine: bool = False
) -> None:
    """A fresh process resumes at least that step, or refuses where it may; never from zero over committed work."""
    ended = trial.run("a resume after the fault", _resume, str(trial.root), _memory_of(trial), mirror)
    if ended.failure is not None:
        ended.failure.check("the resume after the fault")
        if not may_refuse:
            raise Found(LOST, f"step {least} was durable, and nothing loads: {ended.failure}")
        return
    found = ended.value
    if found is None:
        raise Found(LOST, f"the resume after the fault ended with {ended.status}\n{trial.log()}")
    if found["wrong"]:
        raise Found(WRONG, f"resumed step {found['step']}, but {'; '.join(found['wrong'])}")
    if not found["step"] and not fresh_is_fine:
        raise Found(FRESH, f"the run began anew; step {least} was durable")
    if found["step"] < least:
        raise Found(LOST, f"step {least} was durable, resumed was step {found['step']}. {found['passed_over']}")


def _resume(voice: Voice, root: str, place: str, mirror: str | None) -> dict[str, Any]:
    os.environ.update(CKPT_MEMORY_DIR=place, CKPT_MEMORY_KEEPER="off")
    training = Training()
    more = {"mirror": mirror} if mirror else {"memory": 1}
    with training.manager(root, **more, **options("keep", wait=True, last=3)) as manager:
        restored = manager.resume()
        wrong = training.disagreements(restored, generators=not restored.approximated) if restored else []
        passed = dict(restored.passed_over) if restored else {}
        step = restored.step if restored else 0
        training.advance()
        manager.step()
        manager.save_state()
        return {"step": step, "wrong": wrong, "passed_over": passed}
