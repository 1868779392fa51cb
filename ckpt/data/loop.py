"""The training loop's own state: progress, and where each loader is."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ckpt.data.batch_usage import BatchUsage, Handed
from ckpt.data.batches import Batches, is_enumerated
from ckpt.data.epoch_loaders import PLAIN, Feeds, Waiting
from ckpt.data.loader_hook import MakeIterator
from ckpt.data.loader_matching import epoch_variable, skips_by_itself
from ckpt.data.loop_patterns import NESTED, NO_TRAINING, OTHER_LOADER, READ_AHEAD, LoopPatterns
from ckpt.data.progress import Progress
from ckpt.data.tracked_loader import TrackedLoader
from ckpt.errors import ConfigError
from ckpt.ranks.group import MAIN, Ranks
from ckpt.state.caveats import Caveats

T = TypeVar("T")
Handout = TypeVar("Handout")


@dataclass
class Pass:
    """One time through a loader, from the loop's side."""

    key: str
    feed: TrackedLoader
    saved: dict[str, Any] | None  # the position that it began at
    handed: Handed
    announced: bool
    iterator: Callable[[], Any]  # what the script holds
    batch: int  # the loop's count when it began
    samples: int = 0
    fresh: bool = False  # it has handed out a batch since the last step
    trained: bool = False  # since it began, or went on
    counted: int | None = None  # by the script: its epoch

    @property
    def may_go_back(self) -> bool:
        """Whether the script may skip by hand what the loader has left out: training, which it did not announce."""
        return not self.announced and self.saved is not None and bool(self.saved.get("trained"))


