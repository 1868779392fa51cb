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

A `Cursor` has the position: what the order of an epoch depends on is captured at its start, and restored there.
Accelerate's loaders read the next batch before they hand out this one, which draws from generators and advances a
stream: a `Lookahead` keeps both as they were before each read, from which what had been read ahead is read again.

`EpochLoaders` has the loaders of one epoch, each under its key, and the saved positions that none has claimed yet.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sized
from dataclasses import asdict, dataclass, field
from typing import Any, cast
from weakref import WeakSet

from torch.utils.data import DataLoader

from ckpt.compat.torch import has_ended
from ckpt.data import sampling
from ckpt.data.batch_digest import Contents, Extract, extract
from ckpt.data.loader_info import (
    Loader,
    MakeIterator,
    batch_size,
    batches_skipped,
    begun_once,
    goes_by_index,
    keeper_of,
    only_counts,
    own_iterator,
    size_of,
    splits,
    stateful_samplers,
)
from ckpt.data.progress import Position
from ckpt.data.repartition import RemainingIndices, Repartition, batcher_of, layout_of
from ckpt.data.sampling import EpochPlan
from ckpt.errors import ConfigError, StateError
from ckpt.ranks.consensus import Ranks
from ckpt.state import rng, samplers
from ckpt.state.objects import Stateful
from ckpt.state.parts import naming_part
from ckpt.util.console import progress_bar


class Lookahead:
    """Follows the reads of `reader`, the loader inside another one, in one pass.

    Before each read, `before` is called with the number of reads made; then the generators are captured, and the state
    of the `keeper`, if there is one. What was read is digested in `contents`, if given, when the loop gets it: here it
    has not been sent to a device yet.
    """

    def __init__(
        self, reader: Any, keeper: Stateful | None, before: Callable[[int], None], contents: Contents | None = None
    ) -> None:
        self._reader = reader
        self._keeper = keeper
        self._before = before
        self._contents = contents
        self._moments: deque[tuple[dict[str, Any], Any]] = deque()  # of each read that the loop has not got yet
        self._read: deque[Extract] = deque()  # by each of them
        # found before the method of its class, because the outer loader calls `__iter__` by name; used once
        vars(reader)["__iter__"] = self._begin

    @property
    def first(self) -> tuple[int, dict[str, Any], Any]:
        """How many reads the loop has not got yet, and the generators and the keeper's state before the first."""
        generators, kept = self._moments[0] if self._moments else ({}, self._kept())
        return len(self._moments), generators, kept

    def taken(self, reads: int) -> None:
        """The loop has got the batches of this many reads; fewer, where the data was at its end."""
        for _ in range(min(reads, len(self._moments))):
            self._moments.popleft()
        for _ in range(min(reads, len(self._read))):
            extracted = self._read.popleft()
            if self._contents is not None:
                self._contents.add(extracted)

    def forget(self) -> None:
        """Drop the callback: an iterator that is never finished keeps this object alive."""
        self._before = lambda reads: None
        vars(self._reader).pop("__iter__", None)

    def _begin(self) -> Iterator[Any]:
        del vars(self._reader)["__iter__"]
        return self._follow(iter(self._reader))

    def _follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        reads = 0
        while True:
            self._before(reads)  # first, as it may restore generators, with which this read then begins
            self._moments.append((rng.capture(), self._kept()))
            try:
                batch = next(batches)
            except StopIteration:
                self._moments.pop()
                return
            reads += 1
            if self._contents is not None:
                self._read.append(extract(batch))
            yield batch

    def _kept(self) -> Any:
        return self._keeper.state_dict() if self._keeper is not None else None


def reads_per_batch(loader: Any, rank: int) -> int:
    """How many batches Accelerate's loader reads here for each that it hands out."""
    from accelerate.data_loader import DataLoaderDispatcher

    if not isinstance(loader, DataLoaderDispatcher):
        return 1
    if rank != 0:  # rank 0 reads for all
        return 0
    whole = loader.split_batches or loader.submesh_tp is not None
    return 1 if whole else loader.state.num_processes


# Called when a saved position is reached: whether the epoch was finished there, and the global generators from before
# the loader was taken back to the start of the epoch.
OnArrival = Callable[[bool, dict[str, Any]], None]

