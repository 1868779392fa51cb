"""What a report tells of a run, read once: from manifests, the history of the root, and the sizes of files.

The best value of each metric, and the run as its attempts, each begun by a load. Imports no torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ckpt.errors import MissingError
from ckpt.formats.native.manifest import Manifest
from ckpt.memory.statistics import Statistics, saving_of
from ckpt.root.catalog import History, Index, Overview, PastSave
from ckpt.root.verify import COMPLETE, INTACT, REMOVED, Condition, condition
from ckpt.storage import open_storage
from ckpt.util.option_values import settings
from ckpt.util.svg_plot import Points


@dataclass(frozen=True, kw_only=True)
class Save(PastSave):
    """A checkpoint that was committed in the root once, what is known of its save, and what has become of it.

    `state` and `problems` are those of `ckpt ls --json`. `shared`: bytes of files with the same bytes as in the
    checkpoint before it, which are stored once where the storage can link; None where that is not known.
    """

    state: str
    problems: tuple[str, ...] = ()
    shared: int | None = None

    @property
    def name(self) -> str:
        return self.summary.name

    @property
    def step(self) -> int:
        return self.summary.step

    @property
    def waited(self) -> float | None:
        """Seconds that training waited."""
        return self.seconds.get("blocked")

    @property
    def durable(self) -> float | None:
        """Seconds from the call until it was committed and durable."""
        return self.seconds.get("total")

    @property
    def is_here(self) -> bool:
        return self.state != REMOVED

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong with it, as far as it was read."""
        return self.state in (COMPLETE, INTACT)

    @property
    def cured(self) -> str:
        """The crash before it that snapshots in memory have cured; empty if there was none."""
        return saving_of(self.memory)


@dataclass(frozen=True)
class Unread:
    """A checkpoint without a manifest that could be read: never committed, or damaged."""

    name: str
    state: str
    problem: str


@dataclass(frozen=True)
class RunFacts:
    """All that is known of a root. `saves`: in the order of their commits, those included that were removed since.

    `newest`: the manifest of the newest checkpoint. `forgotten`: saves so old that the history has no room for them.
    """

    url: str
    saves: tuple[Save, ...]
    unread: tuple[Unread, ...]
    newest: Manifest
    forgotten: int = 0

    @property
    def present(self) -> list[Save]:
        return [save for save in self.saves if save.is_here]

    @property
    def removed(self) -> list[Save]:
        return [save for save in self.saves if not save.is_here]

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """The values of each metric by step. Of checkpoints of the same step, the last one counts."""
        found: dict[str, dict[int, float]] = {}
        for summary in sorted((save.summary for save in self.saves), key=lambda summary: summary.sequence):
            for name, value in summary.metrics.items():
                found.setdefault(name, {})[summary.step] = value
        return {name: sorted(points.items()) for name, points in found.items()}

    @property
    def problems(self) -> list[tuple[str, str, str]]:
        """Name, state and problem of each checkpoint with which something is wrong."""
        found = [(save.name, save.state, "; ".join(save.problems)) for save in self.present if not save.is_sound]
        return [*found, *((one.name, one.state, one.problem) for one in self.unread)]


