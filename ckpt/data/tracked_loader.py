"""A loader whose position is tracked, so that it can be saved in mid-epoch and restored in another process.

The states of a `TrackedLoader`, which stands for one pass:

    fresh ------------------+
                            +-- take() --> in the middle --> done
    has_saved_position -----+
      ^ go_back(), skip()

- fresh: nothing was handed out in this epoch.
- has_saved_position: the next pass begins at a position set by `go_back` or `skip`, and the loader has not been read
  yet. The property becomes false in the pass, when that position is reached (`Cursor.arrive`).
- `take` makes an iterator, and a strategy takes it to the position: `ByIndex` where data is map-style, `ByState` where
  the loader or the dataset has a `state_dict`, `ByReplay` where the data can only be read again.
- in the middle: batches were handed out; `state` is the position after the last of them, and stays so where the loop
  ends before the loader does (`break`, an error, a load).
- done: the epoch is over.

`EpochLoaders` has the loaders of one epoch, each under its key, and the saved positions that none has claimed yet.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, cast

from torch.utils.data import DataLoader

from ckpt.data import sampling
from ckpt.data.cursor import Cursor, OnArrival
from ckpt.data.loader_info import Loader, MakeIterator, batches_skipped, goes_by_index, own_iterator, size_of
from ckpt.data.progress import Position
from ckpt.data.repartition import Repartition
from ckpt.data.restore_strategy import RestoreStrategy, choose_strategy
from ckpt.ranks.consensus import Ranks
from ckpt.state import rng, samplers


class TrackedLoader:
    """One pass through a loader: `take` hands out the epoch's batches, from the saved position if there is one."""

    def __init__(self, loader: Loader, rank: int, world_size: int) -> None:
        self.loader = loader
        self._cursor = Cursor(loader, rank, world_size)
        self._repartition = Repartition(loader, self._cursor.reads, rank, world_size)
        self._strategy: RestoreStrategy | None = None
        self._make_iterator: MakeIterator = lambda: own_iterator(loader)

    @property
    def has_saved_position(self) -> bool:
        """Whether the next pass begins at a position that was saved, and that it has not reached yet."""
        return self._cursor.has_saved_position

    @property
    def is_first_rank(self) -> bool:
        """Whether messages about the loader are printed here."""
        return self._cursor.rank == 0

    @property
    def trained(self) -> bool:
        """Whether an optimizer was stepped on batches of this pass."""
        return self._cursor.position.trained

    @trained.setter
    def trained(self, trained: bool) -> None:
        self._cursor.position.trained = trained

    @property
    def batches_handed_out(self) -> int:
        """In this epoch, of whatever size."""
        return self._cursor.position.before + self._cursor.position.batches

    @property
    def done(self) -> bool:
        return self._cursor.position.done and not self.has_saved_position

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of the epoch, here or at the saved position."""
        return self._cursor.position.done or self._cursor.position.exhausted

    def from_start(self, saved: dict[str, Any]) -> TrackedLoader:
        """The same epoch once more from its first batch, in the same order."""
        again = TrackedLoader(self.loader, self._cursor.rank, self._cursor.position.world_size)
        start = {"rng": saved.get("rng", {}), "generators": saved.get("generators", [])}
        again._cursor.go_to(
            {**start, "generators_now": start["generators"], "samplers": saved.get("samplers", [])},
            lambda done, before: None,
            self._cursor.warn,
        )
        return again

    def state(self) -> dict[str, Any]:
        """The position, to be saved."""
        if not self.has_saved_position:
            self._update_position()
            self._cursor.update_state()
        return dict(vars(self._cursor.position))

    def go_back(self, saved: dict[str, Any], on_arrival: OnArrival, warn: Callable[[str], None]) -> dict[str, str]:
        """Let `take` continue from a saved position. Returns what will not be as it was, and why."""
        position = self._cursor.go_to(saved, on_arrival, warn)
        self._leave_out_skipped(position)
        return self._repartition.carry_over(position) | self._changed_dataset(position) | self._new_workers(position)

    def _leave_out_skipped(self, position: Position) -> None:
        """A loader that `accelerate.skip_first_batches` made skips batches itself: they are not skipped twice."""
        skipped = batches_skipped(self.loader)
        if skipped != position.skipped:
            position.batches = max(0, position.batches + position.skipped - skipped)
            position.samples, position.digest, position.indices, position.contents = 0, "", "", {}
            position.skipped = skipped

    def skip(self, batches: int) -> None:
        """Let `take` begin after so many batches of an epoch that begins then, with everything as it is."""
        self._cursor.position.batches = batches
        self._cursor.has_saved_position = batches > 0

    def take(
        self, epoch: int, *, announced: bool = True, make_iterator: MakeIterator | None = None
    ) -> Generator[tuple[Any, int], None, None]:
        """The rest of the epoch: each batch with its number of samples. `set_epoch` is called if `announced`.

        `make_iterator` makes the loader's iterator, where that is not what its class says.
        """
        self._make_iterator = make_iterator or self._make_iterator
        if announced:
            self._set_epoch(epoch)
        position = self._cursor.position
        iterator = self._open(epoch)  # held by nobody else: workers stop with it, also after `break`
        for batch in iterator:
            samples = self._strategy.take(batch) if self._strategy is not None else 0
            position.batches += 1
            position.samples += samples
            self._cursor.note_end(iterator)
            yield batch, samples
            del batch
        position.done = True
        self._update_position()
        if self._strategy is not None:
            self._strategy.close()
        self._strategy = None

    def _set_epoch(self, epoch: int) -> None:
        for part in [self.loader, *samplers.samplers(self.loader), getattr(self.loader, "dataset", None)]:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)

    def _open(self, epoch: int) -> Iterator[Any]:
        """An iterator that stands at the position."""
        self._cursor.prepare()
        if self._cursor.position.done or self._cursor.position.exhausted:
            self._cursor.finish_epoch()
            return iter(())
        self._strategy = choose_strategy(self._cursor, self._make_iterator, self._repartition, epoch)
        return self._strategy.open()

    def _update_position(self) -> None:
        """Bring the position up to what the loader and its iterator say now."""
        self._cursor.update_generators()
        if self._strategy is not None:
            self._strategy.update_position()
        self._cursor.leave_state_to_reader()

    def _changed_dataset(self, position: Position) -> dict[str, str]:
        size = size_of(getattr(self._cursor.reader, "dataset", None))
        if None in (size, position.dataset_size) or size == position.dataset_size:
            return {}
        return {"dataset": f"has {size} samples now and had {position.dataset_size} when it was saved"}

    def _new_workers(self, position: Position) -> dict[str, str]:
        reader = self._cursor.reader
        unseeded = bool(getattr(reader, "num_workers", 0)) and getattr(reader, "batch_sampler", self) is None
        if not unseeded and (not position.worn or goes_by_index(reader)):
            return {}
        return {"workers": "they are new processes, and what they draw at random differs from here on"}


_log = logging.getLogger("ckpt")
_PLAIN = "plain."  # begins the keys of loaders that the manager was not given, in checkpoints of earlier versions


@dataclass
class UnclaimedPositions:
    """Saved positions that no loader has claimed yet: a loader claims its own when it is first iterated over.

    `rewind_rng` restores the global generators as they were saved. What will differ from an uninterrupted run is added
    to `approximated`.
    """

    positions: dict[str, Any] = field(default_factory=dict)
    rewind_rng: Callable[[], None] = lambda: None
    approximated: dict[str, str] = field(default_factory=dict)
    reported: bool = False  # `approximated` has been printed: what a later loader adds is printed at once
    _arrived: bool = False

    def claim(self, key: str, tracked: TrackedLoader) -> dict[str, Any] | None:
        """Give a loader its saved position, if there is one, and return that."""
        found = self.key_of(key)
        saved: dict[str, Any] | None = None if found is None else self.positions.pop(found)
        if saved is not None:
            changes = tracked.go_back(saved, self._arrive, self._warn)
            self.approximated.update({f"{key}.{what}": why for what, why in changes.items()})
            for what, why in changes.items() if self.reported and tracked.is_first_rank else ():
                _log.warning("the resumed run is not exact: %s.%s: %s", key, what, why)
        return saved

    def put_back(self, key: str, saved: dict[str, Any]) -> None:
        """Let the next pass through such a loader claim the position again, with the generators as they were saved."""
        self.positions[key] = saved
        self._arrived = False

    def key_of(self, key: str) -> str | None:
        """The key under which the position of a loader was saved."""
        plain = [found for found in self.positions if found.startswith(_PLAIN)]
        return key if key in self.positions else plain[0] if len(plain) == 1 else None

    def _arrive(self, done: bool, before: dict[str, Any]) -> None:
        """A loader has reached its position. Of loaders side by side, the first sees the generators as they were saved;
        the others see what it has drawn since."""
        if done or not self._arrived:
            self.rewind_rng()
            self._arrived = not done
        else:
            rng.restore(before)

    def _warn(self, text: str) -> None:
        self.approximated["data order"] = text
        _log.warning("%s", text)


class EpochLoaders:
    """The tracked loaders of this epoch by key, and the saved positions that no loader has claimed yet.

    The key is the loader's name, or its number in the epoch: the first, the second. So a loader may be made anew for
    every epoch, and be iterated over twice in one.
    """

    def __init__(self, ranks: Ranks, named: Callable[[], Mapping[str, Loader]]) -> None:
        self.by_key: dict[str, TrackedLoader] = {}
        self.unclaimed = UnclaimedPositions()
        self._ranks = ranks
        self._named = named  # the loaders that have a name, as they are now
        self._claimed: dict[str, dict[str, Any]] = {}  # positions whose loader has not been iterated over yet
        self._wrapped: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()

    @property
    def done(self) -> bool:
        return all(tracked.done for tracked in self.by_key.values())

    def is_named(self, loader: Loader) -> bool:
        return any(named is loader for named in self._named().values())

    def was_trained_on(self, loader: Loader) -> bool:
        """Whether a step was made in a pass through a loader in this epoch."""
        read = (tracked for tracked in self.by_key.values() if not tracked.has_saved_position)
        return any(tracked.trained for tracked in read if tracked.loader is loader)

    def drop(self, *dropped: TrackedLoader) -> None:
        gone = {id(tracked) for tracked in dropped}
        self.by_key = {key: tracked for key, tracked in self.by_key.items() if id(tracked) not in gone}

    def saved_batches(self, loader: Loader) -> int | None:
        """How many batches the next pass through a loader skips; none if it has claimed no position."""
        resumed = (tracked for tracked in self.by_key.values() if tracked.has_saved_position)
        return next((tracked.batches_handed_out for tracked in resumed if tracked.loader is loader), None)

    def left(self, loader: Loader) -> int:
        """How many batches the next pass through a loader hands out."""
        claimed = self.saved_batches(loader)
        found = self.unclaimed.key_of(self._key(loader))
        saved = {} if found is None else self.unclaimed.positions[found]
        return len(cast(Sized, loader)) - (saved.get("batches", 0) if claimed is None else claimed)

    def is_used_up(self, loader: Loader) -> bool:
        """Whether the position that was saved for a loader is the end of its epoch."""
        saved = self._claimed.get(self._key(loader)) or {}
        size = size_of(loader)
        ended = saved.get("done") or saved.get("exhausted")
        return bool(ended or (size is not None and saved.get("batches", 0) >= size > 0))

    def next(self, loader: Loader) -> tuple[str, TrackedLoader, dict[str, Any] | None]:
        """The key and the loader of the next pass, and the saved position that it begins at, if any."""
        key = self._key(loader)
        tracked = self.by_key[key] if key in self.by_key else self.add(key, loader)
        return key, tracked, self._claimed.pop(key, None)

    def add(self, key: str, loader: Loader) -> TrackedLoader:
        tracked = self.by_key[key] = TrackedLoader(loader, self._ranks.rank, self._ranks.world_size)
        saved = self.unclaimed.claim(key, tracked)
        if saved is not None:
            self._claimed[key] = saved
        if isinstance(loader, DataLoader):
            self._wrapped.add(loader)
        return tracked

    def put_back(self, key: str, tracked: TrackedLoader, saved: dict[str, Any]) -> None:
        """The pass that claimed a position was no training: let the next pass through such a loader claim it."""
        self.drop(tracked)
        self.unclaimed.put_back(key, saved)
        if self.is_named(tracked.loader):
            self.add(key, tracked.loader)

    def drop_unread(self) -> dict[str, Loader | None]:
        """Drop the saved positions that no pass has gone to yet: their keys, and the loaders that had claimed them."""
        claimed = {key: tracked for key, tracked in self.by_key.items() if tracked.has_saved_position}
        dropped: dict[str, Loader | None] = {**dict.fromkeys(self.unclaimed.positions)}
        dropped |= {key: tracked.loader for key, tracked in claimed.items()}
        self.drop(*claimed.values())
        self.unclaimed.positions.clear()
        self._claimed.clear()
        return dropped

    def state(self) -> dict[str, Any]:
        """The position of each loader that was read in this epoch, and those that are unclaimed."""
        return {**self.unclaimed.positions, **{key: tracked.state() for key, tracked in self.by_key.items()}}

    def go_back(self, unclaimed: UnclaimedPositions) -> None:
        """Let loaders continue from saved positions: named ones claim theirs at once, others when they are read."""
        self.clear()
        self.unclaimed = unclaimed
        for key, loader in self._named().items():
            if unclaimed.key_of(key) is not None:
                self.add(key, loader)

    def begins_at(self) -> str:
        """Where the next pass through each loader begins, for the console."""
        found = {key: saved.get("batches", 0) for key, saved in self.unclaimed.positions.items()}
        found |= {key: tracked.batches_handed_out for key, tracked in self.by_key.items() if tracked.has_saved_position}
        return ", ".join(f"batch {batches} of {key}" for key, batches in found.items())

    def clear(self) -> None:
        """The epoch is over."""
        self.by_key, self._claimed = {}, {}
        self.unclaimed.positions.clear()

    def release(self) -> None:
        """Give the loaders their own samplers back."""
        for loader in self._wrapped:
            sampling.uninstall(loader)

    def _key(self, loader: Loader) -> str:
        """The key of the next pass through a loader."""
        name = next((key for key, named in self._named().items() if named is loader), None)
        again = 0 if name is None else 1
        key = name or "loader.0"
        while key in self.by_key and not self.by_key[key].has_saved_position:
            again += 1
            key = f"{name or 'loader'}.{again}"
        return key
