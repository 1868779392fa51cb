"""The training loop: its epochs, passes through loaders and steps, and the boundaries between its iterations.

A boundary is where the loop asks the pass that leads it for the next batch, begins the next epoch, or ends. Whatever
the script does in an iteration, in whatever order, is done by then: so what `manager.step` finds due is taken there.

Nobody tells that a loop was left by `break`. What comes next shows it: another pass over the same loader, steps on the
batches of another pass, the next epoch. A pass that hands out another batch after that was not left, and comes back.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from ckpt.data import loader_info
from ckpt.data.loader_info import Loader, MakeIterator, keeps_order
from ckpt.data.progress import Progress
from ckpt.data.tracked_loader import EpochLoaders, TrackedLoader, UnclaimedPositions
from ckpt.errors import ConfigError
from ckpt.ranks.consensus import MAIN, Ranks
from ckpt.state import samplers
from ckpt.state.parts import Caveats, has_state
from ckpt.state.registry import weakly

_log = logging.getLogger("ckpt")
T = TypeVar("T")
_PATIENCE = 64  # steps on one batch: so many may pass before a save that is due is taken between two of them
_ONE_SHOT = (
    zip, map, filter, enumerate, reversed,
    itertools.chain, itertools.cycle, itertools.islice, itertools.zip_longest, itertools.starmap,
)  # fmt: skip

NOT_FOLLOWED = (
    "ckpt can't see where this loop's batches come from, so a resume continues in them only if your script skips to "
    "its place. Pass the loader: StateManager(dataloader=loader), or iterate over manager.batches(...), which takes "
    "any iterable. Until then manager.step() saves at once: call it last in the iteration, and fetch the next batch "
    "after it."
)
IN_STEP = (
    "this loop reads no loader that ckpt follows, so manager.step() saves at once. Call it last in the iteration, and "
    "fetch the next batch after it: a resume loses whatever comes later."
)
EPOCH_STEPS = (
    "the epoch begins again: {0} of its steps were made without a loader. Write `for i in manager.batches(range(n))`, "
    "so that a resume continues in the middle."
)
ONE_STEP = "counted as finished: it had one step, without a loader"
READ_AHEAD = (
    "something reads batches ahead of the loop, and every resume loses these batches. Put the prefetcher inside: "
    "manager.batches(Prefetcher(loader)), not Prefetcher(manager.batches(loader))."
)
CYCLED = (
    "training continued without asking the loader for more batches. itertools.cycle does that: it repeats the batches "
    "of the first pass from memory, which a resume can't do. Write `while True:` around `for batch in loader:`."
)
IN_TURN = (
    "two loaders feed this loop in turn, or one inside the other. ckpt knows the position of each, but not which "
    "comes next, so a resume may lose batches. Pass only the outer loader, or read both in every iteration: "
    "zip(manager.batches(a), manager.batches(b))."
)
ONE_BATCH = (
    f"more than {_PATIENCE} steps were made on one batch, so manager.step() saved between two of them. A resume "
    "continues with the next batch."
)
SKIPPED = (
    "after the resume, {0} batches were read before the first step. The loader had already continued at batch {0}: if "
    "your script skips batches by hand, they are lost. Remove the skipping."
)
NO_TRAINING = (
    "a loop read the rest of the epoch after batch {0}, and trained on none of it. The next loop over it begins at "
    "batch {0} again. Evaluate under torch.no_grad(), and don't skip batches by hand."
)
REPEATED = (
    "training repeats batch {0} of this epoch. accelerator.load_state() starts the epoch over, as Accelerate does: "
    "call accelerator.skip_first_batches(loader, {1}), or manager.resume(), which continues there."
)
USED_UP = "all batches of epoch %d were used before the checkpoint, so this pass yields none."
UNCLAIMED = (
    "the checkpoint was saved in the middle of {0}, but training continued without it, so ckpt does not use that "
    "position."
)
ANOTHER_ORDER = (
    "the script finds its place in the data itself, and {0} draws a different order than before the resume. "
    "Call accelerator.skip_first_batches(loader, n) instead, which ckpt handles."
)
COUNTS_AGAIN = (
    "the run is in epoch {0}, but your script has not asked ckpt for the epoch: a loop that counts epochs from 0 "
    "trains for too long. Write `for epoch in manager.epochs(n)`, or `range(manager.progress.epoch, n)`."
)


class Pass:
    """One pass through a loader, from the loop's side."""

    def __init__(self, loader: Loader, own: MakeIterator | None) -> None:
        self.loader = loader
        self.own = own  # makes the loader's iterator, in a plain `for`
        self.key = ""
        self.tracked: TrackedLoader | None = None  # once it has begun
        self.saved: dict[str, Any] | None = None  # the position that it began at
        self.restores = 0  # loads before it began
        self.around: dict[int, int] = {}  # the batches that each open pass had handed out when it began
        self.batch = self.epoch = 0  # the loop's counts when it began
        self.samples = 0
        self.handed = False  # a batch, since it began
        self.fresh = 0  # batches that it has handed out since the last step
        self.first = 0  # batches before its first step, and between the last two
        self.per_step = 0
        self.trained = False  # since it began
        self.beside = False  # trained on in one step alone, which had batches of another pass too
        self.is_left = False  # by `break`, it seems
        self.instead: Pass | None = None  # that led the loop, over the same loader, and was left for this one
        self.leads = False  # the loop's iterations begin with its batches
        self.asked = False  # for a batch, since the last step
        self.again = 0  # batches that are handed out again, where the script skips them

    @property
    def announced(self) -> bool:
        """By `manager.batches`, not by a plain `for` over a loader that the manager was given."""
        return self.own is None


