"""A loader under the manager's care: it hands out batches, knows its position, and can go back to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from torch.utils.data import DataLoader

from ckpt.data import sampling
from ckpt.data.batch_digest import Contents, extract
from ckpt.data.by_replay import Replay, unrepeated
from ckpt.data.epoch_layout import batcher_of, layout_of
from ckpt.data.loader_hook import Own, unfollowed
from ckpt.data.loader_info import batch_size, goes_by_index, keeper_of, size_of, splits, stateful_samplers
from ckpt.data.position import Position
from ckpt.data.prefetch import Lookahead, reads_per_batch
from ckpt.data.repartition import Regrouping
from ckpt.data.sampling import EpochPlan
from ckpt.errors import ConfigError
from ckpt.state import rng, samplers

Ready = Callable[[bool, dict[str, Any]], None]  # given whether the loader was done, and the generators before


class TrackedLoader:
    """One time through a loader. `take` goes through the epoch, from where it was left.

    How a loader is brought back to its position depends on what it is: by its indices where data is map-style, by its
    own `state_dict` where it has one, and by going through the batches once more where nothing else is left.

    Accelerate's loaders stand around another one, the `reader`, and read ahead of the loop.
    """

    def __init__(self, loader: Iterable[Any], rank: int, world_size: int) -> None:
        self.loader = loader
        self.waits = False  # for `take`, to go on from a saved position
        self._reader: Any = samplers.reader(loader)
        self._reads = 1 if self._reader is loader else reads_per_batch(loader, rank)  # for each batch
        self._position = Position(world_size=world_size, split=splits(loader))
        self._rank = rank
        self._regrouping = Regrouping(loader, self._reads, rank, world_size)
        self._ready: Ready = lambda done, before: None
        self._before: dict[str, Any] = {}  # the generators, before going back to the beginning of the epoch
        self._warn: Callable[[str], None] = lambda text: None
        self._course: EpochPlan | None = None
        self._lookahead: Lookahead | None = None
        self._contents: Contents | None = None  # of a stream that can only be gone through again
        self._iterator: Any = None
        self._own: Own = lambda: unfollowed(loader)

    @property
    def is_open(self) -> bool:
        """Whether the training loop is inside."""
        return self._iterator is not None

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank speaks for all."""
        return self._rank == 0

    @property
    def trained(self) -> bool:
        return self._position.trained

    @trained.setter
    def trained(self, trained: bool) -> None:
        self._position.trained = trained

    @property
    def batches(self) -> int:
        """How many have been handed out in this epoch, of whatever size."""
        return self._position.before + self._position.batches

    @property
    def done(self) -> bool:
        return self._position.done and not self.waits

    def state(self) -> dict[str, Any]:
        """The position, to be saved."""
        if not self.waits:
            self._note()
            keeper = keeper_of(self._reader)
            if keeper is not None and not self._reads_ahead:
                self._position.state = keeper.state_dict()
        return dict(vars(self._position))

    def go_back(self, saved: dict[str, Any], ready: Ready, warn: Callable[[str], None]) -> dict[str, str]:
        """Let `take` go on from a saved position. Returns what will not be as it was, and why."""
        position = self._position = Position.from_saved(saved)
        self.waits = True
        self._ready, self._warn = ready, warn
        changes = self._regrouping.carry_over(position)
        size = size_of(getattr(self._reader, "dataset", None))
        if None not in (size, position.dataset_size) and size != position.dataset_size:
            changes["dataset"] = f"has {size} samples now and had {position.dataset_size} when it was saved"
        workers = bool(getattr(self._reader, "num_workers", 0))
        unseeded = workers and getattr(self._reader, "batch_sampler", self) is None
        if unseeded or (position.worn and not goes_by_index(self._reader)):
            changes["workers"] = "they are new processes, and what they draw at random differs from here on"
        return changes

    def skip(self, batches: int) -> None:
        """Let `take` begin after so many batches of an epoch that begins then, with everything as it is."""
        self._position.batches = batches
        self.waits = batches > 0

    def take(self, epoch: int, *, announced: bool = True, own: Own | None = None) -> Iterator[tuple[Any, int]]:
        """The rest of the epoch: each batch with its number of samples. The loader is told the epoch if `announced`.

        `own` makes the loader's iterator, where that is not what its class says.
        """
        self._own = own or self._own
        for one in [self.loader, *samplers.samplers(self.loader), getattr(self.loader, "dataset", None)]:
            if announced and callable(getattr(one, "set_epoch", None)):
                one.set_epoch(epoch)
        position = self._position
        try:
            self._iterator = self._open(position, epoch)
            for batch in self._iterator:
                samples = self._taken(batch)
                position.batches += 1
                position.samples += samples
                yield batch, samples
            position.done = True
        finally:
            self._leave()

    @property
    def _reads_ahead(self) -> bool:
        return self._reader is not self.loader

    def _taken(self, batch: Any) -> int:
        """The loop gets a batch: how many samples it has."""
        if self.waits:  # nothing was read here: the main rank reads, and hands out
            self._arrive(self._position)
        self._note_contents(batch)
        read = self._course.taken(self._reads) if self._course else 0
        return read if self._course and self._reads == 1 else batch_size(batch)

    def _open(self, position: Position, epoch: int) -> Iterator[Any]:
        """An iterator that stands at the position."""
        if not self.waits:
            workers = getattr(self._reader, "_iterator", None)  # a loader keeps its iterator for persistent ones
            position.worn = bool(getattr(self._reader, "persistent_workers", False)) and workers is not None
        if getattr(self._reader, "_initial_iter_for_state_dict", False):
            self._reader.load_state_dict({})  # Accelerate asked for its state too early, which has made an iterator
        self._before = rng.capture()
        if position.done or position.exhausted:
            return self._at_end(position)
        if goes_by_index(self._reader):
            return self._by_index(self._reader, position, epoch)
        self._begin(position)
        keeper = keeper_of(self._reader)
        if keeper is None or not self.waits or position.state is None:
            self._contents = Contents() if keeper is None and self._reads else None
            return self._by_replay(position)
        return self._by_state(keeper, position)

    def _note(self) -> None:
        """Bring the position up to what the loader and its iterator say now."""
        position = self._position
        position.generators_now = [rng.capture_one(one) for one in samplers.generators(self.loader)]
        if self._course is not None:
            position.digest, position.indices = "", self._course.digest.hexdigest()
        if self._contents is not None:
            position.contents = self._contents.digests()
        if self._lookahead is not None:
            position.ahead, position.rng_ahead, position.state = self._lookahead.first
        if not self._reads and keeper_of(self._reader) is not None:
            position.state = ()  # the main rank, which reads, has it
        if self._iterator is not None and self._reads_ahead:
            position.exhausted = position.batches > 0 and bool(getattr(self.loader, "end_of_dataloader", False))
        elif self._iterator is not None and keeper_of(self._reader) is not self.loader:  # such a loader knows it itself
            position.exhausted = getattr(getattr(self._iterator, "_dataset_fetcher", None), "ended", False)

    def _leave(self) -> None:
        """The loop has ended, or was left. Nothing of ours may keep the iterator: its workers stop when it goes."""
        self._note()
        self._iterator = None
        if self._course is not None:
            self._course.forget()
        if self._lookahead is not None:
            self._lookahead.forget()
        self._course = self._lookahead = self._contents = None

    def _at_end(self, position: Position) -> Iterator[Any]:
        if self._reads_ahead and not position.done:
            self.loader.iteration += 1  # type: ignore[attr-defined]  # as it does itself when it comes to its end
        if self._reads:
            self._restore_keeper(position)
        if self._reads_ahead and keeper_of(self._reader) is self._reader:
            iter(self._reader)  # takes the state of its end now, and begins afresh the next time
        self._set_generators(position.generators_now)
        self._arrive(position)
        return iter(())

    def _by_index(self, loader: DataLoader[Any], position: Position, epoch: int) -> Iterator[Any]:
        if not getattr(loader, "in_order", True):
            raise ConfigError(
                "a DataLoader with in_order=False gives batches in an order that depends on timing: no run can go on "
                "from the middle of it. Build it with in_order=True."
            )
        if not self._reads:
            self._begin(position)
            return self._own()
        rest = self._regrouping.rest(position)

        def begin() -> int | None:
            self._begin(position)
            since = (position.start,) if position.start else ()  # or batches would draw as the epoch's first ones did
            return rng.number(position.rng["torch"], epoch, self._rank, *since) if loader.num_workers else None

        if self._reads_ahead and not loader.num_workers:  # workers read with generators of their own
            self._look_ahead(position)
        self._course = EpochPlan(
            begin,
            lambda: self._land(position),
            skip=position.batches * self._reads,
            samples=position.samples if position.samples and self._regrouping.skips_samples else None,
            rest=rest,
            batched=loader.batch_sampler is not None,
            expected=position.indices,
            expected_batches=position.digest,
        )
        sampling.steer(loader).course = self._course
        return self._own()

    def _by_state(self, keeper: Any, position: Position) -> Iterator[Any]:
        """From the state that the loader or the dataset kept."""
        if not self._reads:
            return self._own()
        keeper.load_state_dict(position.state)
        if self._reads_ahead:
            self._look_ahead(position)
            return self._own()
        iterator = self._own()
        self._arrive(position)
        return iterator

    def _by_replay(self, position: Position) -> Iterator[Any]:
        if self._reads_ahead:
            self._look_ahead(position, again=position.batches * self._reads)
        iterator = self._own()
        if position.batches:
            name = type(self.loader).__name__
            again = Replay(iterator, position.batches, self._note_contents)
            again.run(name)
            if self.waits and self._contents is not None and position.layout:
                drawn = self._reads_ahead or again.drawn
                why = unrepeated(self._contents, position, found=again.found, drawn=drawn)
                if why:
                    self._warn(f"{name} {why}")
        if not self._reads_ahead:
            self._arrive(position)
        return iterator

    def _note_contents(self, batch: Any) -> None:
        if self._lookahead is not None:
            self._lookahead.taken(self._reads)
        elif self._contents is not None:
            self._contents.add(extract(batch))

    def _look_ahead(self, position: Position, again: int = 0) -> None:
        """Follow the reads. The first `again` of them have been handed out, and `position.ahead` more had been made."""

        def before(reads: int) -> None:
            if self.waits and reads == again and self._course is None:
                self._land(position)
            elif self.waits and position.ahead and reads == again + position.ahead:
                self._arrive(position)

        self._lookahead = Lookahead(self._reader, keeper_of(self._reader), before, self._contents)

    def _begin(self, position: Position) -> None:
        """The first index or batch is about to be drawn: note everything it depends on, or put it back as it was."""
        if self.waits and position.rng:
            rng.restore(position.rng)
            self._set_generators(position.generators)
            for sampler, state in zip(stateful_samplers(self.loader), position.samplers, strict=False):
                sampler.load_state_dict(state)
            return
        position.rng = rng.capture()
        position.generators = [rng.capture_one(one) for one in samplers.generators(self.loader)]
        position.samplers = [sampler.state_dict() for sampler in stateful_samplers(self.loader)]
        position.dataset_size = size_of(getattr(self._reader, "dataset", None))
        position.layout = asdict(layout_of(self.loader))
        batcher = batcher_of(self._reader) if goes_by_index(self._reader) else None
        position.sampler_size = size_of(getattr(batcher, "sampler", None))

    def _land(self, position: Position) -> None:
        """What was handed out is behind. What had been read ahead is read again, as things stood then."""
        if not (self.waits and self._lookahead is not None and position.ahead):
            self._arrive(position)
            return
        rng.restore(position.rng_ahead)
        if self._course:
            self._restore_keeper(position)

    def _arrive(self, position: Position) -> None:
        """The position is reached: all is as it was when it was saved."""
        if not self.waits:
            return
        self.waits = False
        self._ready(position.done, self._before)
        if self._course and not getattr(self._reader, "num_workers", 0):
            # with workers the sampler is ahead of the loop, and these are as they were by going through it again
            self._set_generators(position.generators_now)
        if self._course and not position.ahead:
            self._restore_keeper(position)
        if self._course is not None:
            position.samples = max(position.samples, self._course.left_out if self._reads == 1 else 0)
            why = self._course.trouble(type(self.loader).__name__)
            if why:
                self._warn(why)

    def _restore_keeper(self, position: Position) -> None:
        keeper = keeper_of(self._reader)
        if keeper is not None and position.state is not None:
            keeper.load_state_dict(position.state)

    def _set_generators(self, states: list[Any]) -> None:
        for generator, state in zip(samplers.generators(self.loader), states, strict=False):
            rng.restore_one(generator, state)
