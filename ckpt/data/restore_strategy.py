"""How a loader is taken to its saved position: by index, by its own state, or by replay; and why."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from ckpt.data import sampling
from ckpt.data.batch_digest import Contents, extract
from ckpt.data.cursor import Cursor, Lookahead
from ckpt.data.loader_info import MakeIterator, batch_size, goes_by_index, only_counts
from ckpt.data.progress import Position
from ckpt.data.repartition import RemainingIndices, Repartition
from ckpt.data.sampling import EpochPlan
from ckpt.errors import ConfigError
from ckpt.state import rng
from ckpt.util.console import progress_bar

# What the strategies for restoring a loader's position have in common: by index, by state and by replay.


class RestoreStrategy(ABC):
    """One pass through a loader, from its cursor's position to the end of the epoch.

    `open` makes the iterator. `land` is called when all that the loop had got is behind, `arrive` when everything is as
    it was at the save. The two differ only for a loader that reads ahead: what had been read but not handed out is read
    again in between, with the generators of that time.
    """

    lands_with_order = False  # `land` is called by the order of indices, not by the reads

    def __init__(self, cursor: Cursor, make_iterator: MakeIterator) -> None:
        self._cursor = cursor
        self._make_iterator = make_iterator
        self._lookahead: Lookahead | None = None
        self._contents: Contents | None = None  # of a stream that can only be replayed

    @abstractmethod
    def open(self) -> Iterator[Any]:
        """An iterator that stands at the position, or that takes the loader there when it is first used."""

    def take(self, batch: Any) -> int:
        """The loop gets a batch: how many samples it has."""
        if self._cursor.has_saved_position:  # nothing was read here: rank 0 reads for all
            self.arrive()
        self._note_contents(batch)
        return self._count_samples(batch)

    def _count_samples(self, batch: Any) -> int:
        return batch_size(batch)

    def update_position(self) -> None:
        """Write what the strategy knows into the position, to be saved."""
        position = self._cursor.position
        if self._contents is not None:
            position.contents = self._contents.digests()
        if self._lookahead is not None:
            position.ahead, position.rng_ahead, position.state = self._lookahead.first

    def close(self) -> None:
        """The pass is over, or was left: no reference may keep the iterator alive, because its workers stop with it."""
        if self._lookahead is not None:
            self._lookahead.forget()

    def land(self) -> None:
        """The batches that the loop had got are behind. What had been read ahead of it is read again."""
        if self._cursor.has_saved_position and self._lookahead is not None and self._cursor.position.ahead:
            self._restore_before_reads_ahead()
        else:
            self.arrive()

    def _restore_before_reads_ahead(self) -> None:
        rng.restore(self._cursor.position.rng_ahead)

    def arrive(self) -> None:
        """The position is reached: everything is as it was at the save."""
        self._cursor.arrive()

    def _note_contents(self, batch: Any) -> None:
        if self._lookahead is not None:
            self._lookahead.taken(self._cursor.reads)
        elif self._contents is not None:
            self._contents.add(extract(batch))

    def _look_ahead(self, again: int = 0) -> None:
        """Follow the reads of a loader that reads ahead. The loop had got the first `again` of them at the save, and
        `position.ahead` more had been read."""
        cursor = self._cursor

        def before(reads: int) -> None:
            if cursor.has_saved_position and reads == again and not self.lands_with_order:
                self.land()
            elif cursor.has_saved_position and cursor.position.ahead and reads == again + cursor.position.ahead:
                self.arrive()

        self._lookahead = Lookahead(cursor.reader, cursor.keeper, before, self._contents)


class ByState(RestoreStrategy):
    """Loads the saved state into its keeper before the iterator is made."""

    def open(self) -> Iterator[Any]:
        cursor = self._cursor
        cursor.begin()
        if not cursor.reads:
            return self._make_iterator()
        cursor.restore_keeper()
        if cursor.reads_ahead:
            self._look_ahead()
            return self._make_iterator()
        iterator = self._make_iterator()
        self.arrive()
        return iterator


class ByIndex(RestoreStrategy):
    """Puts an `EpochPlan` into the loader's sampler, which skips the indices of the batches that were handed out."""

    lands_with_order = True

    def __init__(self, cursor: Cursor, make_iterator: MakeIterator, repartition: Repartition, epoch: int) -> None:
        super().__init__(cursor, make_iterator)
        self._loader: DataLoader[Any] = cursor.reader
        self._repartition = repartition
        self._epoch = epoch
        self._plan: EpochPlan | None = None  # none where rank 0 reads for all

    def open(self) -> Iterator[Any]:
        if not getattr(self._loader, "in_order", True):
            raise ConfigError(
                "a DataLoader with in_order=False gives batches in an order that depends on timing: no run can "
                "continue from the middle of it. Build it with in_order=True."
            )
        if not self._cursor.reads:
            self._cursor.begin()
            return self._make_iterator()
        rest = self._repartition.rest(self._cursor.position)
        if self._cursor.reads_ahead and not self._loader.num_workers:  # workers read with generators of their own
            self._look_ahead()
        self._plan = self._make_plan(rest)
        sampling.install(self._loader).plan = self._plan
        return self._make_iterator()

    def update_position(self) -> None:
        if self._plan is not None:
            self._cursor.position.digest, self._cursor.position.indices = "", self._plan.digest.hexdigest()
        super().update_position()

    def close(self) -> None:
        if self._plan is not None:
            self._plan.forget()
        super().close()

    def arrive(self) -> None:
        if not self._cursor.arrive() or self._plan is None:
            return
        position = self._cursor.position
        if not self._loader.num_workers:
            # with workers the sampler is ahead of the loop: drawing the order again has moved these already
            self._cursor.set_generators(position.generators_now)
        if not position.ahead:
            self._cursor.restore_keeper()
        position.samples = max(position.samples, self._plan.left_out if self._cursor.reads == 1 else 0)
        why = self._plan.problem(self._cursor.name)
        if why:
            self._cursor.warn(why)

    def _count_samples(self, batch: Any) -> int:
        read = self._plan.taken(self._cursor.reads) if self._plan is not None else 0
        return read if self._plan is not None and self._cursor.reads == 1 else super()._count_samples(batch)

    def _restore_before_reads_ahead(self) -> None:
        super()._restore_before_reads_ahead()
        self._cursor.restore_keeper()

    def _make_plan(self, rest: RemainingIndices | None) -> EpochPlan:
        position = self._cursor.position
        return EpochPlan(
            self._begin,
            self.land,
            skip=position.batches * self._cursor.reads,
            samples=position.samples if position.samples and self._repartition.skips_samples else None,
            rest=rest,
            batched=self._loader.batch_sampler is not None,
            expected=position.indices,
            expected_batches=position.digest,
            skips_inside=position.skipped > 0 and position.batches == 0 and self._cursor.has_saved_position,
        )

    def _begin(self) -> int | None:
        """Called when the sampler is first asked: what the workers' generators are seeded from, if there are any."""
        self._cursor.begin()
        if not self._loader.num_workers:
            return None
        position = self._cursor.position
        since = (position.start,) if position.start else ()  # or batches would draw as the epoch's first ones did
        return rng.number(position.rng["torch"], self._epoch, self._cursor.rank, *since)


