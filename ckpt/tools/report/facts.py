"""What a report tells of a run, read once: from manifests, the history of the root, and the sizes of files.

The best value of each metric, the run as its attempts, and a verdict on its health. Imports no torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

from ckpt.errors import MissingError
from ckpt.formats.native.manifest import Manifest
from ckpt.memory.statistics import Statistics, saving_of
from ckpt.root.catalog import Goodput, History, Index, Overview, PastAttempt, PastSave, lost_steps
from ckpt.root.verify import COMPLETE, INTACT, REMOVED, UNCOMMITTED, Condition, condition
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
    `attempts`: oldest first; those from before the history, or without one, as their saves tell of them.
    """

    url: str
    saves: tuple[Save, ...]
    unread: tuple[Unread, ...]
    newest: Manifest
    forgotten: int = 0
    attempts: Sequence[PastAttempt] = ()

    @property
    def present(self) -> list[Save]:
        return [save for save in self.saves if save.is_here]

    @property
    def removed(self) -> list[Save]:
        return [save for save in self.saves if not save.is_here]

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """The values of each metric by step: of all steps, as the history has them, else of checkpoints.

        Where an attempt went back, its values take the place of those before.
        """
        found: dict[str, dict[int, float]] = {}
        for past in self.attempts:
            for name, points in past.metrics.items():
                older = found.get(name, {}).items()
                found[name] = {step: value for step, value in older if step <= past.first} | dict(points)
        for summary in sorted((save.summary for save in self.saves), key=lambda summary: summary.sequence):
            for name in summary.metrics.keys() - {name for past in self.attempts for name in past.metrics}:
                found.setdefault(name, {})[summary.step] = summary.metrics[name]
        return {name: sorted(points.items()) for name, points in found.items()}

    @property
    def usable(self) -> Save | None:
        """The newest checkpoint with which nothing is wrong."""
        return next((save for save in reversed(self.present) if save.is_sound), None)

    @cached_property
    def goodput(self) -> Goodput | None:
        """Where the run's time went; None if the history has no attempts."""
        return Goodput.of([past for past in self.attempts if past.seconds])

    @cached_property
    def told(self) -> list[Attempt]:
        """The attempts, with what each cost."""
        lost = lost_steps(self.attempts)
        return [Attempt(past, lost[n], n + 1 == len(lost)) for n, past in enumerate(self.attempts)]

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
    known = history.attempts
    before = [save for save in saves if not any(0 < past.since <= save.summary.sequence for past in known)]
    return RunFacts(storage.url, tuple(saves), unread, manifests[-1], history.left_out, [*by_saves(before), *known])


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


def by_saves(saves: Sequence[Save]) -> list[PastAttempt]:
    """Attempts as manifests tell of them, where no history does: the saves from one load to the next."""
    found: list[PastAttempt] = []
    for save in saves:
        summary = save.summary
        if save.resumed or not found or found[-1].run != summary.run:
            begun = {"since": summary.sequence, "first": save.resumed.get("step", 0), "resumed": save.resumed}
            found.append(PastAttempt(summary.id, summary.run, summary.created, **begun, writer=()))
        found[-1] = replace(found[-1], last=summary.step)
    return found


@dataclass(frozen=True)
class Attempt:
    """One process of the run. `lost`: its steps that had to be made again."""

    past: PastAttempt
    lost: int
    is_last: bool

    @property
    def was_killed(self) -> bool:
        """The root has one writer at a time: an attempt before the last that has told no end can't be running."""
        return not self.past.ended and bool(self.past.seconds) and (not self.is_last or self.past.is_running is False)

    @property
    def end(self) -> str:
        """How it ended."""
        past = self.past
        if past.ended:
            return {"stopped": f"stopped by {past.reason}", "failed": f"failed: {past.reason}"}.get(
                past.ended, past.ended
            )
        if self.was_killed:
            return "killed"
        return "not known" if not past.seconds else "running" if past.is_running else "running elsewhere, or killed"

    @property
    def cost(self) -> str:
        """Of an attempt that was killed, nobody knows how many steps it made after its last save."""
        steps = _steps(self.lost) if self.lost else "none"
        if not self.was_killed and self.past.seconds:
            return steps
        return f"{steps} or more" if self.lost else "not known"

    @property
    def began_from(self) -> str:
        resumed = self.past.resumed
        if not resumed:
            return "scratch"
        where = "" if resumed["found_in"] == "root" else f", found in the {resumed['found_in']}"
        return f"{resumed['name']}{where}"

    @property
    def passed_over(self) -> list[str]:
        """The newer checkpoints that its load skipped, and why, each as a sentence that begins with the name."""
        skipped, more = self.past.resumed.get("passed_over", {}), self.past.resumed.get("more", 0)
        reasons = [why if why.startswith(name) else f"{name}: {why}" for name, why in skipped.items()]
        return [*reasons, *([f"and {more:,} more"] if more else [])]


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"


def verdict(facts: RunFacts) -> tuple[bool, str]:
    """Whether the run is healthy, and why, in one sentence: what is worst."""
    last, usable = facts.told[-1], facts.usable
    at = last.past.last
    wrong = [(name, why) for name, state, why in facts.problems if state != UNCOMMITTED]  # a kill leaves those
    restart = "no checkpoint is left to restart from"
    if usable is not None:
        lost = f", {_steps(at - usable.step)} earlier" if at > usable.step else ""
        restart = f"a restart begins at {usable.name}{lost}"
    if wrong:
        more = f", and {len(wrong) - 1:,} more can't either" if len(wrong) > 1 else ""
        return False, f"Damaged: {wrong[0][0]} can't be used ({wrong[0][1].rstrip('.')}){more}; {restart}."
    for name, points in facts.curves.items():
        odd = list(takewhile(lambda point: not math.isfinite(point[1]), reversed(points)))
        if odd:
            return False, f"Diverged: {name} has been {odd[-1][1]} since step {odd[-1][0]:,}; {restart}."
    if last.was_killed or last.past.ended == "failed":
        why = f": {last.past.reason.rstrip('.')}" if last.past.ended else " or later, without a word"
        return False, f"{last.end.partition(':')[0].capitalize()} after step {at:,}{why}; {restart}."
    sure = "" if last.past.ended or last.past.is_running else " as far as is known"
    here = len(facts.present)
    found = f"all {here:,} checkpoints are" if here > 1 else "its checkpoint is"
    return True, f"Healthy{sure}: {last.end}, at step {at:,}; {found} complete, by the sizes of files."


def to_json(facts: RunFacts, modes: Mapping[str, str]) -> dict[str, Any]:
    """What matters most, for programs."""
    healthy, why = verdict(facts)
    spent, metrics = facts.goodput, {}
    for name, points in facts.curves.items():
        best = best_of(name, points, modes)
        (step, value), more = points[-1], {"best": best.value, "best_step": best.step} if best else {}
        metrics[name] = {"step": step, "last": value if math.isfinite(value) else str(value), **more}
    return {
        "root": facts.url,
        "healthy": healthy,
        "health": why,
        "goodput": {"share": spent.share, "seconds": spent.seconds, **asdict(spent)} if spent else None,
        "attempts": [
            {
                "run": one.past.run, "began": one.past.began, "from": one.past.resumed.get("name"),
                "passed_over": one.passed_over, "first": one.past.first, "last": one.past.last, "ended": one.end,
                "lost_steps": one.lost, "seconds": dict(one.past.seconds),
            }
            for one in facts.told
        ],
        "metrics": metrics,
    }  # fmt: skip