def gather(root: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> RunFacts:
    """The facts of the run below a root. Reads manifests and the sizes of files, no tensor."""
    storage = open_storage(root, **settings(options))
    found = Overview.of(storage, storage.list(), known=Index())
    manifests = [found.manifests[summary.name] for summary in reversed(found.committed)]
    if not manifests:
        raise MissingError(f"there are no checkpoints in {storage.url}.")
    history = History.of(storage)
    by_id = {manifest.id: manifest for manifest in manifests}
    conditions = {checkpoint.name: condition(found, checkpoint) for checkpoint in found.checkpoints}
    saves = [_save(PastSave.of(one), conditions[one.name], _shared(one, by_id)) for one in manifests]
    saves += [_save(past, Condition(REMOVED)) for past in history.without(manifests)]
    saves.sort(key=lambda save: (save.summary.sequence, save.summary.created))
    lacking = (checkpoint.name for checkpoint in reversed(found.checkpoints) if checkpoint.summary is None)
    unread = tuple(Unread(name, conditions[name].state.lower(), conditions[name].problems[0]) for name in lacking)
    return RunFacts(storage.url, tuple(saves), unread, manifests[-1], history.left_out)


def _save(past: PastSave, is_now: Condition, shared: int | None = None) -> Save:
    return Save(**vars(past), state=is_now.state.lower(), problems=is_now.problems, shared=shared)


def _shared(manifest: Manifest, by_id: Mapping[str, Manifest]) -> int | None:
    """Bytes of the files that are the same in the checkpoint before; None if that is not there any more."""
    if manifest.parent is None:
        return 0
    parent = by_id.get(manifest.parent)
    if parent is None:
        return None
    before = {(file.name, file.size, file.block_size, file.blocks) for file in parent.files}
    same = (file for file in manifest.files if (file.name, file.size, file.block_size, file.blocks) in before)
    return sum(file.size for file in same)


def waits(saves: Sequence[Save]) -> tuple[list[float], list[float]]:
    """Seconds that training waited, and until checkpoints were durable, of the saves of which that is known."""
    waited = [save.waited for save in saves if save.waited is not None]
    return waited, [save.durable for save in saves if save.durable is not None]


def memory_spent(saves: Sequence[Save]) -> Statistics:
    """What snapshots in memory cost before these checkpoints."""
    taken, skipped, waited = (
        sum(save.memory.get(key, 0) for save in saves) for key in ("snapshots", "left_out", "waited")
    )
    return Statistics(int(taken), int(skipped), waited)


_WORD = re.compile(r"[a-z]+\d?")
_LOWER = {"loss", "error", "err", "perplexity", "ppl", "wer", "cer", "mse", "mae", "rmse", "nll", "bpb", "ece", "fid"}
_HIGHER = {
    "accuracy", "acc", "f1", "auc", "auroc", "precision", "recall", "bleu", "rouge", "reward", "score", "map", "iou",
    "psnr", "ssim", "mcc", "r2",
}  # fmt: skip


@dataclass(frozen=True)
class Best:
    """The best value of a metric, and its step. `how`: "lowest" or "highest"."""

    step: int
    value: float
    how: str


def best_of(name: str, points: Points, modes: Mapping[str, str]) -> Best | None:
    """The first point with the best value; None if nothing says which values are good. `modes`: "min" or "max"."""
    mode = modes.get(name) or guessed_mode(name)
    finite = [point for point in points if math.isfinite(point[1])]
    if mode is None or not finite:
        return None
    step, value = (min if mode == "min" else max)(finite, key=lambda point: point[1])
    return Best(step, value, "lowest" if mode == "min" else "highest")


def guessed_mode(name: str) -> str | None:
    """What the words in a metric's name say, from the last to the first: `eval/loss` is best where it is lowest."""
    for word in reversed(_WORD.findall(name.lower())):
        if word in _LOWER or word.endswith("loss"):
            return "min"
        if word in _HIGHER or word.endswith("accuracy"):
            return "max"
    return None


@dataclass(frozen=True)
class Load:
    """What an attempt began with, and the newer checkpoints that it passed over, with the reasons.

    `is_recorded`: the manifest says so. Otherwise it was concluded from the checkpoint's parent alone.
    """

    name: str
    step: int
    found_in: str = "root"
    passed_over: Mapping[str, str] = field(default_factory=dict)
    more: int = 0  # that were passed over, and are not named
    is_recorded: bool = True
    id: str = ""

    @property
    def reasons(self) -> list[str]:
        """What was passed over and why, each as a sentence that begins with the name."""
        return [why if why.startswith(name) else f"{name}: {why}" for name, why in self.passed_over.items()]


@dataclass
class Attempt:
    """Saves of one process after the other, from a load to the next. Without a load it began afresh."""

    load: Load | None
    saves: list[Save]

    @property
    def is_fallback(self) -> bool:
        return self.load is not None and bool(self.load.passed_over)


def attempts(saves: Sequence[Save]) -> list[Attempt]:
    """The attempts of all runs in a root, oldest first. One that saved nothing has left no trace."""
    by_id = {save.summary.id: save for save in saves}
    found: list[Attempt] = []
    for before, save in pairwise([None, *saves]):
        assert save is not None
        load = _load(before, save, by_id)
        if before is None or load is not None or before.summary.run != save.summary.run:
            found.append(Attempt(load, []))
        found[-1].saves.append(save)
    return found


def _load(before: Save | None, save: Save, by_id: Mapping[str, Save]) -> Load | None:
    if save.resumed:
        said = save.resumed
        skipped, more = said["passed_over"], said.get("more", 0)
        return Load(said["name"], said["step"], said["found_in"], skipped, more, id=said["id"])
    parent = by_id.get(save.summary.parent or "")
    if before is None or parent is None or parent is before or parent.summary.sequence > before.summary.sequence:
        return None
    return Load(parent.name, parent.step, is_recorded=False, id=parent.summary.id)


def restarts(found: Sequence[Attempt]) -> list[Attempt]:
    """The attempts that continued from a checkpoint."""
    return [attempt for attempt in found if attempt.load is not None]


def went_back(saves: Sequence[Save]) -> list[tuple[Save, Save]]:
    """Pairs of present saves in which the later has the lower step: the steps between were trained twice."""
    here = [save for save in saves if save.is_here]
    return [(before, save) for before, save in pairwise(here) if save.step < before.step]