# A position restored by replay: the stream is read again from the start of the epoch up to its position.
#
# This costs as much reading as was done before the save, and is used where nothing cheaper is exact. A loader is
# replayed
#
# - if its data is a stream and neither the loader nor the dataset has `state_dict` and `load_state_dict`, or if only
#   the dataset has them but lives in worker processes (`loader_info.keeper_of`);
# - if it is a Hugging Face stream whose `state_dict` drops samples: those in a shuffle buffer, or in a batch of a
#   `map` with table output (`loader_info.loses_samples`);
# - if the state of torchdata's loader is a number alone (`loader_info.only_counts`);
# - if the saved state does not hold any more, because the number of ranks or the batch size has changed
#   (`repartition`), or if none was saved;
# - if `accelerator.skip_first_batches` asked for a number of batches to be skipped.
#
# Digests of the data show whether the replay yielded the same as before. An epoch that starts from the beginning is a
# replay of no batches.


class ByReplay(RestoreStrategy):
    """Takes the batches that were handed out from a new iterator once more, and drops them."""

    def open(self) -> Iterator[Any]:
        cursor = self._cursor
        cursor.begin()
        self._contents = Contents() if cursor.keeper is None and cursor.reads else None
        if cursor.reads_ahead:
            self._look_ahead(again=cursor.position.batches * cursor.reads)
        iterator = self._make_iterator()
        if cursor.position.batches:
            self._replay(iterator)
        if not cursor.reads_ahead:
            self.arrive()
        return iterator

    def _replay(self, iterator: Iterator[Any]) -> None:
        cursor, position = self._cursor, self._cursor.position
        replay = Replay(iterator, position.batches, self._note_contents)
        replay.run(cursor.name)
        if cursor.has_saved_position and self._contents is not None and position.layout:
            drawn = cursor.reads_ahead or replay.drawn
            why = mismatch(self._contents, position, found=replay.found, drawn=drawn)
            if why:
                cursor.warn(f"{cursor.name} {why}")


