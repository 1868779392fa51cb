"""Flipped bits, cut, swapped, stale and missing files: the newest intact checkpoint is taken, and nothing else."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt import DamagedError, verify
from ckpt.formats.native.manifest import Manifest
from tests.campaign import kills
from tests.campaign.children import Child, Voice
from tests.campaign.jobs import Job
from tests.campaign.training import Training
from tests.campaign.trials import Trial, save_steps
from tests.campaign.verdicts import BROKEN, FRESH, LOST, STUCK, WRONG, Found

STEPS = 3
MANIFEST, COPY = "manifest.json", "manifest.copy.json"
Contents = dict[str, bytes]


def _flip(path: Path, others: list[Path], choice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(choice.choice((1, 1, 3))):
        data[choice.randrange(len(data))] ^= 1 << choice.randrange(8)
    path.write_bytes(data)


def _truncate(path: Path, others: list[Path], choice: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: choice.choice((0, len(data) - 1, choice.randrange(len(data))))])


def _extend(path: Path, others: list[Path], choice: random.Random) -> None:
    path.write_bytes(path.read_bytes() + choice.randbytes(choice.choice((1, 4096))))


def _zero(path: Path, others: list[Path], choice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = choice.randrange(0, len(data), 512)
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    path.write_bytes(data)


def _remove(path: Path, others: list[Path], choice: random.Random) -> None:
    path.unlink()


def _swap(path: Path, others: list[Path], choice: random.Random) -> None:
    other = choice.choice([one for one in others if one != path])
    mine = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(mine)


def _stale(path: Path, others: list[Path], choice: random.Random) -> None:
    """The same file of another checkpoint: consistent in itself, and of another step."""
    folders = [one for one in path.parent.parent.iterdir() if (one / path.name).is_file() and one != path.parent]
    if folders:
        path.write_bytes((choice.choice(folders) / path.name).read_bytes())


def _stale_but_for_manifest(path: Path, others: list[Path], choice: random.Random) -> None:
    """All files of another checkpoint under this one's manifest."""
    for one in others:
        if one.name not in (MANIFEST, COPY):
            _stale(one, others, choice)


def _move_folder(path: Path, others: list[Path], choice: random.Random) -> None:
    """Two checkpoints change names."""
    root, mine = path.parent.parent, path.parent
    other = choice.choice([one for one in root.iterdir() if one.is_dir() and one != mine])
    mine.rename(root / "aside")
    other.rename(mine)
    (root / "aside").rename(other)


def _touch(path: Path, others: list[Path], choice: random.Random) -> None:
    path.touch()


DAMAGES: tuple[Callable[[Path, list[Path], random.Random], None], ...] = (
    _flip, _flip, _truncate, _extend, _zero, _remove, _swap, _stale, _stale_but_for_manifest, _move_folder, _touch,
)  # fmt: skip


def damage(trial: Trial) -> None:
    spread = "fsdp" if trial.index % 4 == 3 else "one"
    template = trial.shared / f"template-damage-{spread}"
    shutil.copytree(template, trial.root)
    originals = _contents(template)
    done = [_do_one(trial) for _ in range(trial.random.choice((1, 1, 2, 3)))]
    trial.scenario = f"{spread}: {', '.join(done)}"
    intact = {name: _step_of(found, originals) for name, found in _contents(trial.root).items()}
    now = _contents(trial.root)
    newest = max((_step_of(found, originals, usable=True) for found in now.values()), default=0)
    _check_verify(trial, intact)
    if newest == 0:
        _check_refused(trial)
        return
    step = trial.check(newest, untouched=False)
    if step > newest and spread == "one":  # of two ranks' files one process does not need all
        raise Found(WRONG, f"step {newest} is the newest intact one, and step {step} was loaded")
    left = [one for one in _contents(trial.root).values() if _step_of(one, originals, usable=True) == newest]
    moved = any(what.startswith("move") for what in done)  # then the next save may have replaced it by its name
    if not left and not moved and step == newest:
        raise Found(LOST, f"Keep(last=2) has removed the intact checkpoint of step {newest}")


def _do_one(trial: Trial) -> str:
    folders = sorted(one for one in trial.root.iterdir() if one.is_dir() and any(one.iterdir()))
    if not folders:
        return "nothing left"
    folder = folders[-1] if trial.random.random() < 0.7 else trial.random.choice(folders)
    files = sorted(one for one in folder.iterdir() if one.is_file() and one.stat().st_size)
    action = trial.random.choice(DAMAGES)
    if len(files) < 2 or (action is _move_folder and len(folders) < 2):
        return "nothing"
    path = trial.random.choice(files)
    action(path, files, trial.random)
    return f"{action.__name__.strip('_').replace('_', ' ')} {folder.name}/{path.name}"


def _contents(root: Path) -> dict[str, Contents]:
    folders = [one for one in root.iterdir() if one.is_dir()]
    return {one.name: {path.name: path.read_bytes() for path in one.iterdir() if path.is_file()} for one in folders}


