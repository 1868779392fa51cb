"""The training loop's own state: progress, and where each loader is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckpt import order
from ckpt.feed import Feed
from ckpt.progress import Progress
from ckpt.ranks import Ranks


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
        self._waiting: dict[str, tuple[Any, ...]] = {}

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

    def go_back(
        self,
        progress: Progress,
        positions: dict[str, Any],
        world_size: int,
        ready: Callable[[], None],
        warn: Callable[[str], None],
    ) -> dict[str, str]:
        """Go on from saved positions. A loader that is not known yet takes its own when it comes to `batches`."""
        self.progress = progress
        for feed in self._feeds.values():
            feed.rewind()
        self._waiting = {key: (saved, world_size, ready, warn) for key, saved in positions.items()}
        changes: dict[str, str] = {}
        for key, feed in self._feeds.items():
            changes |= self._place(key, feed)
        return changes

    def release(self) -> None:
        """Leave the loaders as they were."""
        for feed in self._feeds.values():
            order.release(feed.loader)

    def _place(self, key: str, feed: Feed) -> dict[str, str]:
        if key not in self._waiting:
            return {}
        saved, world_size, ready, warn = self._waiting.pop(key)
        changes = feed.go_back(saved, world_size, ready, warn)
        return {f"{key}.{what}": why for what, why in changes.items()}

    def _feed(self, loader: Iterable[Any]) -> Feed:
        for feed in self._feeds.values():
            if feed.loader is loader:
                return feed
        key = f"loader.{len(self._feeds)}"
        feed = self._feeds[key] = Feed(loader, self._ranks.rank, self._ranks.world_size)
        for what, why in self._place(key, feed).items():
            self.late(what, why)
        return feed

    def late(self, what: str, why: str) -> None:
        """A change that only shows when the loop comes to a loader. The manager listens."""

    def _next_epoch(self) -> None:
        self.progress.epoch += 1
        self.progress.batch = 0
        for feed in self._feeds.values():
            feed.rewind()
