"""The training loop's own state: progress, and where each loader is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ckpt import order
from ckpt.console import say
from ckpt.feed import Feed
from ckpt.progress import Progress
from ckpt.ranks import Ranks


@dataclass
class Waiting:
    """Saved positions that wait for their loaders. What will not be as it was is added to `approximated`."""

    positions: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    ready: Callable[[], None] = lambda: None
    approximated: dict[str, str] = field(default_factory=dict)

    def place(self, key: str, feed: Feed) -> None:
        """Bring a loader to its position, if one waits for it."""
        if key in self.positions:
            changes = feed.go_back(self.positions.pop(key), self.world_size, self.ready, self._warn)
            self.approximated.update({f"{key}.{what}": why for what, why in changes.items()})

    def _warn(self, text: str) -> None:
        self.approximated["data order"] = text
        say(f"ckpt: {text}")


class Loop:
    """Counts, and goes through loaders so that it can say where they are.

    A save inside `batches` belongs to the middle of its epoch. One made when the loaders of the epoch have been gone
    through belongs to its end: the next run begins with the next epoch.
    """

    def __init__(self, ranks: Ranks, loaders: dict[str, Any]) -> None:
        self.progress = Progress()
        self._ranks = ranks
        self._in_epochs = False
        self._feeds = {key: Feed(loader, ranks.rank, ranks.world_size) for key, loader in loaders.items()}
        self._waiting = Waiting()

    def epochs(self, total: int) -> Iterator[int]:
        self._in_epochs = True
        try:
            while self.progress.epoch < total:
                yield self.progress.epoch
                self._next_epoch()
        finally:
            self._in_epochs = False

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        feed = self._feed(loader)
        if not feed.inside and feed.position is None:
            self.progress.batch = 0
        for batch, samples in feed.take(self.progress.epoch):
            self.progress.batch += 1
            self.progress.samples += samples * self._ranks.world_size
            yield batch
        if not self._in_epochs:
            self._next_epoch()

    def saved_progress(self) -> Progress:
        """Where the next run will begin."""
        used = [feed for feed in self._feeds.values() if feed.position is not None]
        if used and all(feed.done for feed in used):
            return Progress(self.progress.epoch + 1, 0, self.progress.step, self.progress.samples)
        return self.progress

    def state(self) -> dict[str, Any]:
        """The position of each loader that this epoch has come to."""
        if self.saved_progress() is not self.progress:
            return {}
        states = {key: feed.state() for key, feed in self._feeds.items()}
        return {key: state for key, state in states.items() if state is not None}

    def go_back(self, progress: Progress, waiting: Waiting) -> None:
        """Go on from saved positions. A loader that is not known yet takes its own when it comes to `batches`."""
        self.progress = progress
        self._waiting = waiting
        for key, feed in self._feeds.items():
            feed.rewind()
            waiting.place(key, feed)

    def release(self) -> None:
        """Leave the loaders as they were."""
        for feed in self._feeds.values():
            order.release(feed.loader)

    def _feed(self, loader: Iterable[Any]) -> Feed:
        for feed in self._feeds.values():
            if feed.loader is loader:
                return feed
        key = f"loader.{len(self._feeds)}"
        feed = self._feeds[key] = Feed(loader, self._ranks.rank, self._ranks.world_size)
        self._waiting.place(key, feed)
        return feed

    def _next_epoch(self) -> None:
        self.progress.epoch += 1
        self.progress.batch = 0
        for feed in self._feeds.values():
            feed.rewind()
