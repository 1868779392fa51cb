"""The loaders of one epoch: what each goes by, where it is, and which saved positions still wait for theirs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from ckpt.data import sampling
from ckpt.data.loader_info import size_of
from ckpt.data.loader_matching import likeness
from ckpt.data.tracked_loader import TrackedLoader
from ckpt.ranks.group import Ranks
from ckpt.state import rng, samplers
from ckpt.util.console import say

PLAIN = "plain"  # the name of loaders that a script goes through without a word to the manager


@dataclass
class Waiting:
    """Saved positions that wait for their loaders. What will not be as it was is added to `approximated`."""

    positions: dict[str, Any] = field(default_factory=dict)
    ready: Callable[[], None] = lambda: None
    approximated: dict[str, str] = field(default_factory=dict)
    told: bool = False  # what was restored has been told: what a loader that comes later adds is told at once
    _arrived: bool = False

    def place(self, key: str, feed: TrackedLoader) -> dict[str, Any] | None:
        """Bring a loader to its position, if one waits for it: that position."""
        saved: dict[str, Any] | None = self.positions.pop(key, None)
        if saved is not None:
            changes = feed.go_back(saved, self._arrive, self._warn)
            self.approximated.update({f"{key}.{what}": why for what, why in changes.items()})
            for what, why in changes.items() if self.told and feed.is_first_rank else ():
                say(f"ckpt: approximated: {key}.{what}: {why}")
        return saved

    def put_back(self, key: str, saved: dict[str, Any]) -> None:
        """Let the next pass through a loader begin at that position once more, with the generators as they were."""
        self.positions[key] = saved
        self._arrived = False

    def like(self, loader: Any) -> str | None:
        """The key of a position that was saved for such a loader, which the script had gone through by itself."""
        plain = ((key, saved) for key, saved in self.positions.items() if key.startswith(PLAIN))
        return next((key for key, saved in plain if saved.get("likeness") == likeness(loader)), None)

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


class Feeds:
    """The feeds of this epoch by key, and the positions that wait for loaders to come.

    A loader goes by its name, or by when the epoch comes to it: the first, the second. So a loader may be made anew for
    every epoch, and be gone through twice in one. Loaders that a script goes through by itself go by what they are.
    """

    def __init__(self, ranks: Ranks, named: Callable[[], Mapping[str, Any]]) -> None:
        self.by_key: dict[str, TrackedLoader] = {}
        self.waiting = Waiting()
        self._ranks = ranks
        self._named = named  # the loaders that go by a name, as they are now
        self._taken: dict[str, dict[str, Any]] = {}  # positions of loaders that have not been gone through since
        self._steered: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()

    @property
    def open(self) -> list[TrackedLoader]:
        """Those that the loop is inside of."""
        return [feed for feed in self.by_key.values() if feed.is_open]

    @property
    def begun(self) -> bool:
        """Whether the epoch has come to any loader."""
        return any(not feed.has_saved_position for feed in self.by_key.values())

    @property
    def done(self) -> bool:
        return all(feed.done for feed in self.by_key.values())

    def is_named(self, loader: Any) -> bool:
        return any(one is loader for one in self._named().values())

    def over(self, loader: Any) -> dict[str, TrackedLoader]:
        """The times through a loader that have ended, or were left."""
        return {
            key: feed
            for key, feed in self.by_key.items()
            if feed.loader is loader and not feed.is_open and not feed.has_saved_position
        }

    def drop(self, *feeds: TrackedLoader) -> None:
        self.by_key = {key: one for key, one in self.by_key.items() if not any(one is feed for feed in feeds)}

    def waits_for(self, loader: Any) -> int | None:
        """How many batches a loader will leave out when it is gone through next; none if it waits at no position."""
        return next(
            (feed.batches for feed in self.by_key.values() if feed.has_saved_position and feed.loader is loader), None
        )

    def left(self, loader: Any, *, announced: bool) -> int:
        """How many batches the next pass through a loader hands out."""
        waits = self.waits_for(loader)
        saved = self.waiting.positions.get(self._key(loader, announced=announced), {})
        return len(loader) - (saved.get("batches", 0) if waits is None else waits)

    def is_used_up(self, loader: Any) -> bool:
        """Whether the position that waits for a loader in a plain `for` is the end of its epoch."""
        key = self._key(loader, announced=False)
        saved = self._taken.get(key) or self.waiting.positions.get(key) or {}
        size = size_of(loader)
        ended = saved.get("done") or saved.get("exhausted")
        return bool(ended or (size is not None and saved.get("batches", 0) >= size > 0))

    def next(self, loader: Any, *, announced: bool) -> tuple[str, TrackedLoader, dict[str, Any] | None]:
        """What the next pass through a loader goes by and goes through, and the position that it begins at, if any."""
        key = self._key(loader, announced=announced)
        feed = self.by_key[key] if key in self.by_key else self.add(key, loader)
        return key, feed, self._taken.pop(key, None)

    def add(self, key: str, loader: Any) -> TrackedLoader:
        feed = self.by_key[key] = TrackedLoader(loader, self._ranks.rank, self._ranks.world_size)
        saved = self.waiting.place(key, feed)
        if saved is not None:
            self._taken[key] = saved
        if isinstance(loader, DataLoader):
            self._steered.add(loader)
        return feed

    def put_back(self, key: str, feed: TrackedLoader, saved: dict[str, Any]) -> None:
        """What took a position was no training: let the next pass through such a loader have it."""
        self.drop(feed)
        self.waiting.put_back(key, saved)
        if self.is_named(feed.loader):
            self.add(key, feed.loader)

    def give_up(self, skipping: Any) -> None:
        """A loader that skips by itself is gone through: the one with the same data need not, in an epoch to come."""
        data = getattr(samplers.reader(skipping), "dataset", None)
        self.drop(
            *(
                one
                for one in self.by_key.values()
                if one.has_saved_position and samplers.reader(one.loader).dataset is data
            )
        )

    def state(self, unused: Callable[[TrackedLoader], int]) -> dict[str, Any]:
        """The position of each loader that this epoch has come to, or that waits for it to come."""
        now = {
            key: {**feed.state(), "likeness": likeness(feed.loader), "unused": unused(feed)}
            for key, feed in self.by_key.items()
        }
        return {**self.waiting.positions, **now}

    def go_back(self, waiting: Waiting, *, named: bool) -> None:
        """Let loaders go on from saved positions: `named` ones at once, others when they come."""
        self.clear()
        self.waiting = waiting
        for key, loader in self._named().items() if named else ():
            if key in waiting.positions:
                self.add(key, loader)

    def begins_at(self) -> str:
        """Where the next pass through each loader begins, for the console."""
        found = {key: saved.get("batches", 0) for key, saved in self.waiting.positions.items()}
        found |= {key: feed.batches for key, feed in self.by_key.items() if feed.has_saved_position}
        return ", ".join(f"batch {batches} of {key}" for key, batches in found.items())

    def clear(self) -> None:
        """The epoch is over."""
        self.by_key, self._taken = {}, {}
        self.waiting.positions.clear()

    def release(self) -> None:
        """Leave the loaders as they were."""
        for loader in self._steered:
            sampling.release(loader)

    def _key(self, loader: Any, *, announced: bool) -> str:
        """What the next pass through a loader goes by."""
        name = next((key for key, one in self._named().items() if one is loader), "loader" if announced else PLAIN)
        if name == PLAIN:
            taken = (*self.by_key, *self.waiting.positions)
            free = (key for number in itertools.count() if (key := f"{PLAIN}.{number}") not in taken)
            return self.waiting.like(loader) or next(free)
        again = 0 if name == "loader" else 1
        key = name if again else f"{name}.0"
        while key in self.by_key and not self.by_key[key].has_saved_position:
            again += 1
            key = f"{name}.{again}"
        return key