_begun: WeakSet[DataLoader[Any]] = WeakSet()  # loaders that were iterated over before, here


class Cursor:
    """The position of a loader on this rank, and the generators, samplers and state that are restored with it.

    Accelerate's loaders wrap another one, the `reader`, and read ahead of the loop. `reads` is how many batches the
    reader reads here for each one that the loop gets: none where rank 0 reads for all ranks.
    """

    def __init__(self, loader: Loader, rank: int, world_size: int) -> None:
        self.loader = loader
        self.rank = rank
        self.reader: Any = samplers.reader(loader)
        self.reads_ahead = self.reader is not loader
        self.reads = reads_per_batch(loader, rank) if self.reads_ahead else 1
        self.position = Position(world_size=world_size, split=splits(loader), skipped=batches_skipped(loader))
        self.has_saved_position = False  # `position` is where the loader was saved, not where it is
        self.on_arrival: OnArrival = lambda done, before: None
        self.warn: Callable[[str], None] = lambda text: None
        self._before: dict[str, Any] = {}

    @property
    def keeper(self) -> Stateful | None:
        """Whose `state_dict` holds the position: the loader or its dataset, if one has it."""
        return keeper_of(self.reader)

    @property
    def _reader_is_keeper(self) -> bool:
        return self.keeper is self.reader

    @property
    def name(self) -> str:
        """The loader's class, for messages."""
        return type(self.loader).__name__

    def go_to(self, saved: dict[str, Any], on_arrival: OnArrival, warn: Callable[[str], None]) -> Position:
        """Let the next pass continue from a saved position."""
        self.position = Position.from_saved(saved)
        self.has_saved_position = True
        self.on_arrival, self.warn = on_arrival, warn
        return self.position

    def prepare(self) -> None:
        """Called before an iterator is made."""
        begun = isinstance(self.reader, DataLoader) and self.reader in _begun
        if not self.has_saved_position:
            self.position.worn = begun and self.reader.persistent_workers
        if not begun and type(self.reader).__name__ == "StatefulDataLoader":
            self.reader.load_state_dict(
                {}
            )  # who has asked for its state before, as Accelerate does, has begun an epoch
        if isinstance(self.reader, DataLoader):
            _begun.add(self.reader)
        self._before = rng.capture()

    def begin(self) -> None:
        """Called before the first index or batch is drawn: capture what it depends on, or restore what was saved."""
        if self.has_saved_position and self.position.rng:
            self._restore_start()
        else:
            self._capture_start()

    def _restore_start(self) -> None:
        position = self.position
        rng.restore(position.rng)
        self.set_generators(position.generators)
        for sampler, state in zip(stateful_samplers(self.loader), position.samplers, strict=False):
            with naming_part(type(sampler).__name__):
                sampler.load_state_dict(state)

    def _capture_start(self) -> None:
        position = self.position
        position.rng = rng.capture()
        position.generators = self._generator_states()
        position.samplers = [sampler.state_dict() for sampler in stateful_samplers(self.loader)]
        position.dataset_size = size_of(getattr(self.reader, "dataset", None))
        position.layout = asdict(layout_of(self.loader))
        batcher = batcher_of(self.reader) if goes_by_index(self.reader) else None
        position.sampler_size = size_of(getattr(batcher, "sampler", None))

    def arrive(self) -> bool:
        """Called when the position is reached: False if there was no saved one to reach."""
        if not self.has_saved_position:
            return False
        self.has_saved_position = False
        self.on_arrival(self.position.done, self._before)
        return True

    def finish_epoch(self) -> None:
        """Restore the end of an epoch: nothing is left to hand out."""
        position = self.position
        if self.reads_ahead and not position.done:
            self.loader.iteration += 1  # type: ignore[attr-defined]  # as Accelerate's loader does at its end
        if self.reads:
            self.restore_keeper()
        if self.reads_ahead and self._reader_is_keeper:
            iter(self.reader)  # consumes the state of the end; the next pass starts a new epoch
        self.set_generators(position.generators_now)
        self.arrive()

    def note_end(self, iterator: Any) -> None:
        """A batch was handed out: note whether it was the last."""
        if self.reads_ahead:
            self.position.exhausted = bool(getattr(self.loader, "end_of_dataloader", False))
        elif has_ended(iterator):  # but a keeper's own state says it
            self.position.exhausted = not self._reader_is_keeper

    def leave_state_to_reader(self) -> None:
        """Save no state of a loader that rank 0 reads for all: rank 0 has it."""
        if not self.reads and self.keeper is not None:
            self.position.state = ()

    def update_generators(self) -> None:
        self.position.generators_now = self._generator_states()

    def update_state(self) -> None:
        """Take the keeper's state; a loader that reads ahead is beyond the loop, and `Lookahead` has it."""
        keeper = self.keeper
        if keeper is not None and not self.reads_ahead:
            self.position.state = keeper.state_dict()

    def restore_keeper(self) -> None:
        keeper = self.keeper
        if keeper is not None and self.position.state is not None:
            with naming_part(type(keeper).__name__):
                _refuse_state_of_others(keeper, self.position.state)
                keeper.load_state_dict(self.position.state)

    def set_generators(self, states: list[Any]) -> None:
        for generator, state in zip(samplers.generators(self.loader), states, strict=False):
            rng.restore_one(generator, state)

    def _generator_states(self) -> list[Any]:
        return [rng.capture_one(generator) for generator in samplers.generators(self.loader)]