class Loop:
    """Counts, and goes through loaders so that it can say where they are.

    A save inside `batches` belongs to the middle of its epoch. One made when the loaders of the epoch have been gone
    through belongs to its end: the next run begins with the next epoch. So does one made in an epoch without a loader,
    when it has made as many steps as the one before.
    """

    def __init__(
        self, ranks: Ranks, named: Callable[[], Mapping[str, Any]], *, follow: bool = True, others: bool = False
    ) -> None:
        """`follow`: whether a plain `for` over the named loaders is followed; with `others`, over any DataLoader."""
        self.progress = Progress()
        self.before_pass: Callable[[], None] = lambda: None  # before a plain `for` goes through a loader
        self.counts_updates = False  # a step is one of the first optimizer, and not a call of `manager.step`
        self.models: Callable[[], Iterable[nn.Module]] = lambda: ()
        self.on_training: Callable[[int], None] = lambda epoch: None  # after every step, given the epoch
        self.has_data: Callable[[], bool] = lambda: False  # generators of the script's own, from which it may make data
        self.habits = LoopPatterns(Caveats(aloud=ranks.rank == MAIN), quiet=not follow)
        self._ranks = ranks
        self._follow = follow
        self._others = follow and others
        self._live: tuple[int, int] | None = None  # the process and thread of the training, once it is resumed
        self._in_epochs = False
        self._announces = False  # the loop goes through `batches`, which count its epochs
        self._feeds = Feeds(ranks, named)
        self._passes: list[Pass] = []  # that are open
        self._ended: Pass | None = None  # the last one that was trained on
        self._pulling = False
        self._jumps = 0
        self._hooks: list[Any] = []
        self._first: weakref.ref[torch.optim.Optimizer] | None = None
        self._signalled = False  # steps are seen: a pass without one was no training

    def start(self) -> None:
        """The state has been resumed, in this thread: from now on, what is stepped is training."""
        self._live = (os.getpid(), threading.get_ident())

    def epochs(self, total: int) -> Iterator[int]:
        if not isinstance(total, int):
            raise ConfigError(f"epochs() takes the number of epochs in all, not {total!r}.")
        self._in_epochs = True
        if not any(key.startswith(PLAIN) for key in self._feeds.waiting.positions):
            self.progress.epoch -= self.habits.plain_epochs  # of a loop before this one
            self.habits.plain_epochs = 0
        try:
            while self.progress.epoch < total:
                yield self.progress.epoch
                self._next_epoch()
        finally:
            self._in_epochs = False

    def batches(
        self, loader: Iterable[T], begin: Callable[[], None], each: Callable[[int, T], Handout]
    ) -> Batches[Handout]:
        """The rest of the epoch, as `each` makes it of a number and a batch. `begin` is called before the first. If
        `go_back` is called meanwhile, it goes on from there.
        """
        if not isinstance(loader, Iterable):
            raise ConfigError(f"batches() goes through a loader, and a {type(loader).__name__} cannot be gone through.")

        def through(found: Callable[[], Any]) -> Iterator[Handout]:
            begin()
            self._announces = True
            for number, batch in self._through(loader, found):
                yield each(number, batch)
            if not self._in_epochs and not self._feeds.open:
                self._next_epoch()

        def length() -> int:
            begin()
            return self._feeds.left(loader, announced=True)

        return Batches.made(through, length)

    def owns(self, loader: Any) -> bool:
        """Whether a plain `for` over a loader is to be followed, because it goes by a name."""
        if self._is_at_home() and skips_by_itself(loader):
            self._feeds.give_up(loader)
        return self._follow and self._is_at_home() and self._feeds.is_named(loader)

    def takes(self, loader: Any) -> bool:
        """Whether a plain `for` over a loader without a name may be training, and can be followed."""
        safe = self._others and self._live is not None and self._is_at_home()
        return safe and getattr(loader, "in_order", True) and not skips_by_itself(loader)

    def _is_at_home(self) -> bool:
        """Whether this may be the training loop: where gradients are disabled it is evaluation, and what another
        thread or a worker reads is ahead of the loop, no one knows how far."""
        here = (os.getpid(), threading.get_ident())
        return not self._pulling and self._live in (None, here) and torch.is_grad_enabled()

    def follow(self, loader: Any, own: MakeIterator) -> Iterator[Any]:
        """A plain `for` over a loader: what is left of the epoch, if a position waits for it, or all of it."""
        length = lambda: self._feeds.left(loader, announced=False)  # noqa: E731
        return Batches.made(lambda found: self._follow_through(loader, own, found), length)

    def _follow_through(self, loader: Any, own: MakeIterator, found: Callable[[], Any]) -> Iterator[Any]:
        """Outside of `epochs` it is an epoch: until its end or, where it is left, until the loop comes to the loader
        again. But if no optimizer was stepped meanwhile it was no training, and leaves no trace.
        """
        self.before_pass()
        counts = not self._in_epochs and not self._announces
        plain = not self._feeds.is_named(loader)
        if self._feeds.over(loader) and counts and not self._feeds.open:
            self._next_epoch(plain=plain)
        if counts and self._feeds.is_used_up(loader) and self.habits.is_ahead(self.progress, epoch_variable()):
            for _ in self._through(loader, found, own=own):  # nothing: it takes the generators to where they were
                pass
            self._next_epoch(plain=plain)
        if plain and counts and self.habits.resumed and hasattr(loader, "iteration"):
            loader.iteration = self.progress.epoch  # Accelerate's loaders count their epochs, from 0 in a new process
        jumps, batch = self._jumps, self.progress.batch
        try:
            for _, one in self._through(loader, found, own=own):
                yield one
        finally:
            over = self._feeds.over(loader).values()
            if not any(feed.trained for feed in over) and jumps == self._jumps:
                self._feeds.drop(*over)
                self.progress.batch = batch
            elif all(feed.done for feed in over) and counts and not self._feeds.open:
                self._next_epoch(plain=plain)

    def waits_for(self, loader: Any) -> int | None:
        """How many batches a loader will leave out when it is gone through next; none if it waits at no position."""
        return self._feeds.waits_for(loader)

    def skip(self, loader: Any, batches: int) -> None:
        """Let the next time through a loader begin after so many batches."""
        self._next_feed(loader, announced=False)[1].skip(batches)
        self.progress.batch = batches

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Notice the steps of these optimizers: what the loop goes through meanwhile is training."""
        method = weakref.WeakMethod(self._updated)  # an optimizer may outlive the manager

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            found = method()
            if found is not None:
                found(optimizer)

        for optimizer in optimizers:
            self._signalled = True
            self._first = self._first or weakref.ref(optimizer)
            self._hooks.append(optimizer.register_step_post_hook(after_step))

    def stepped(self) -> None:
        """`manager.step` was called."""
        self._signalled = True
        self._mark_training()
        self.progress.step += 0 if self.counts_updates else 1
        self.habits.stepped(fed=self._feeds.begun, in_epochs=self._in_epochs, has_data=self.has_data())

    def _updated(self, optimizer: torch.optim.Optimizer) -> None:
        self._mark_training()
        if self._first is not None and self._first() is optimizer:
            self.progress.step += 1 if self.counts_updates else 0
            if self._live is not None:
                self.habits.updated(fed=self._feeds.begun, in_epochs=self._in_epochs, has_data=self.has_data())

    def _mark_training(self) -> None:
        """Training goes on: on what every open pass has handed out since the last time."""
        fed = [one for one in self._passes if one.fresh]
        for one in fed:
            one.fresh = False
            one.feed.trained = True
            if not one.trained:
                one.trained = True
                self._begin_training(one)
        if self._live is not None:
            self.on_training(self.progress.epoch)
        if self._live is not None and not self._passes:
            self._drop_unclaimed()
            if self._ended is not None and self._ended.handed.unused and self._ended.feed.done:
                self.habits.remarks.note("prefetching", READ_AHEAD)  # training goes on after the last batch was taken
            self._ended = None

    def _begin_training(self, one: Pass) -> None:
        one.handed.note_training()
        enumerated = bool(one.handed.left_out) and is_enumerated(one.iterator())
        self.habits.settled(one.handed, (one.saved or {}).get("unused", 0), enumerated=enumerated)
        if not one.announced:
            self.habits.begins_pass(self.progress, one.counted, in_epochs=self._in_epochs)
            self._drop_unclaimed()

    def _drop_unclaimed(self) -> None:
        """Training has gone on without the loader that a plain position waits for."""
        waiting = self._feeds.waiting.positions
        lost = [key for key in waiting if self.habits.quiet or key.startswith(PLAIN)]
        for what in [waiting.pop(key).get("likeness") for key in lost]:
            if not self.habits.quiet:
                self.habits.remarks.differs("data", f"{OTHER_LOADER} {what}.")

    def _through(
        self, loader: Iterable[Any], found: Callable[[], Any], own: MakeIterator | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Each batch with its number in the epoch. `own` makes the iterator of a loader in a plain `for`."""
        jumps, handed = -1, None
        while jumps != self._jumps:
            jumps = self._jumps
            around = {id(feed): feed.batches for feed in self._feeds.open}
            one = self._open_pass(loader, found, handed, announced=own is None)
            again = False
            try:
                for batch, samples in self._pulled(
                    one.feed.take(self.progress.epoch, announced=one.announced, make_iterator=own)
                ):
                    self._count(one, samples, nested=bool(around))
                    one.handed.hand_out(batch)
                    yield one.feed.batches - 1, batch
                    again = one.may_go_back and one.handed.goes_back()
                    if jumps != self._jumps or again:
                        break
                else:
                    again = one.may_go_back and one.handed.goes_back(exhausted=True)
            finally:
                self._close_pass(one, around, again=again, jumped=jumps != self._jumps)
            if again:
                jumps, handed = -1, one.handed

    def _pulled(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same. Whatever a loader reads from meanwhile is its own affair, and is not followed."""
        while True:
            self._pulling, before = True, self._pulling
            try:
                taken = next(batches, None)
            finally:
                self._pulling = before
            if taken is None:
                return
            self.habits.hands_out()
            yield taken
            del taken  # or it would live as long as the next batch takes

    def _open_pass(self, loader: Any, found: Callable[[], Any], handed: Handed | None, *, announced: bool) -> Pass:
        """`handed`: what the script was given before its loader was taken back."""
        key, feed, saved = self._next_feed(loader, announced=announced)
        trusted = (saved or {}).get("unused") == 0
        handed = handed or Handed(feed.batches if saved else 0, BatchUsage(self.models()), trusted=trusted)
        one = Pass(key, feed, saved, handed, announced, found, self.progress.batch)
        if not (announced or self._in_epochs or self._passes):
            one.counted = epoch_variable()
        self._passes.append(one)
        return one

    def _close_pass(self, one: Pass, around: Mapping[int, int], *, again: bool, jumped: bool) -> None:
        self._passes = [other for other in self._passes if other is not one]
        self._ended = one if one.trained else self._ended
        self._forget_if_nested(one, around)
        if not again:
            one.handed.forget()
        if jumped or one.trained or not self._signalled:
            return
        self.progress.samples -= one.samples  # of no training
        if one.saved is not None and one.samples and not one.announced:
            self._feeds.put_back(one.key, one.feed, one.saved)
            self.progress.batch = one.batch
            if not again:
                self.habits.remarks.tell("put back", NO_TRAINING.format(one.batch))

    def _next_feed(self, loader: Any, *, announced: bool) -> tuple[str, TrackedLoader, dict[str, Any] | None]:
        found = self._feeds.next(loader, announced=announced)
        if not found[1].has_saved_position and not self._feeds.open:
            self.progress.batch = 0
        return found

    def saved_progress(self) -> Progress:
        """Where the next run will begin."""
        if not self._feeds.waiting.positions and self._is_over():
            return Progress(self.progress.epoch + 1, 0, self.progress.step, self.progress.samples)
        return self.progress

    def _is_over(self) -> bool:
        """Whether the loop is at the end of its epoch."""
        if self._feeds.by_key:
            return self._feeds.done
        return self._in_epochs and self.habits.is_over()

    def state(self) -> dict[str, Any]:
        """The position of each loader that this epoch has come to, or that waits for it to come."""

        def unused(feed: TrackedLoader) -> int:
            return sum(one.handed.unused for one in self._passes if one.feed is feed)

        return {} if self.saved_progress() is not self.progress else self._feeds.state(unused)

    def seen(self) -> dict[str, Any]:
        """What is known of the loop beside, to be saved."""
        without_loader = self._in_epochs and not self._feeds.by_key
        return self.habits.state(without_loader=without_loader, over=self._is_over())

    def go_back(self, progress: Progress, waiting: Waiting, seen: Mapping[str, Any]) -> None:
        """Go on from saved positions. A loader takes its own when it comes to `batches`."""
        self.progress = progress
        self._jumps += 1
        self.habits.go_back(seen, waiting.approximated)
        self._feeds.go_back(waiting, named=self._follow)

    def begins_at(self) -> str:
        """Where the next pass through each loader begins, for the console."""
        return self._feeds.begins_at()

    def rewind_rng(self) -> None:
        self._feeds.waiting.ready()

    def release(self) -> None:
        """Leave the loaders and optimizers as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._feeds.release()

    def _count(self, one: Pass, samples: int, *, nested: bool) -> None:
        if not nested:
            self.progress.batch += 1
        one.fresh = True
        one.samples += samples * self._ranks.world_size
        self.progress.samples += samples * self._ranks.world_size

    def _forget_if_nested(self, one: Pass, around: Mapping[int, int]) -> None:
        """A loop inside one step of another, as for validation, is over with that step: nothing of it is kept.

        Loaders that are gone through side by side are another thing: each moves on while the other is open.
        """
        stood_still = [feed for feed in self._feeds.open if around.get(id(feed)) == feed.batches]
        if stood_still:
            self._feeds.drop(one.feed)
        if one.trained and any(other.feed in stood_still and not other.announced for other in self._passes):
            self.habits.remarks.note("data", NESTED)

    def _next_epoch(self, *, plain: bool = False) -> None:
        self.progress.epoch += 1
        self.progress.batch = 0
        self.habits.ends_epoch(plain=plain)
        self._feeds.clear()
