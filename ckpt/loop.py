"""The training loop's own state: progress, and where each loader is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from ckpt import order, rng
from ckpt.console import say
from ckpt.errors import ConfigError
from ckpt.feed import Feed
from ckpt.progress import Progress
from ckpt.ranks import Ranks


@dataclass
class Waiting:
    """Saved positions that wait for their loaders. What will not be as it was is added to `approximated`."""

    positions: dict[str, Any] = field(default_factory=dict)
    ready: Callable[[], None] = lambda: None
    approximated: dict[str, str] = field(default_factory=dict)
    told: bool = False  # what was restored has been told: what a loader that comes later adds is told at once
    _arrived: bool = False

    def place(self, key: str, feed: Feed) -> None:
        """Bring a loader to its position, if one waits for it."""
        if key in self.positions:
            changes = feed.go_back(self.positions.pop(key), self._arrive, self._warn)
            self.approximated.update({f"{key}.{what}": why for what, why in changes.items()})
            if self.told and feed.is_first_rank:
                for what, why in changes.items():
                    say(f"ckpt: approximated: {key}.{what}: {why}")

    def _arrive(self, done: bool, before: dict[str, Any]) -> None:
        """A loader is where it was. Of loaders side by side, the first sees generators as they were saved; the others
        see what it has drawn since."""
        if done or not self._arrived:
            self.ready()
            self._arrived = not done
        else:
            rng.restore(before)

    def _warn(self, text: str) -> None:
        self.approximated["data order"] = text
        say(f"ckpt: {text}")


class Loop:
    """Counts, and goes through loaders so that it can say where they are.

    A loader goes by its name, or by when the epoch comes to it: the first, the second. So a loader may be made anew for
    every epoch, and be gone through twice in one.

    A save inside `batches` belongs to the middle of its epoch. One made when the loaders of the epoch have been gone
    through belongs to its end: the next run begins with the next epoch.
    """

    def __init__(self, ranks: Ranks, named: Callable[[], Mapping[str, Any]]) -> None:
        self.progress = Progress()
        self.before_pass: Callable[[], None] = lambda: None  # before a plain `for` goes through a loader
        self.counts_updates = False  # a step is one of the first optimizer, and not a call of `manager.step`
        self._ranks = ranks
        self._named = named  # the loaders that go by a name, as they are now
        self._in_epochs = False
        self._feeds: dict[str, Feed] = {}  # of this epoch
        self._waiting = Waiting()
        self._jumps = 0
        self._steered: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._first: weakref.ref[torch.optim.Optimizer] | None = None

    def epochs(self, total: int) -> Iterator[int]:
        if not isinstance(total, int):
            raise ConfigError(f"epochs() takes the number of epochs in all, not {total!r}.")
        self._in_epochs = True
        try:
            while self.progress.epoch < total:
                yield self.progress.epoch
                self._next_epoch()
        finally:
            self._in_epochs = False

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The rest of the epoch. If `go_back` is called meanwhile, it goes on from there."""
        if not isinstance(loader, Iterable):
            raise ConfigError(f"batches() goes through a loader, and a {type(loader).__name__} cannot be gone through.")
        yield from self._through(loader, announced=True)
        if not self._in_epochs and not self._is_inside:
            self._next_epoch()

    def owns(self, loader: Any) -> bool:
        """Whether a plain `for` over a loader is to be followed."""
        return any(one is loader for one in self._named().values())

    def follow(self, loader: Iterable[Any]) -> Iterator[Any]:
        """A plain `for` over a loader: what is left of the epoch, if a position waits for it, or all of it.

        Outside of `epochs` it is an epoch: until its end or, where it is left, until the loop comes to the loader
        again. But if no optimizer was stepped meanwhile it was no training, and leaves no trace.
        """
        self.before_pass()
        if self._over(loader) and not self._in_epochs and not self._is_inside:
            self._next_epoch()
        jumps, batch, samples = self._jumps, self.progress.batch, self.progress.samples
        try:
            yield from self._through(loader, announced=False)
        finally:
            over = self._over(loader)
            if not any(feed.trained for feed in over.values()) and jumps == self._jumps:
                self._feeds = {key: feed for key, feed in self._feeds.items() if key not in over}
                self.progress.batch, self.progress.samples = batch, samples
            elif all(feed.done for feed in over.values()) and not self._in_epochs and not self._is_inside:
                self._next_epoch()

    def waits_for(self, loader: Any) -> int | None:
        """How many batches a loader will leave out when it is gone through next; none if it waits at no position."""
        return next((feed.batches for feed in self._feeds.values() if feed.waits and feed.loader is loader), None)

    def skip(self, loader: Any, batches: int) -> None:
        """Let the next time through a loader begin after so many batches."""
        self._feed(loader).skip(batches)
        self.progress.batch = batches

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Notice the steps of these optimizers: what the loop goes through meanwhile is training."""
        method = weakref.WeakMethod(self._updated)  # an optimizer may outlive the manager

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            found = method()
            if found is not None:
                found(optimizer)

        for optimizer in optimizers:
            self._first = self._first or weakref.ref(optimizer)
            self._hooks.append(optimizer.register_step_post_hook(after_step))

    def _updated(self, optimizer: torch.optim.Optimizer) -> None:
        for feed in self._feeds.values():
            feed.trained = feed.trained or feed.is_open
        if self.counts_updates and self._first is not None and self._first() is optimizer:
            self.progress.step += 1

    @property
    def _is_inside(self) -> bool:
        return any(feed.is_open for feed in self._feeds.values())

    def _over(self, loader: Any) -> dict[str, Feed]:
        """The times through a loader that have ended, or were left."""
        return {
            key: feed
            for key, feed in self._feeds.items()
            if feed.loader is loader and not feed.is_open and not feed.waits
        }

    def _through(self, loader: Iterable[Any], *, announced: bool) -> Iterator[Any]:
        jumps = -1
        while jumps != self._jumps:
            jumps = self._jumps
            feed = self._feed(loader)
            around = {id(one): one.batches for one in self._feeds.values() if one.is_open}
            try:
                for batch, samples in feed.take(self.progress.epoch, announced=announced):
                    self._count(samples, nested=bool(around))
                    yield batch
                    if jumps != self._jumps:
                        break
            finally:
                self._forget_if_nested(feed, around)

    def saved_progress(self) -> Progress:
        """Where the next run will begin."""
        if self._feeds and not self._waiting.positions and all(feed.done for feed in self._feeds.values()):
            return Progress(self.progress.epoch + 1, 0, self.progress.step, self.progress.samples)
        return self.progress

    def state(self) -> dict[str, Any]:
        """The position of each loader that this epoch has come to, or that waits for it to come."""
        if self.saved_progress() is not self.progress:
            return {}
        return {**self._waiting.positions, **{key: feed.state() for key, feed in self._feeds.items()}}

    def go_back(self, progress: Progress, waiting: Waiting) -> None:
        """Go on from saved positions. A loader takes its own when it comes to `batches`."""
        self.progress = progress
        self._waiting = waiting
        self._jumps += 1
        self._feeds = {}
        for key, loader in self._named().items():
            if key in waiting.positions:
                self._add(key, loader)

    def rewind_rng(self) -> None:
        self._waiting.ready()

    def release(self) -> None:
        """Leave the loaders and optimizers as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for loader in self._steered:
            order.release(loader)

    def _count(self, samples: int, *, nested: bool) -> None:
        if not nested:
            self.progress.batch += 1
        self.progress.samples += samples * self._ranks.world_size

    def _forget_if_nested(self, feed: Feed, around: Mapping[int, int]) -> None:
        """A loop inside one step of another, as for validation, is over with that step: nothing of it is kept.

        Loaders that are gone through side by side are another thing: each moves on while the other is open.
        """
        stood_still = [one for one in self._feeds.values() if around.get(id(one)) == one.batches and one.is_open]
        if stood_still:
            self._feeds = {key: one for key, one in self._feeds.items() if one is not feed}

    def _feed(self, loader: Iterable[Any]) -> Feed:
        """A feed for the next time through a loader."""
        name = next((key for key, one in self._named().items() if one is loader), "loader")
        again = 0 if name == "loader" else 1
        key = name if again else f"{name}.0"
        while key in self._feeds and not self._feeds[key].waits:
            again += 1
            key = f"{name}.{again}"
        return self._feeds[key] if key in self._feeds else self._add(key, loader)

    def _add(self, key: str, loader: Iterable[Any]) -> Feed:
        feed = self._feeds[key] = Feed(loader, self._ranks.rank, self._ranks.world_size)
        self._waiting.place(key, feed)
        if not feed.waits and not any(one.is_open for one in self._feeds.values()):
            self.progress.batch = 0
        if isinstance(loader, DataLoader):
            self._steered.add(loader)
        return feed

    def _next_epoch(self) -> None:
        self.progress.epoch += 1
        self.progress.batch = 0
        self._feeds = {}
        self._waiting.positions.clear()