def _refuse_state_of_others(keeper: Stateful, state: Any) -> None:
    """Refuse another data-parallel rank's state for a loader of torchtitan: it would only warn, and begin anew."""
    if not isinstance(state, Mapping) or "world_size" not in state:
        return
    own = keeper.state_dict()
    mine = next((key for key in own if key != "world_size"), None) if isinstance(own, Mapping) else None
    if isinstance(mine, str) and "world_size" in own and mine not in state:
        saved = ", ".join(str(key) for key in state if key != "world_size")
        raise StateError(
            f"{type(keeper).__name__} reads the data of {mine}, but this rank saved the position of {saved}: this "
            "run's mesh divides the ranks differently. Resume with the mesh dimensions of the saved run, or leave out "
            "dataloader=, which starts the data over."
        )


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
        self._make_iterator: MakeIterator = lambda: begun_once(make_iterator(), cursor.loader)
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
        """End the pass over the data: nothing that the iterator holds leads back to the loader. Persistent workers stop
        with the loader then; the garbage collector would wait for each of them for 5 s."""
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
                "a DataLoader with in_order=False yields batches in an order that depends on timing, so no run can "
                "resume within an epoch. Build the DataLoader with in_order=True."
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
            f"ended after {found} of the {position.batches} batches it had yielded before the save: its data has "
            "changed, so samples of this epoch repeat or are missed."
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
        f"yielded different data in its replay than before the save (in {where}), so samples of this epoch repeat "
        "or are missed: its order depends on something that is not restored, such as OS entropy or a global "
        "generator. Seed it, or give it state_dict and load_state_dict."
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
    def length(self) -> int:
        """How many batches this epoch has. Those before a resume with another batch size count as they were."""
        size, now = len(cast(Sized, self.loader)), self._repartition.now
        rest = self._repartition.rest(self._cursor.position)
        samples = None if rest is None else now.batch if rest.distributed else now.window
        if rest is None or samples is None:
            return size
        left = len(rest) // samples if getattr(rest.owner, "drop_last", False) else -(-len(rest) // samples)
        return self._cursor.position.before + left

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
        self._cursor.has_saved_position = True

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
        try:
            for batch in iterator:
                samples = self._strategy.take(batch) if self._strategy is not None else 0
                position.batches += 1
                position.samples += samples
                self._cursor.note_end(iterator)
                yield batch, samples
                del batch  # or it would take memory while the next one is read
        finally:
            if self._strategy is not None:
                self._strategy.close()
        position.done = True
        self._update_position()
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

    def length(self, loader: Loader) -> int:
        """How many batches the epoch has that the next pass through a loader is in."""
        key = self._key(loader)
        if key in self.by_key:
            return self.by_key[key].length
        tracked, found = TrackedLoader(loader, self._ranks.rank, self._ranks.world_size), self.unclaimed.key_of(key)
        if found is not None:
            tracked.go_back(self.unclaimed.positions[found], lambda done, before: None, lambda text: None)
        return tracked.length

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
