"""A loader with its position: what the order of an epoch depends on is captured at its start, and restored there.

Used by all three strategies for restoring a position (`ckpt/data/restore_strategy.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ckpt.compat.torch import began_too_early, has_ended, has_workers
from ckpt.data.epoch_layout import batcher_of, layout_of
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
from ckpt.data.position import Position
from ckpt.data.prefetch import reads_per_batch
from ckpt.errors import StateError
from ckpt.state import rng, samplers
from ckpt.state.load_errors import naming_part

# Called when a saved position is reached: whether the epoch was finished there, and the global generators from before
# the loader was taken back to the start of the epoch.
OnArrival = Callable[[bool, dict[str, Any]], None]


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
        if not self.has_saved_position:
            self.position.worn = has_workers(self.reader)
        if began_too_early(self.reader):
            self.reader.load_state_dict({})  # Accelerate asked for its state too early, which has made an iterator
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

    def update(self, iterator: Any) -> None:
        """Bring the position up to date with the loader and, where the loop is in the middle, its iterator."""
        position = self.position
        if not self.reads and self.keeper is not None:
            position.state = ()  # rank 0, which reads, has it
        if iterator is not None and self.reads_ahead:
            position.exhausted = position.batches > 0 and bool(getattr(self.loader, "end_of_dataloader", False))
        elif iterator is not None and not self._reader_is_keeper:  # whose own state says it
            position.exhausted = has_ended(iterator)

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