class Batches(Generic[T]):
    """An iterator over the batches that are left of an epoch. Its length is that of the epoch."""

    def __init__(self, loop: Loop, current: Pass, begin: Callable[[], None], start: int | None = None) -> None:
        self._loop = loop
        self._pass = current
        self._begin: Callable[[], None] | None = begin
        self._start = start
        self._batches = loop._through(current)

    def __iter__(self) -> Batches[T]:
        return self

    def __next__(self) -> T:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin()
        self._loop.ask(self._pass)
        number, batch = next(self._batches)
        result: T = batch if self._start is None else (self._start + number, batch)  # type: ignore[assignment]
        return result

    def __len__(self) -> int:
        if self._begin is not None:
            self._begin()
        return self._loop.length(self._pass)

    def close(self) -> None:
        """Leave the loop, and stop the workers that read ahead for it."""
        self._batches.close()
        self._loop.leave(self._pass)


class Loop:
    """Counts epochs, batches and steps, hands out the batches of loaders, and knows the loop's boundaries.

    A save inside a pass belongs to the middle of its epoch. A save made when all loaders of the epoch are at their end
    belongs to the end of the epoch: the next run begins with the next one.
    """

    def __init__(self, ranks: Ranks, named: Callable[[], Mapping[str, Loader]]) -> None:
        self.progress = Progress()
        self.caveats = Caveats(aloud=ranks.rank == MAIN)
        self.quiet = False  # an integration answers for the data
        self.at_boundary: Callable[[], None] = lambda: None  # takes what is due
        self.is_due = False
        self.before_pass: Callable[[], None] = lambda: None
        self.before_fetch: Callable[[], object] | None = None  # before each batch of a loader that has a name
        self.sets_iteration = False  # of Accelerate's loaders, which count their epochs: from 0 in a new process
        self.counts_updates = False  # a step is one of the first optimizer, and not a call of `manager.step`
        self.on_training: Callable[[int], None] = lambda epoch: None  # at the first step of an epoch, given its number
        self.has_data: Callable[[], bool] = lambda: False  # generators of the script's own, from which it may make data
        self._named = named
        self._followed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._loaders = EpochLoaders(ranks, named)
        self._world_size = ranks.world_size
        self._process = os.getpid()
        self._thread: int | None = None  # that the training loop runs in
        self._reads = False  # a loader is being read: loaders inside it are not the loop's
        self._open: list[Pass] = []
        self._ended: Pass | None = None  # at its end, before any step
        self._leader: Pass | None = None  # the last one that led the loop
        self._first_asked: Pass | None = None  # since the last step
        self._fed = False  # a followed batch was handed out since the last step
        self._idle = 0  # steps since a leading pass was asked for a batch
        self._unfed = 0  # steps in a row without a followed batch, after a pass has ended
        self._in_epochs = False  # inside `manager.epochs`
        self._left_epoch = False  # `manager.epochs` was left in an epoch
        self._outside_epochs = 0  # counted for passes outside of `manager.epochs`
        self._steps = 0  # of this epoch: calls of `manager.step`
        self._updates = 0  # of this epoch: steps of the first optimizer
        self._per_epoch: int | None = None  # steps of the epoch before
        self._trained_epoch: int | None = None  # the last one in which there was a step
        self._sees_steps = False
        self._calls_step = False  # the script calls `manager.step`: iterations end there, else with updates
        self._asked_epoch = True  # the script has read the progress of the checkpoint, or there is none
        self._is_resumed = False  # and nothing has been trained on since
        self._by_script = False  # the script finds its place in the data, after Accelerate's own `load_state`
        self._saved_rhythm: Mapping[str, Any] = {}
        self._restores = 0
        self._hooks: list[RemovableHandle] = []
        self.is_released = False
        self._first_optimizer: weakref.ref[torch.optim.Optimizer] | None = None

    def start(self) -> None:
        """The state has been resumed, in this thread: from now on, what is stepped is training."""
        self._thread = threading.get_ident()
        self.follow_named()

    # --- loaders that the manager was given: a plain `for` over them is followed

    def follow_named(self) -> None:
        """Follow the loaders that have a name by now."""
        for loader in () if self.is_released else self._named().values():
            if loader_info.follow(loader, self):
                self._followed.add(loader)

    def takes(self, loader: Loader) -> bool:
        """Whether this `for` is the training loop's. Where gradients are disabled it is evaluation; what another thread
        or another loader reads is ahead of the loop by an unknown number of batches."""
        here = self._process == os.getpid() and self._thread in (None, threading.get_ident())
        return here and not self._reads and torch.is_grad_enabled()

    def follow(self, loader: Loader, own: MakeIterator) -> Iterator[Any]:
        """A plain `for` over a loader: the rest of the epoch, if a position was saved for it, or all of it."""
        return Batches(self, Pass(loader, own), self.before_pass)

    # --- epochs and batches

    def epochs(self, total: int) -> Iterator[int]:
        if not isinstance(total, int) or total < 0:
            raise ConfigError(f"epochs() needs the total number of epochs, not {total!r}.")
        self._in_epochs = self._asked_epoch = True
        self._left_epoch = False
        self.progress.epoch -= self._outside_epochs  # of a loop before this one
        self._outside_epochs = 0
        ended = False
        try:
            while self.progress.epoch < total:
                yield self.progress.epoch
                self._next_epoch()
                self.boundary()
            ended = True
        finally:
            self._in_epochs, self._left_epoch = False, not ended

    def batches(self, loader: Iterable[T], begin: Callable[[], None], start: int | None = None) -> Batches[Any]:
        """Iterate over the rest of the epoch. Calls `begin` before the first batch. `start` numbers the batches.

        After a `go_back` in the middle of the epoch, the iteration continues at the new position."""
        if not isinstance(loader, Iterable):
            raise ConfigError(f"batches() needs a loader, but a {type(loader).__name__} is not iterable.")
        if isinstance(loader, _ONE_SHOT):
            name = type(loader).__name__
            raise ConfigError(
                f"batches() can't resume a {name} object, because it starts its loaders before ckpt can restore their "
                f"positions. Put batches() around each loader instead: {_rewritten(name)}."
            )
        return Batches(self, Pass(loader, None), begin, start)

    def length(self, current: Pass) -> int:
        """How many batches the epoch of a pass has."""
        return current.tracked.length if current.tracked is not None else self._loaders.length(current.loader)

    def _next_epoch(self) -> None:
        for current in list(self._open):
            self.leave(current)
        self._judge_ended()
        self._name_unclaimed()
        self.progress.epoch += 1
        self.progress.batch = 0
        self._outside_epochs += not self._in_epochs
        self._per_epoch = self._last_steps
        self._steps = self._updates = 0
        self._loaders.clear()

    @property
    def _last_steps(self) -> int | None:
        """The steps of this epoch, or of the one before."""
        return self._steps or self._updates or self._per_epoch

    def saved_batches(self, loader: Loader) -> int | None:
        """How many batches the next pass through a loader skips; none if no position was saved for it."""
        return self._loaders.saved_batches(loader)

    def owns(self, loader: Loader) -> bool:
        """Whether the loader has a name, and is followed."""
        return self._loaders.is_named(loader)

    def skip(self, loader: Loader, batches: int | None) -> None:
        """Let the next pass through a loader begin after so many batches, or at its saved position."""
        self._by_script = False
        if batches:  # of none, a place would be kept beside that of the pass
            self._loaders.next(loader)[1].skip(batches)
            self.progress.batch = batches

    def leave_place_to_script(self) -> None:
        """A checkpoint was loaded as Accelerate does: the next pass begins at the start of the epoch, whose batches up
        to the saved position are for the script to skip. A loader with a state of its own continues, as there, and so
        does a pass that the loop is in."""
        self._by_script = self._asked_epoch = True

    def _is_left_to_script(self, loader: Loader) -> bool:
        return self._by_script and not has_state(samplers.reader(loader))

    def forget_positions(self) -> None:
        """Drop what was saved of loaders: the next pass through each begins with its first batch."""
        self._loaders.clear()

    # --- passes

    def ask(self, current: Pass) -> None:
        """The script asks a pass for its next batch: the boundary of an iteration, if the pass leads the loop."""
        if self._thread not in (None, threading.get_ident()):
            self.caveats.note("prefetching", READ_AHEAD)
            return
        if self.before_fetch is not None and self._loaders.is_named(current.loader):
            self.before_fetch()
        if current.tracked is None:
            self._catch_up(current)
        elif current.leads:
            if current.is_left:
                self._come_back(current)
            self._idle = 0
            if self.is_due:
                self.at_boundary()
        current.asked = True
        if self._first_asked is None:
            self._first_asked = current

    def boundary(self) -> None:
        """An epoch, the loop or the manager ends."""
        if self.is_due:
            self.at_boundary()

    def _catch_up(self, current: Pass) -> None:
        """A pass begins: one before it over the same loader has ended, or was left, unless this is evaluation. Outside
        of `epochs`, a loader that is read again begins the next epoch. So it does where the script finds its place, and
        nothing is left of the saved epoch."""
        loader = current.loader
        while before := [other for other in self._open if other.loader is loader and self._is_over_for(other)]:
            self._pass_over(before[-1])
            current.instead = before[-1] if before[-1].leads and before[-1].trained else None
        alone = self._is_alone
        self._judge_ended()
        if alone and not self._in_epochs:
            if self._loaders.was_trained_on(loader):
                self._next_epoch()
            if self._leader is not None and self._leader.loader is loader:
                self.boundary()
        if alone and self._is_left_to_script(loader) and self._loaders.is_used_up(loader):
            epoch = self.progress.epoch
            for _ in self._through(Pass(loader, current.own)):  # no batch: it takes the generators to the epoch's end
                pass
            if self.progress.epoch == epoch:
                self._next_epoch()

    @staticmethod
    def _is_over_for(before: Pass) -> bool:
        """Whether a pass that begins now over the same loader shows that one before was left. Evaluation does not."""
        return torch.is_grad_enabled() or not before.leads

    @property
    def _is_alone(self) -> bool:
        """Whether no open pass leads the loop."""
        return not any(current.leads for current in self._open)

    def leave(self, left: Pass) -> None:
        """A pass was left, or seems so."""
        if left.tracked is not None and not left.is_left:
            left.is_left = True
            self._end(left)

    def _pass_over(self, left: Pass) -> None:
        """A pass was left for another. If they were read side by side in one step alone, it was no part of the loop."""
        assert left.tracked is not None
        if left.beside:
            left.trained = left.tracked.trained = False
        self.leave(left)
        if not left.trained and (left.around or left.beside):
            self._loaders.drop(left.tracked)

    def _come_back(self, current: Pass) -> None:
        """A pass that seemed left hands out a batch: what led the loop meanwhile was inside it, or in turn with it."""
        assert current.tracked is not None
        self._judge_ended()
        if not current.is_left:  # that was what had begun since, and it was no training
            return
        current.is_left = False
        self._open.append(current)
        self._loaders.by_key[current.key] = current.tracked
        if not current.trained:
            self.progress.samples += current.samples
        if current.leads and not self._in_epochs:
            self._outside_epochs -= self.progress.epoch - current.epoch
            self.progress.epoch, self.progress.batch = current.epoch, current.tracked.batches_handed_out
        if current.leads and self._leader is not current:
            self.caveats.note("data", IN_TURN)

    def _through(self, current: Pass) -> Generator[tuple[int, Any], None, None]:
        """Each batch with its number in the epoch."""
        while True:
            tracked = self._begin(current)
            if current.again:
                yield from enumerate(self._read(current, tracked.from_start(current.saved or {})))
                current.again = 0
            for batch in self._read(current, tracked):
                yield tracked.batches_handed_out - 1, batch
                del batch
                if current.restores != self._restores:  # a checkpoint was loaded meanwhile, into this very pass
                    self._end(current)
                    self._by_script = False
                    break
            else:
                self._finish(current, tracked)
                return

    def _finish(self, current: Pass, tracked: TrackedLoader) -> None:
        """A pass is at the end of its loader: so is the epoch, if it led the loop."""
        if current.is_left:
            return
        self._end(current)
        # a resume at the very end of an epoch hands out nothing of it: the epoch was trained on before
        was_over = current.saved is not None and tracked.trained and not current.handed
        is_training = current.trained or was_over or not self._sees_steps
        if is_training and not self._in_epochs and self._is_alone:
            outside = self._outside_epochs
            self._next_epoch()
            if was_over:  # the checkpoint's own epoch, which `epochs` counts from
                self._outside_epochs = outside

    def _begin(self, current: Pass) -> TrackedLoader:
        current.key, tracked, current.saved = self._loaders.next(current.loader)
        if not tracked.has_saved_position and not self._open:
            self.progress.batch = 0
        current.tracked, current.batch, current.epoch = tracked, self.progress.batch, self.progress.epoch
        current.fresh = current.samples = current.first = 0
        current.trained = current.handed = current.beside = current.is_left = False
        current.restores = self._restores
        current.around = self._handed_out()
        if current.saved is not None and not tracked.is_over and self._is_left_to_script(current.loader):
            current.again = tracked.batches_handed_out
        self._open.append(current)
        if self._is_resumed and self.sets_iteration and hasattr(current.loader, "iteration"):
            current.loader.iteration = self.progress.epoch
        return tracked

    def _handed_out(self) -> dict[int, int]:
        """By each open pass."""
        return {id(other): other.tracked.batches_handed_out for other in self._open if other.tracked is not None}

    def _read(self, current: Pass, tracked: TrackedLoader) -> Generator[Any, None, None]:
        """The batches of a tracked loader, counted. Those that it hands out again are neither counted nor kept."""
        taken = tracked.take(self.progress.epoch, announced=current.announced, make_iterator=current.own)
        left = current.again if tracked is not current.tracked else None
        while left is None or left > 0:
            self._reads, before = True, self._reads
            try:
                found = next(taken, None)
            finally:
                self._reads = before
            if found is None:
                break
            batch, samples = found
            del found  # or it would live as long as the next batch takes
            if current.is_left:
                self._come_back(current)
            current.fresh += 1
            self._fed = current.handed = True
            if left is None:
                self.progress.batch += not any(id(other) in current.around for other in self._open)
                current.samples += samples * self._world_size
                self.progress.samples += samples * self._world_size
            else:
                left -= 1
            yield batch
            del batch

    def _end(self, ended: Pass) -> None:
        """A pass has ended, or was left, or a checkpoint was loaded meanwhile."""
        tracked, restored = ended.tracked, ended.restores != self._restores
        assert tracked is not None
        self._open = [other for other in self._open if other is not ended]
        if self._first_asked is ended:  # it leads no more: the pass that comes next does
            self._first_asked = None
        self._drop_if_nested(ended, tracked)
        if restored or ended.trained or not self._sees_steps:
            return
        self.progress.samples -= ended.samples  # of no training
        if ended.fresh and tracked.done and not ended.around:
            self._ended = ended  # its last batches may be trained on yet
        else:
            self._end_untrained(ended, tracked)

    def _judge_ended(self) -> None:
        """Another pass begins, or another epoch: a pass that has ended by now without a step was no training."""
        ended, self._ended = self._ended, None
        if ended is not None and ended.tracked is not None and not ended.trained:
            self._end_untrained(ended, ended.tracked)

    def _end_untrained(self, ended: Pass, tracked: TrackedLoader) -> None:
        instead, ended.instead = ended.instead, None
        if instead is not None and instead.is_left:
            self._loaders.drop(tracked)
            self._come_back(instead)
            return
        if ended.saved is not None and (ended.samples or ended.again) and not ended.announced:
            self._loaders.put_back(ended.key, tracked, ended.saved)
            self.progress.batch = ended.batch
            self.caveats.differs("data", NO_TRAINING.format(ended.batch))
        elif ended.saved is not None and tracked.done and not ended.handed:
            if not (self._by_script or self._in_epochs or self.quiet):
                _log.info(USED_UP, self.progress.epoch)
        elif not ended.announced and not tracked.has_saved_position and ended.saved is None:
            self._loaders.drop(tracked)
            self.progress.batch = ended.batch

    def _drop_if_nested(self, ended: Pass, tracked: TrackedLoader) -> None:
        """A pass inside one step of another, as for validation, is over with that step: its position is not kept.

        Loaders that are read side by side are another thing: each moves on while the other is open.
        """
        if ended.around.items() & self._handed_out().items():
            self._loaders.drop(tracked)

    # --- steps

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Notice the steps of these optimizers: passes in which one is stepped are training."""
        for optimizer in optimizers:
            self._sees_steps = True
            self._first_optimizer = self._first_optimizer or weakref.ref(optimizer)
            self._hooks.append(optimizer.register_step_post_hook(weakly(self._updated)))

    def stepped(self) -> bool:
        """`manager.step` was called. Returns whether a boundary follows, at which to take what is due; otherwise it
        must be taken now."""
        self._sees_steps = True
        self._thread = threading.get_ident()
        self._mark_training()
        self._steps += 1
        if not self.counts_updates:
            self.progress.step += 1
        fed, self._fed = self._fed, False
        led = self._is_led(calls_step=True)
        if not (fed or led):
            return self._stepped_alone()
        self._unfed = 0
        self._idle += 1
        if led and self._idle > _PATIENCE:
            self.caveats.note("data", ONE_BATCH)
            return False
        return True

    def _is_led(self, *, calls_step: bool) -> bool:
        """Whether an open pass leads the loop: its iterations begin with a batch of that pass, the first that it asks
        for after a step."""
        asked, self._first_asked = self._first_asked, None
        first, self._calls_step = calls_step and not self._calls_step, self._calls_step or calls_step
        leaders = [current for current in self._open if current.leads]
        still = any(current.asked for current in leaders)
        for current in self._open:
            current.asked = False
        if asked is None or still or (first and leaders) or asked not in self._open:
            return bool(leaders)
        for left in leaders:
            self._pass_over(left)
        assert asked.tracked is not None
        if leaders:
            self.progress.batch = asked.tracked.batches_handed_out
        asked.leads, self._leader = True, asked
        return True

    def _stepped_alone(self) -> bool:
        """A step without a batch of any followed loader. In `epochs` the first step of an epoch without one waits for
        the end of the epoch, which it may be all of."""
        ended, self._unfed = self._leader, self._unfed + 1
        if self._in_epochs and self._steps == 1 and not self._loaders.by_key:
            return True
        if ended is None:
            self._note_unfollowed()
        elif ended.first > ended.per_step > 0 and ended.tracked is not None and ended.tracked.done:
            self.caveats.note("prefetching", READ_AHEAD)
        elif self._unfed > 1 and not self.quiet:
            self.caveats.note("data", CYCLED)
            if self._restores:
                self.caveats.differs("data", CYCLED)
        return False

    def _note_unfollowed(self) -> None:
        if self._by_script or self.quiet:
            return
        if self._in_epochs or self.has_data():
            self.caveats.tell("in step", IN_STEP)
        else:
            self.caveats.note("data", NOT_FOLLOWED)

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        first = self._first_optimizer is not None and self._first_optimizer() is optimizer
        if first:
            self._updates += 1
            self.progress.step += self.counts_updates
        self._mark_training()
        if first and not self._calls_step:
            self._is_led(calls_step=False)
        if first and self._thread is not None and self._leader is None and not (self._fed or self._in_epochs):
            self._note_unfollowed()

    def _mark_training(self) -> None:
        """An optimizer was stepped: on what every open pass has handed out since the last step."""
        ended, self._ended = self._ended, None
        if ended is not None:
            self.progress.samples += ended.samples
        fresh = [current for current in (*self._open, ended) if current is not None and current.fresh]
        for current in fresh:
            current.beside = len(fresh) > 1 and not current.trained
            self._mark(current)
        if self._thread is not None:
            if self.progress.epoch != self._trained_epoch:
                self._trained_epoch = self.progress.epoch
                self.on_training(self.progress.epoch)
            if self._is_alone and not (fresh or self._fed):
                self._drop_unread()

    def _mark(self, current: Pass) -> None:
        fresh, current.fresh = current.fresh, 0
        assert current.tracked is not None
        if current.again:
            text = REPEATED.format(fresh - 1, current.tracked.batches_handed_out)
            self.caveats.differs("data", text)
        current.tracked.trained = True
        if current.trained:
            current.per_step = fresh
            return
        current.trained, current.first, self._is_resumed = True, fresh, False
        self._compare_rhythm(current)
        if self._asked_epoch or self._in_epochs or self.quiet or not self.progress.epoch:
            return
        self._asked_epoch = True
        self.caveats.differs("epoch", COUNTS_AGAIN.format(self.progress.epoch))

    def _compare_rhythm(self, current: Pass) -> None:
        """The first step after a resume in the middle of a pass: batches that the loop did not train on may be lost."""
        per_step, ahead = self._saved_rhythm.get("per_step"), self._saved_rhythm.get("ahead", 0)
        if current.saved is None:
            return
        self._saved_rhythm = {}
        if not per_step or self._by_script or self.quiet:
            return
        before = current.saved.get("before", 0) + current.saved.get("batches", 0)
        unused = current.first - per_step
        if unused > 0 and unused == before:
            self.caveats.differs("data", SKIPPED.format(before))
        elif unused > 0 and unused == ahead:
            self.caveats.differs("data", READ_AHEAD)

    # --- saved positions that nobody claims

    def _drop_unread(self) -> None:
        """Training continues with other data than the checkpoint was in the middle of: a position that was used later
        would leave out batches of another epoch."""
        for key, loader in self._loaders.drop_unread().items():
            if self.quiet:
                continue
            if not self._by_script:
                self.caveats.differs("data", UNCLAIMED.format(key))
            elif loader is not None and not keeps_order(loader):
                self.caveats.differs("data", ANOTHER_ORDER.format(type(loader).__name__))

    def _name_unclaimed(self) -> None:
        """An epoch is over: positions that were saved in it and that no loader has claimed are lost."""
        for key in self._loaders.unclaimed.positions if self._steps or self._updates else ():
            if not self.quiet:
                self.caveats.differs("data", UNCLAIMED.format(key))

    # --- state

    def note_asked(self) -> None:
        """The script has asked where the checkpoint was."""
        self._asked_epoch = True

    def saved_progress(self) -> Progress:
        """Where the next run will begin. A pass inside an iteration, on which nothing was trained, is no part of it."""
        self._judge_ended()
        for inside in [] if self._is_alone else [current for current in self._open if not current.trained]:
            self._pass_over(inside)
        if not self._loaders.unclaimed.positions and self._is_over():
            return Progress(self.progress.epoch + 1, 0, self.progress.step, self.progress.samples)
        return self.progress

    def _is_over(self) -> bool:
        """Whether the loop is at the end of its epoch: all its loaders are; without one, it has made as many steps as
        the epoch before, or one."""
        if self._loaders.by_key:
            return self._loaders.done
        steps = self._steps or self._updates
        known = self._per_epoch is not None or self._steps <= 1
        return (self._in_epochs or self._left_epoch) and known and steps >= (self._per_epoch or 1)

    def state(self) -> dict[str, Any]:
        """The position of each loader that was read in this epoch, or for which one was restored."""
        if self.saved_progress() is not self.progress:
            return {}
        return self._loaders.state()

    def seen(self) -> dict[str, Any]:
        """What a run that resumes must know of the loop."""
        leader = self._leader if self._leader is not None and self._leader.per_step else None
        rhythm = {"per_step": leader.per_step, "ahead": max(0, leader.first - leader.per_step)} if leader else {}
        return {
            "remarks": {**self.caveats.lasting, **self._uncertain()},
            "steps_per_epoch": self._per_epoch if self.saved_progress() is self.progress else self._last_steps,
            "plain_epochs": self._outside_epochs,
            **rhythm,
        }

    def _uncertain(self) -> dict[str, str]:
        """Of a save in an epoch without a loader: that it begins again, or that it may not have been over."""
        steps = self._steps or self._updates
        without_loader = (self._in_epochs or self._left_epoch) and not self._loaders.by_key
        if not (without_loader and steps) or self.quiet:
            return {}
        if not self._is_over():
            return {"epoch": EPOCH_STEPS.format(steps)}
        return {"epoch": ONE_STEP} if self._per_epoch is None else {}

    def go_back(self, progress: Progress, unclaimed: UnclaimedPositions, seen: Mapping[str, Any]) -> None:
        """Continue from saved positions. A loader claims its own when it is iterated over."""
        self.progress = progress
        self._restores += 1
        self.caveats.resumed(unclaimed.approximated)
        unclaimed.approximated.update(seen.get("remarks", {}))
        self._per_epoch, self._saved_rhythm = seen.get("steps_per_epoch"), seen
        self._outside_epochs = seen.get("plain_epochs", 0)
        self._asked_epoch = self._by_script = False
        self._is_resumed = True
        self._left_epoch = self._fed = False
        self._steps = self._updates = self._unfed = 0
        self._leader = self._ended = None
        self._loaders.go_back(unclaimed)

    def begins_at(self) -> str:
        """Where the next pass through each loader begins, for the console."""
        return self._loaders.begins_at()

    def rewind_rng(self) -> None:
        self._loaders.unclaimed.rewind_rng()

    def release(self) -> None:
        """Give loaders their classes and samplers back, and remove all hooks from optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for loader in self._followed:
            loader_info.unfollow(loader, self)
        self._loaders.release()
        self.is_released = True

    def refuse_released(self, call: str) -> None:
        """Raise if the manager was closed."""
        if self.is_released:
            raise ConfigError(
                f"you called {call} on a closed StateManager, which no longer follows loaders and optimizers: a save "
                f"would record the wrong position in the data. Build a new manager for the same objects and root, and "
                f"resume."
            )


def _rewritten(name: str) -> str:
    if name == "enumerate":
        return "manager.enumerate(loader)"
    if name == "cycle":
        return "`while True:` around `for batch in manager.batches(loader):`"
    given = {"zip": "manager.batches(a), manager.batches(b)", "map": "function, manager.batches(loader)"}
    return f"{name}({given.get(name, 'manager.batches(loader), ...')})"
