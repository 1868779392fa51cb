"""A loader with its position: what the order of an epoch depends on is captured at its start, and restored there.

Used by all three strategies for restoring a position (`ckpt/data/restore_strategy.py`). Accelerate's loaders read the
next batch before they hand out this one, which draws from generators and advances a stream: a `Lookahead` keeps both as
they were before each read, from which what had been read ahead is read again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any
from weakref import WeakSet

from torch.utils.data import DataLoader

from ckpt.compat.torch import has_ended
from ckpt.data.batch_digest import Contents, Extract, extract
from ckpt.data.loader_info import (
    Loader,
    Stateful,
    batches_skipped,
    goes_by_index,
    keeper_of,
    size_of,
    splits,
    stateful_samplers,
)
from ckpt.data.progress import Position
from ckpt.data.repartition import batcher_of, layout_of
from ckpt.errors import StateError
from ckpt.state import rng, samplers
from ckpt.state.parts import naming_part


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
            self._before(reads)
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
            f"{type(keeper).__name__} has the data of {mine}, and this rank saved that of {saved}: the ranks are "
            "divided over the mesh in another way. Resume with the dimensions that saved it, or leave dataloader= out: "
            "the data then starts over."
        )
