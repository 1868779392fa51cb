"""The training loop: its epochs and counts, the plain `for` over a loader, and what of both is saved and restored."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ckpt.data.batches import Batches
from ckpt.data.epoch_loaders import PLAIN, EpochLoaders, UnclaimedPositions
from ckpt.data.loader_hook import MakeIterator
from ckpt.data.loader_info import Loader
from ckpt.data.loader_matching import epoch_variable, skips_by_itself
from ckpt.data.loop_patterns import LoopPatterns
from ckpt.data.passes import FindIterator, Passes
from ckpt.data.progress import Progress
from ckpt.data.training_thread import TrainingThread
from ckpt.errors import ConfigError
from ckpt.ranks.group import MAIN, Ranks
from ckpt.state.caveats import Caveats

T = TypeVar("T")
Handout = TypeVar("Handout")


class Loop:
    """Counts epochs, batches and steps, and hands out the batches of loaders so that their positions are known.

    A save inside `batches` belongs to the middle of its epoch. A save made when all loaders of the epoch are at their
    end belongs to the end of the epoch: the next run begins with the next one. So does a save in an epoch without a
    loader, when it has made as many steps as the epoch before.
    """

    def __init__(
        self, ranks: Ranks, named: Callable[[], Mapping[str, Loader]], *, follow: bool = True, others: bool = False
    ) -> None:
        """`follow`: whether a plain `for` over the named loaders is followed; with `others`, over any DataLoader."""
        self.before_pass: Callable[[], None] = lambda: None  # before a plain `for` reads a loader
        self.before_fetch: Callable[[], object] = lambda: None  # before each batch of a named one that it reads
        self.counts_updates = False  # a step is one of the first optimizer, and not a call of `manager.step`
        self.models: Callable[[], Iterable[nn.Module]] = lambda: ()
        self.on_training: Callable[[int], None] = lambda epoch: None  # after every step, given the epoch
        self.has_data: Callable[[], bool] = lambda: False  # generators of the script's own, from which it may make data
        self.patterns = LoopPatterns(Caveats(aloud=ranks.rank == MAIN), quiet=not follow)
        self.follows = follow
        self._others = follow and others
        self._thread = TrainingThread()
        self._announces = False  # the loop uses `batches`, which counts its epochs
        self._loaders = EpochLoaders(ranks, named)
        self._passes = Passes(self._loaders, self.patterns, ranks.world_size)
        self._restores = 0
        self._hooks: list[RemovableHandle] = []
        self._is_released = False
        self._first_optimizer: weakref.ref[torch.optim.Optimizer] | None = None

    @property
    def progress(self) -> Progress:
        return self._passes.progress

    def start(self) -> None:
        """The state has been resumed, in this thread: from now on, what is stepped is training."""
        self._thread.start()

    # --- epochs and batches

    def epochs(self, total: int) -> Iterator[int]:
        if not isinstance(total, int) or total < 0:
            raise ConfigError(f"epochs() takes the number of epochs in all, not {total!r}.")
        self._passes.in_epochs = True
        if not any(key.startswith(PLAIN) for key in self._loaders.unclaimed.positions):
            self.progress.epoch -= self.patterns.plain_epochs  # of a loop before this one
            self.patterns.plain_epochs = 0
        try:
            while self.progress.epoch < total:
                yield self.progress.epoch
                self._next_epoch()
        finally:
            self._passes.in_epochs = False

    def batches(
        self, loader: Iterable[T], begin: Callable[[], None], each: Callable[[int, T], Handout]
    ) -> Batches[Handout]:
        """The rest of the epoch, as `each` makes it of a number and a batch. `begin` is called before the first. After
        a `go_back` in the middle, it continues from there.
        """
        if not isinstance(loader, Iterable):
            raise ConfigError(f"batches() takes a loader, and a {type(loader).__name__} cannot be iterated over.")

        def through(found: FindIterator) -> Iterator[Handout]:
            begin()
            self._announces = True
            for number, batch in self._through(loader, found):
                yield each(number, batch)
            if not self._passes.in_epochs and not self._loaders.open:
                self._next_epoch()

        def length() -> int:
            begin()
            return self._loaders.left(loader, announced=True)

        return Batches.made(through, length)

    def _next_epoch(self, *, plain: bool = False) -> None:
        self.progress.epoch += 1
        self.progress.batch = 0
        self.patterns.ends_epoch(plain=plain)
        self._loaders.clear()

    def saved_batches(self, loader: Loader) -> int | None:
        """How many batches the next pass through a loader skips; none if no position was saved for it."""
        return self._loaders.saved_batches(loader)

    def skip(self, loader: Loader, batches: int, *, announced: bool = False) -> None:
        """Let the next pass through a loader begin after so many batches."""
        self._passes.next_loader(loader, announced=announced)[1].skip(batches)
        self.progress.batch = batches

    def forget_positions(self) -> None:
        """Drop what was saved of loaders: the next pass through each begins with its first batch."""
        self._loaders.clear()

    # --- a plain `for` over a loader (see `loader_hook.Follower`)

    def owns(self, loader: Loader) -> bool:
        """Whether a plain `for` over a loader is to be followed, because the loader has a name."""
        if self._thread.may_be_here() and skips_by_itself(loader):
            self._loaders.give_up(loader)
        return self.follows and self._thread.may_be_here() and self._loaders.is_named(loader)

    def takes(self, loader: Loader) -> bool:
        """Whether a plain `for` over a loader without a name may be training, and can be followed."""
        safe = self._others and self._thread.is_known and self._thread.may_be_here()
        return safe and getattr(loader, "in_order", True) and not skips_by_itself(loader)

    def follow(self, loader: Loader, own: MakeIterator) -> Iterator[Any]:
        """A plain `for` over a loader: the rest of the epoch, if a position was saved for it, or all of it."""
        length = lambda: self._loaders.left(loader, announced=False)  # noqa: E731
        named = self._loaders.is_named(loader)
        before = (lambda: self.before_fetch()) if named else None  # it may be set later
        return Batches.made(lambda found: self._follow_through(loader, own, found), length, before)

    def _follow_through(self, loader: Loader, own: MakeIterator, found: FindIterator) -> Iterator[Any]:
        """Outside of `epochs` this is an epoch: until its end or, where it is left, until the loop iterates over the
        loader again. But if no optimizer was stepped meanwhile it was no training, and is not counted.
        """
        self.before_pass()
        counts = not self._passes.in_epochs and not self._announces
        plain = not self._loaders.is_named(loader)
        self._catch_up(loader, own, found, counts=counts, plain=plain)
        restores, batch = self._restores, self.progress.batch
        try:
            for _, handed_out in self._through(loader, found, own=own):
                yield handed_out
        finally:
            over = self._loaders.over(loader).values()
            if not any(tracked.trained for tracked in over) and restores == self._restores:
                self._loaders.drop(*over)
                self.progress.batch = batch
            elif all(tracked.done for tracked in over) and counts and not self._loaders.open:
                self._next_epoch(plain=plain)

    def _catch_up(self, loader: Loader, own: MakeIterator, found: FindIterator, *, counts: bool, plain: bool) -> None:
        """Bring the count of epochs to that of the pass that begins: one that was left is over, and so is a saved one
        of which nothing is left."""
        if self._loaders.over(loader) and counts and not self._loaders.open:
            self._next_epoch(plain=plain)
        if counts and self._loaders.is_used_up(loader) and self.patterns.is_ahead(self.progress, epoch_variable()):
            for _ in self._through(loader, found, own=own):  # no batch: it takes the generators to where they were
                pass
            self._next_epoch(plain=plain)
        if plain and counts and self.patterns.resumed and hasattr(loader, "iteration"):
            loader.iteration = self.progress.epoch  # Accelerate's loaders count their epochs, from 0 in a new process

    def _through(
        self, loader: Loader, found: FindIterator, own: MakeIterator | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Each batch with its number in the epoch. `own` makes the iterator of a loader in a plain `for`."""
        restores, handed = -1, None
        while restores != self._restores:
            restores = self._restores
            around = {id(tracked): tracked.batches_handed_out for tracked in self._loaders.open}
            current = self._passes.begin(loader, found, handed, self.models, announced=own is None)
            again = False
            try:
                # no variable for the iterator: where the loop is left, it must be closed before the pass ends
                for batch, samples in self._thread.read(
                    current.tracked.take(self.progress.epoch, announced=current.announced, make_iterator=own)
                ):
                    self.patterns.hands_out()
                    self._passes.count(current, samples, nested=bool(around))
                    current.handed.hand_out(batch)
                    yield current.tracked.batches_handed_out - 1, batch
                    again = current.may_go_back and current.handed.goes_back()
                    if restores != self._restores or again:
                        break
                else:
                    again = current.may_go_back and current.handed.goes_back(exhausted=True)
            finally:
                self._passes.end(current, around, again=again, restored=restores != self._restores)
            if again:
                restores, handed = -1, current.handed

    # --- steps

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Notice the steps of these optimizers: passes in which one is stepped are training."""
        method = weakref.WeakMethod(self._updated)  # an optimizer may outlive the manager

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            found = method()
            if found is not None:
                found(optimizer)

        for optimizer in optimizers:
            self._passes.sees_steps = True
            self._first_optimizer = self._first_optimizer or weakref.ref(optimizer)
            self._hooks.append(optimizer.register_step_post_hook(after_step))

    def stepped(self) -> None:
        """`manager.step` was called."""
        self.refuse_released("step()")
        self._passes.sees_steps = True
        self._mark_training()
        self.progress.step += 0 if self.counts_updates else 1
        self.patterns.stepped(fed=self._loaders.begun, in_epochs=self._passes.in_epochs, has_data=self.has_data())

    def _updated(self, optimizer: torch.optim.Optimizer) -> None:
        self._mark_training()
        if self._first_optimizer is not None and self._first_optimizer() is optimizer:
            self.progress.step += 1 if self.counts_updates else 0
            if self._thread.is_known:
                fed, in_epochs = self._loaders.begun, self._passes.in_epochs
                self.patterns.updated(fed=fed, in_epochs=in_epochs, has_data=self.has_data())

    def _mark_training(self) -> None:
        self._passes.mark_training()
        if self._thread.is_known:
            self.on_training(self.progress.epoch)
            self._passes.mark_training_outside()

    # --- state

    def saved_progress(self) -> Progress:
        """Where the next run will begin."""
        if not self._loaders.unclaimed.positions and self._is_over():
            return Progress(self.progress.epoch + 1, 0, self.progress.step, self.progress.samples)
        return self.progress

    def _is_over(self) -> bool:
        """Whether the loop is at the end of its epoch."""
        if self._loaders.by_key:
            return self._loaders.done
        return self._passes.in_epochs and self.patterns.is_over()

    def state(self) -> dict[str, Any]:
        """The position of each loader that was read in this epoch, or for which one was restored."""
        if self.saved_progress() is not self.progress:
            return {}
        return self._loaders.state(self._passes.usage)

    def seen(self) -> dict[str, Any]:
        """The patterns of the loop, to be saved."""
        without_loader = self._passes.in_epochs and not self._loaders.by_key
        return self.patterns.state(without_loader=without_loader, over=self._is_over())

    def go_back(self, progress: Progress, unclaimed: UnclaimedPositions, seen: Mapping[str, Any]) -> None:
        """Continue from saved positions. A loader claims its own when it is iterated over."""
        self._passes.progress = progress
        self._restores += 1
        self.patterns.go_back(seen, unclaimed.approximated)
        self._loaders.go_back(unclaimed, named=self.follows)

    def begins_at(self) -> str:
        """Where the next pass through each loader begins, for the console."""
        return self._loaders.begins_at()

    def rewind_rng(self) -> None:
        self._loaders.unclaimed.rewind_rng()

    def release(self) -> None:
        """Remove all hooks from loaders and optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._loaders.release()
        self._is_released = True

    def refuse_released(self, call: str) -> None:
        """Raise if the manager was closed."""
        if self._is_released:
            raise ConfigError(
                f"{call} on a StateManager that is closed: it follows loaders and optimizers no more, so a save would "
                "not know where the data is. Build a new one for the same objects and root, which resumes."
            )
