"""A loader whose position is tracked, so that it can be saved in mid-epoch and restored in another process.

The states of a `TrackedLoader`, which stands for one pass:

    fresh ------------------+
                            +-- take() --> open --> in the middle --+--> done
    has_saved_position -----+                                       +--> left
      ^ go_back(), skip()

- fresh: nothing was handed out in this epoch.
- has_saved_position: the next pass begins at a position set by `go_back` or `skip`, and the loader has not been read
  yet. The property becomes false in the pass, when that position is reached (`Cursor.arrive`).
- open: `take` has made an iterator (`is_open`), and a strategy takes it to the position: `ByIndex` where
  data is map-style, `ByState` where the loader or the dataset has a `state_dict`, `ByReplay` where
  the data can only be read again.
- in the middle: batches were handed out; `state` is the position after the last of them.
- done: the epoch is over. Left: the loop ended before that (`break`, an error, a load), and the position is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

from ckpt.data.cursor import Cursor, OnArrival
from ckpt.data.following import MakeIterator, own_iterator
from ckpt.data.loader_info import Loader, batches_skipped, goes_by_index, size_of
from ckpt.data.position import Position
from ckpt.data.repartition import Repartition
from ckpt.data.restore_strategy import RestoreStrategy, choose_strategy
from ckpt.state import samplers


class TrackedLoader:
    """One pass through a loader: `take` hands out the epoch's batches, from the saved position if there is one."""

    def __init__(self, loader: Loader, rank: int, world_size: int) -> None:
        self.loader = loader
        self._cursor = Cursor(loader, rank, world_size)
        self._repartition = Repartition(loader, self._cursor.reads, rank, world_size)
        self._strategy: RestoreStrategy | None = None
        self._iterator: Iterator[Any] | None = None
        self._make_iterator: MakeIterator = lambda: own_iterator(loader)

    @property
    def has_saved_position(self) -> bool:
        """Whether the next pass begins at a position that was saved, and that it has not reached yet."""
        return self._cursor.has_saved_position

    @property
    def is_open(self) -> bool:
        """Whether the training loop is inside."""
        return self._iterator is not None

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
        try:
            self._iterator = self._open(epoch)
            for batch in self._iterator:
                samples = self._strategy.take(batch) if self._strategy is not None else 0
                position.batches += 1
                position.samples += samples
                yield batch, samples
            position.done = True
        finally:
            self._leave()

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
        self._cursor.update(self._iterator)

    def _leave(self) -> None:
        """The loop has ended, or was left. No reference may keep the iterator alive: its workers stop with it."""
        self._update_position()
        self._iterator = None
        if self._strategy is not None:
            self._strategy.close()
        self._strategy = None

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