def _step_of(found: Contents, originals: dict[str, Contents], *, usable: bool = False) -> int:
    """The step of the checkpoint whose every byte this is; 0 if it is none.

    `usable`: a manifest that cannot be read counts for its copy, and a copy for nothing.
    """
    for name, original in originals.items():
        wanted = dict(original)
        if COPY not in found and not usable:
            del wanted[COPY]  # a checkpoint without a copy is as good
        if usable:
            copy, manifest = wanted.pop(COPY), found.get(MANIFEST, b"")
            if manifest != copy and found.get(COPY) == copy and not _is_manifest(manifest):
                del wanted[MANIFEST]
        if all(found.get(file) == data for file, data in wanted.items()):
            return int(name.removeprefix("step-"))
    return 0


def _is_manifest(data: bytes) -> bool:
    try:
        Manifest.from_bytes(data, MANIFEST)
    except DamagedError:
        return False
    return True


def _check_verify(trial: Trial, intact: dict[str, int]) -> None:
    ended = trial.run("verify", _verify, str(trial.root))
    if ended.failure is not None:
        ended.failure.check("verify")
        return
    for name, problems in ended.value.items():
        if problems and intact.get(name):
            raise Found(WRONG, f"verify says that {name} is damaged, and every byte of it is as it was: {problems}")
        if not problems and not intact.get(name):
            raise Found(WRONG, f"verify says that {name} is intact, and it is not")
    unseen = {name for name, step in intact.items() if step} - ended.value.keys()
    if unseen:
        raise Found(WRONG, f"verify does not see {sorted(unseen)}")


def _check_refused(trial: Trial) -> None:
    """Nothing is intact: that must be said, and no fresh start be made."""
    ended = trial.run("a resume of damaged checkpoints", _only_resume, str(trial.root))
    if ended.failure is None:
        fault = WRONG if ended.value else FRESH
        raise Found(fault, f"no checkpoint is intact, and a resume gave step {ended.value}")
    ended.failure.check("a resume of damaged checkpoints")
    saved = trial.run("a save over damaged checkpoints", _only_save, str(trial.root))
    if saved.failure is None:
        raise Found(FRESH, "no checkpoint is intact, and a run that did not resume could save")
    saved.failure.check("a save over damaged checkpoints")


def _verify(voice: Voice, root: str) -> dict[str, list[str]]:
    return verify(root)


def _only_resume(voice: Voice, root: str) -> int:
    with Training().manager(root) as manager:
        restored = manager.resume()
        return restored.step if restored else 0


def _only_save(voice: Voice, root: str) -> None:
    with Training().manager(root) as manager:
        manager.save_state("another", wait=True)


GROUPS: dict[str, Callable[[str], bool]] = {
    "manifests": lambda name: name == MANIFEST,
    "copies": lambda name: name == COPY,
    "manifests and copies": lambda name: name in (MANIFEST, COPY),
    "weights": lambda name: name.endswith(".safetensors"),
    "documents": lambda name: name.endswith(".json") and name not in (MANIFEST, COPY),
    "all but manifests and copies": lambda name: name not in (MANIFEST, COPY),
    "files": lambda name: True,
}
WAYS = {"flipped": _flip, "cut": _truncate, "removed": _remove, "overwritten by zeros": _zero}


def strike(root: Path, group: str, way: str, choice: random.Random) -> None:
    """Damage every file of a group, in every checkpoint of a root."""
    files = sorted(path for path in root.glob("[!.]*/**/*") if path.is_file() and path.stat().st_size)
    for path in files:
        if GROUPS[group](path.name) and path.stat().st_size:  # one that is linked with another is cut with it
            WAYS[way](path, files, choice)


def everything(trial: Trial) -> None:
    """Every file of a group, in every checkpoint, all at once: what is whole is loaded, or it is an error."""
    plan = [(group, way) for group in GROUPS for way in WAYS if (group, way) != ("files", "removed")]
    spread = "fsdp" if trial.index % 5 == 4 else "one"
    group, way = plan[trial.index % len(plan)]
    trial.scenario = f"{spread}: all {group} {way}"
    template = trial.shared / f"template-damage-{spread}"
    shutil.copytree(template, trial.root)
    strike(trial.root, group, way, trial.random)
    if group in ("manifests", "copies"):
        trial.check(STEPS, untouched=False)
        ended = trial.run("verify", _verify, str(trial.root))
        if ended.failure is not None or any(ended.value.values()):
            raise Found(STUCK, f"the next run has not repaired it: {ended.value or ended.failure}")
        return
    _check_refused(trial)


def prepare(folder: Path, run: Callable[..., Child], trial: Trial) -> None:
    """Roots with three checkpoints each, of one process and of two ranks."""
    for spread in ("one", "fsdp"):
        root = folder / f"template-damage-{spread}"
        ended: list[Any]
        if spread == "one":
            ended = [run(save_steps, str(root), "all", STEPS).wait("a preparation")]
        else:
            job = Job(trial, kills.saving, str(root), spread, "all", True, STEPS)
            ended = job.wait("a preparation")
        if any(one.status for one in ended):
            raise Found(BROKEN, f"a preparation failed: {[one.failure for one in ended]}")