@dataclass
class Replay:
    """Takes `batches` batches from an iterator and gives each to `note`."""

    iterator: Iterator[Any]
    batches: int
    note: Callable[[Any], None]
    found: int = 0
    drawn: bool = False  # whether reading moved the global generators

    def run(self, name: str) -> None:
        before = rng.capture()
        with progress_bar(f"replaying {self.batches} batches of {name}", self.batches) as advance:
            for batch in itertools.islice(self.iterator, self.batches):
                self.found += 1
                self.note(batch)
                advance(1)
        self.drawn = rng.differ(before, rng.capture())


def mismatch(now: Contents, position: Position, *, found: int, drawn: bool) -> str:
    """Why a replayed stream did not yield what it had yielded before the save; empty if it did.

    `drawn`: reading the stream moved the global generators, which training moves as well. Augmentations are then drawn
    anew during a replay, so a single leaf that agrees (a label, an index) is enough.
    """
    saved = position.contents
    if found < position.batches:
        return (
            f"ended after {found} of the {position.batches} batches it had yielded before the save: it is other "
            "data, and samples of this epoch repeat or are missed."
        )
    if not saved:
        return (
            "was replayed without a check: its batches hold nothing that can be compared (tensors on a device, or the "
            "same values in every batch). If its order is not repeatable, samples of this epoch repeat or are missed."
        )
    different = now.differing(saved)
    if not different or (drawn and len(different) < len(saved)):
        return ""
    where = ", ".join(path or "the batch" for path in different[:3])
    return (
        f"yielded other data in its replay than before the save (in {where}), so samples of this epoch repeat or are "
        "missed: its order depends on something that is not restored, such as OS entropy or a global generator. Seed "
        "it, or give it state_dict and load_state_dict."
    )


def choose_strategy(
    cursor: Cursor, make_iterator: MakeIterator, repartition: Repartition, epoch: int
) -> RestoreStrategy:
    """By index where the data is map-style: no sample is read again. By state where the loader or its dataset has a
    `state_dict` that was saved and still holds. By replay otherwise: `ByReplay` lists the reasons."""
    if goes_by_index(cursor.reader):
        return ByIndex(cursor, make_iterator, repartition, epoch)
    state = cursor.position.state if cursor.keeper is not None and cursor.has_saved_position else None
    if state is not None and not only_counts(state):
        return ByState(cursor, make_iterator)
    return ByReplay(cursor, make_iterator)
