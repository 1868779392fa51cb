"""The passes through loaders that are under way: what each hands out, and which of them are training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ckpt.data.batch_usage import BatchUsage, HandedBatches
from ckpt.data.batches import Batches, is_enumerated
from ckpt.data.epoch_loaders import PLAIN, EpochLoaders
from ckpt.data.loader_info import Loader
from ckpt.data.loader_matching import epoch_variable
from ckpt.data.loop_patterns import NESTED, NO_TRAINING, OTHER_LOADER, READ_AHEAD, LoopPatterns
from ckpt.data.progress import Progress
from ckpt.data.tracked_loader import TrackedLoader

FindIterator = Callable[[], Batches[Any] | None]  # the iterator that the script holds, while it lives


@dataclass
class Pass:
    """One pass through a loader, from the loop's side."""

    key: str
    tracked: TrackedLoader
    saved: dict[str, Any] | None  # the position that it began at
    handed: HandedBatches
    announced: bool  # by `manager.batches`, not in a plain `for`
    iterator: FindIterator
    batch: int  # the loop's count when it began
    samples: int = 0
    fresh: int = 0  # batches that it has handed out since the last step
    window: int = 0  # it handed out as many for the first step, for the last one, and none is held; 0 if not known
    trained: bool = False  # since it began, or continued
    counted: int | None = None  # the epoch, by the script's own count

    @property
    def may_go_back(self) -> bool:
        """Whether the script may skip by hand what the loader has skipped: training, which it did not announce."""
        return not self.announced and self.saved is not None and bool(self.saved.get("trained"))


class Passes:
    """Counts what the open passes hand out, and tells training from evaluation.

    Training is a pass in which an optimizer was stepped. Once steps can be seen at all, a pass without one counts no
    samples, and gives the saved position that it began at back to the next pass.
    """

    def __init__(self, loaders: EpochLoaders, patterns: LoopPatterns, world_size: int) -> None:
        self.progress = Progress()
        self.open: list[Pass] = []
        self.in_epochs = False  # inside `manager.epochs`
        self.sees_steps = False
        self._loaders = loaders
        self._patterns = patterns
        self._world_size = world_size
        self._ended: Pass | None = None  # the last one that was trained on

    def begin(
        self,
        loader: Loader,
        iterator: FindIterator,
        handed: HandedBatches | None,
        models: Callable[[], Iterable[nn.Module]],
        *,
        announced: bool,
    ) -> Pass:
        """`handed`: what the script was given before its loader was taken back."""
        key, tracked, saved = self.next_loader(loader, announced=announced)
        trusted = (saved or {}).get("unused") == 0
        handed = handed or HandedBatches(
            tracked.batches_handed_out if saved else 0, BatchUsage(models()), trusted=trusted
        )
        new = Pass(key, tracked, saved, handed, announced, iterator, self.progress.batch)
        if not (announced or self.in_epochs or self.open):
            new.counted = epoch_variable()
        self.open.append(new)
        return new

    def next_loader(self, loader: Loader, *, announced: bool) -> tuple[str, TrackedLoader, dict[str, Any] | None]:
        found = self._loaders.next(loader, announced=announced)
        if not found[1].has_saved_position and not self._loaders.open:
            self.progress.batch = 0
        return found

    def count(self, current: Pass, samples: int, *, nested: bool) -> None:
        """The pass hands out a batch; `nested` if it is inside a pass through another loader."""
        if not nested:
            self.progress.batch += 1
        current.fresh += 1
        current.samples += samples * self._world_size
        self.progress.samples += samples * self._world_size

    def end(self, ended: Pass, around: Mapping[int, int], *, again: bool, restored: bool) -> None:
        """`around`: the batches that each open loader had handed out when the pass began. `again`: the loader is taken
        back, and another pass follows. `restored`: a checkpoint was loaded meanwhile."""
        self.open = [other for other in self.open if other is not ended]
        self._ended = ended if ended.trained else self._ended
        self._drop_if_nested(ended, around)
        if not again:
            ended.handed.forget()
        if restored or ended.trained or not self.sees_steps:
            return
        self.progress.samples -= ended.samples  # of no training
        if ended.saved is not None and ended.samples and not ended.announced:
            self._loaders.put_back(ended.key, ended.tracked, ended.saved)
            self.progress.batch = ended.batch
            if not again:
                self._patterns.caveats.tell("put back", NO_TRAINING.format(ended.batch))

    def _drop_if_nested(self, ended: Pass, around: Mapping[int, int]) -> None:
        """A pass inside one step of another, as for validation, is over with that step: its position is not kept.

        Loaders that are read side by side are another thing: each moves on while the other is open.
        """
        stood_still = [
            tracked for tracked in self._loaders.open if around.get(id(tracked)) == tracked.batches_handed_out
        ]
        if stood_still:
            self._loaders.drop(ended.tracked)
        if ended.trained and any(other.tracked in stood_still and not other.announced for other in self.open):
            self._patterns.caveats.note("data", NESTED)

    def mark_training(self) -> None:
        """An optimizer was stepped: on what every open pass has handed out since the last step."""
        for current in [each for each in self.open if each.fresh]:
            current.tracked.trained = True
            if current.trained:
                current.window = current.fresh if current.fresh == current.handed.unused + 1 else 0
            current.fresh = 0
            if not current.trained:
                current.trained = True
                self._begin_training(current)

    def mark_training_outside(self) -> None:
        """An optimizer was stepped: outside of any pass, if none is open."""
        if self.open:
            return
        self._drop_unclaimed()
        if self._ended is not None and self._ended.handed.unused and self._ended.tracked.done:
            self._patterns.caveats.note("prefetching", READ_AHEAD)  # training continues after the last batch
        self._ended = None

    def _begin_training(self, current: Pass) -> None:
        current.handed.note_training()
        enumerated = bool(current.handed.left_out) and is_enumerated(current.iterator())
        saved = current.saved or {}
        if saved.get("window") == current.handed.unused + 1:
            current.window = saved["window"]
        before = saved.get("unused", 0)
        self._patterns.settled(current.handed, before, enumerated=enumerated, in_windows=current.window > 0)
        if not current.announced:
            self._patterns.begins_pass(self.progress, current.counted, in_epochs=self.in_epochs)
            self._drop_unclaimed()

    def _drop_unclaimed(self) -> None:
        """Training continues without the loader that a plain position was saved for."""
        unclaimed = self._loaders.unclaimed.positions
        lost = [key for key in unclaimed if self._patterns.quiet or key.startswith(PLAIN)]
        for what in [unclaimed.pop(key).get("likeness") for key in lost]:
            if not self._patterns.quiet:
                self._patterns.caveats.differs("data", f"{OTHER_LOADER} {what}.")

    def usage(self, tracked: TrackedLoader) -> dict[str, int]:
        """How many batches of a loader the script was given and has not trained on; and, if it reads several before it
        trains on all of them, how many."""
        reading = [current for current in self.open if current.tracked is tracked]
        unused = sum(0 if current.window else current.handed.unused for current in reading)
        window = max((current.window for current in reading), default=0)
        return {"unused": unused, "window": window} if window > 1 else {"unused": unused}
