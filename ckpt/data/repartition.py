"""How an epoch is divided among ranks and into batches, and a resume in its middle where that has changed.

With another number of ranks or another batch size the position is converted by samples: every sample of the epoch is
seen once, in the remaining order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, cast

import xxhash
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from ckpt.data.batch_digest import index_bytes
from ckpt.data.loader_info import goes_by_index, keeper_of, size_of, splits
from ckpt.data.progress import Position
from ckpt.state import rng, samplers
from ckpt.state.parts import has_state


class Batcher(Protocol):
    """An object that makes batches of what its sampler yields: a batch sampler, or a loader without one."""

    sampler: Any


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Round-robin division of the epoch's global order: pieces of `piece` samples go to the replicas in turn.

    A DistributedSampler has pieces of one sample; Accelerate deals whole batches, or an equal part of each. In every
    case one step of all replicas takes the next `window` samples of the order, so layouts with the same window have the
    same global batches: 4 replicas x 8 and 2 x 16 both take the next 32.
    """

    replicas: int = 1
    replica: int = 0
    piece: int = 1
    batch: int | None = None  # samples that a replica gets at a time; unknown for batches of varying length
    window: int | None = None

    def __str__(self) -> str:
        return f"{self.replicas} x {self.batch}" if self.replicas > 1 else str(self.batch)


def saved_layout(position: Position, now: Layout, ranks: int, *, shared: bool) -> Layout:
    """The layout that a position was saved with. Earlier versions saved none: then it follows from the counts.

    `now` is that of the same loader for `ranks` ranks; `shared` says whether the ranks share the epoch's samples.
    """
    if position.layout:
        return Layout(**position.layout)
    full = position.batches and position.samples % position.batches == 0
    batch = position.samples // position.batches if full else None
    if position.world_size == ranks:
        return replace(now, batch=batch, window=batch and batch * now.replicas) if now.piece == 1 else now
    replicas = position.world_size if shared else 1
    window = now.window if position.split else batch and batch * replicas
    return Layout(replicas=replicas, batch=batch, window=window)


def layout_of(loader: Any) -> Layout:
    """The current layout of a loader on this rank."""
    reader = samplers.reader(loader)
    batch = _batch_size(reader)
    if reader is not loader:
        return _of_accelerate(loader, reader, batch)
    sampler = distributed_sampler_of(loader)
    if sampler is None:
        return Layout(batch=batch, window=batch)
    replicas = sampler.num_replicas
    return Layout(replicas=replicas, replica=sampler.rank, batch=batch, window=batch and batch * replicas)


def _of_accelerate(loader: Any, reader: Any, batch: int | None) -> Layout:
    splitter = next((part for part in (reader.batch_sampler, reader.dataset) if hasattr(part, "process_index")), None)
    splitter = samplers.unwrapped(splitter)
    if splitter is None:  # one rank reads: alone, or for all
        ranks = loader.state.num_processes if hasattr(loader, "split_batches") and not loader.split_batches else 1
        return Layout(batch=batch, window=batch and batch * ranks, piece=batch or 1)
    replicas, whole = splitter.num_processes, splitter.batch_size
    if whole is None:
        return Layout(replicas=replicas, replica=splitter.process_index)
    batch = whole // replicas if splitter.split_batches else whole
    window = batch * replicas
    return Layout(replicas=replicas, replica=splitter.process_index, piece=batch, batch=batch, window=window)


def _batch_size(reader: Any) -> int | None:
    sampler = getattr(reader, "batch_sampler", None)
    if sampler is None and hasattr(reader, "batch_sampler"):  # a stream, or single samples
        return reader.batch_size or 1
    size = getattr(sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def distributed_sampler_of(loader: Any) -> DistributedSampler[Any] | None:
    """The DistributedSampler that the loader batches directly. One inside another sampler does not fix the order."""
    outer = samplers.unwrapped(getattr(loader, "batch_sampler", None))
    found = samplers.unwrapped(getattr(loader if outer is None else outer, "sampler", None))
    return found if isinstance(found, DistributedSampler) else None


def batcher_of(reader: Any) -> Batcher | None:
    """The object that batches what its `sampler` yields and nothing else, so that batching can start at any sample;
    None for a custom batch sampler, which may group samples or have copied the order already."""
    batcher: Batcher = reader
    if reader.batch_sampler is None:
        return batcher
    batcher = samplers.unwrapped(reader.batch_sampler)
    while hasattr(batcher, "batch_sampler"):  # Accelerate wraps it in its own
        batcher = batcher.batch_sampler
    known = isinstance(batcher, BatchSampler) and type(batcher).__module__.partition(".")[0] in ("torch", "torchdata")
    return batcher if known else None


@dataclass(frozen=True)
class ConsumedSamples:
    """What one replica consumed under the earlier layout: `samples` indices after `start`, and their digest."""

    layout: Layout
    start: int
    samples: int
    digest: str

    def agrees(self, order: Sequence[Any]) -> bool:
        """Whether the order contains what was consumed. Not decidable at its end, where samplers pad."""
        if not self.digest or len(order) < self.start + self.samples * self.layout.replicas:
            return True
        layout = self.layout
        given = (
            index
            for number, index in enumerate(order[self.start :])
            if number // layout.piece % layout.replicas == layout.replica
        )
        return xxhash.xxh3_64_hexdigest(index_bytes(list(itertools.islice(given, self.samples)))) == self.digest


@dataclass
class RemainingIndices:
    """The order after `start` global samples. Replaces the sampler of `owner`, the batch sampler.

    `advance` must run while the generators are in their state of the epoch's start, because samplers draw from them.
    With `distributed` the sampler is a DistributedSampler, and this replica gets its share of what is left.
    """

    owner: Batcher
    sampler: Any
    start: int
    distributed: bool
    consumed: ConsumedSamples | None = None
    may_bypass_sampler: bool = False  # a custom owner, which may have copied the order
    problem: str = ""
    _used: bool = False
    _left: Iterable[Any] = field(default_factory=list)

    def advance(self) -> None:
        if not self.distributed:
            iterator = iter(self.sampler)
            consumed = list(itertools.islice(iterator, self.start))
            self._left = iterator
        elif is_round_robin(self.sampler):
            whole = global_order(self.sampler)
            consumed, self._left = whole[: self.start], self._share(whole[self.start :])
        else:
            self._left = itertools.islice(self.sampler, self.start // self.sampler.num_replicas, None)
            self.problem = (
                f"{type(self.sampler).__name__} does not give rank r of R the samples r, r+R, ..., so the samples that "
                "another number of ranks consumed are unknown: samples of this epoch repeat or are missed. Use a plain "
                "DistributedSampler, or change the number of ranks between epochs."
            )
            return
        if self.consumed is not None and not self.consumed.agrees(consumed):
            self.problem = (
                f"{type(self.sampler).__name__} gave a different order than before the resume, so samples of this "
                "epoch repeat or are missed. Give the sampler a generator of its own, or a state_dict."
            )

    def __iter__(self) -> Iterator[Any]:
        self._used = True
        return iter(self._left)

    def __len__(self) -> int:
        if not self.distributed:
            return max(0, len(self.sampler) - self.start)
        left = max(0, len(self.sampler.dataset) - self.start)
        ranks = self.sampler.num_replicas
        return int(left // ranks if self.sampler.drop_last else -(-left // ranks))

    def checked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of a custom batch sampler; `problem` if it never uses its sampler, but has copied the order."""
        first = list(itertools.islice(batches, 1))
        if first and not self._used:
            self.problem = (
                f"{type(self.owner).__name__} does not iterate over its sampler at the start of an epoch, so it starts "
                "the epoch over: samples repeat. Change the number of ranks between epochs."
            )
        return itertools.chain(first, batches)

    def _share(self, left: list[int]) -> list[int]:
        ranks: int = self.sampler.num_replicas
        total = len(self) * ranks
        padded = left + (left * (total // max(1, len(left)) + 1))[: max(0, total - len(left))]
        return padded[self.sampler.rank : total : ranks]


def global_order(sampler: DistributedSampler[Any]) -> list[int]:
    """The order of this epoch over all ranks, without padding."""
    names = ("num_replicas", "rank", "num_samples", "total_size")
    kept = {name: getattr(sampler, name) for name in names}
    size = len(sampler.dataset)  # type: ignore[arg-type]
    vars(sampler).update(num_replicas=1, rank=0, num_samples=size, total_size=size)
    try:
        return list(sampler)
    finally:
        vars(sampler).update(kept)


def is_round_robin(sampler: DistributedSampler[Any]) -> bool:
    """Whether rank r of R gets samples r, r + R, ... of the order: torch's class does, a subclass may not."""
    if type(sampler).__iter__ is DistributedSampler.__iter__:
        return True
    before = rng.capture()
    try:
        share = list(sampler)
        rng.restore(before)
        whole = global_order(sampler)
    finally:
        rng.restore(before)
    expected = whole[sampler.rank :: sampler.num_replicas]
    return share[: len(expected)] == expected[: len(share)] and abs(len(share) - len(expected)) <= 1


_DRAWN = "Augmentations and dropout are drawn per rank and batch, so they differ from an unchanged run"


@dataclass
class Repartition:
    """Converts a saved position of a loader to the loader's current layout."""

    loader: Any
    reads: int  # batches that Accelerate's loader reads here for each that it hands out
    rank: int
    world_size: int
    consumed: ConsumedSamples | None = None  # by this rank under the saved layout, to verify the order

    def __post_init__(self) -> None:
        self.reader = samplers.reader(self.loader)
        self.now = layout_of(self.loader)
        self._ahead = self.reader is not self.loader
        self._sampler = None if self._ahead else distributed_sampler_of(self.loader)

    def carry_over(self, position: Position) -> dict[str, str]:
        """Convert the position in place. Returns what will differ from an unchanged run, and why."""
        shared = self._ahead or self._sampler is not None
        then = saved_layout(position, self.now, self.world_size, shared=shared)
        ranks, position.world_size, position.layout = position.world_size, self.world_size, asdict(self.now)
        by_index = goes_by_index(self.reader)
        if ranks != self.world_size and not by_index:
            position.state = None
        if position.done or position.exhausted or not (position.batches or position.start):
            return {}
        layouts = [layout for layout in (then, self.now) if layout.batch is not None]
        sizes = {(layout.replicas, layout.batch, layout.window) for layout in layouts}
        if ranks == self.world_size and len(sizes) < 2 and then.replicas == self.now.replicas:
            return {}
        if not by_index:
            return self._carry_stream(position, then, ranks)
        return self._carry_order(position, then, ranks)

    @property
    def skips_samples(self) -> bool:
        """Whether a custom batch sampler makes the batches, whose length may have changed: samples are skipped then."""
        return self.reader.batch_sampler is not None and batcher_of(self.reader) is None and not self._ahead

    def rest(self, position: Position) -> RemainingIndices | None:
        """The order after the samples that earlier layouts consumed in this epoch; None if the layout never changed."""
        if not position.start:
            return None
        batcher = batcher_of(self.reader)
        owner = self._owner() if batcher is None else batcher
        if owner is None:
            return None  # another kind of loader than the one that was saved
        sampler = samplers.unwrapped(owner.sampler)
        return RemainingIndices(
            owner, sampler, position.start, self._sampler is sampler, self.consumed, may_bypass_sampler=batcher is None
        )

    def _owner(self) -> Batcher | None:
        """A custom batch sampler around a DistributedSampler."""
        found = samplers.unwrapped(self.reader.batch_sampler)
        return found if self._sampler is not None and getattr(found, "sampler", None) is self._sampler else None

    def _carry_order(self, position: Position, then: Layout, ranks: int) -> dict[str, str]:
        changes = self._order_changes(position) if self._ahead and ranks != self.world_size else {}
        batcher = batcher_of(self.reader)
        if batcher is None and (self._owner() is None or then.replicas == self.now.replicas):
            return changes | self._carry_batches(position, ranks)
        if self._ahead and then.window is None:
            return changes | self._carry_batches(position, ranks)
        if batcher is not None and self._sampler is None and not self._ahead and ranks != self.world_size:
            changes["data"] = self._own_order(position, ranks, samplers.unwrapped(batcher.sampler))
            if then.batch in (None, self.now.batch):
                return changes
        gone = position.batches * (then.window or 0) if self._ahead else position.samples * then.replicas
        taken = gone if self.reads != 1 else position.samples
        self.consumed = ConsumedSamples(then, position.start, taken, position.indices)
        position.start += gone
        position.before += position.batches
        position.batches = position.samples = position.ahead = 0
        position.digest = position.indices = ""
        if self._ahead:
            position.state = None
        if "data" not in changes:
            changes["data"] = _describe(then, self.now, position.start)
        return changes

    def _carry_batches(self, position: Position, ranks: int) -> dict[str, str]:
        """Custom batch samplers: only whole batches can be converted to another number of ranks."""
        if ranks == self.world_size:
            return {}  # the plan skips by samples, whatever the batches are
        position.digest, position.indices, position.ahead = "", "", 0
        if not self._ahead:
            name = type(samplers.unwrapped(self.reader.batch_sampler)).__name__
            return {
                "data": f"{name} is a custom batch sampler: which samples {ranks} ranks consumed is unknown to "
                f"{self.world_size}, so samples of this epoch repeat or are missed. Change the number of ranks between "
                "epochs"
            }
        split = splits(self.loader) or position.split  # a single rank gets all batches either way
        gone = position.batches * (1 if split else ranks)
        position.batches, again = divmod(gone, 1 if split else self.world_size)
        return {"data": f"the last {again} batches before the resume are seen again"} if again else {}

    def _order_changes(self, position: Position) -> dict[str, str]:
        if len(samplers.generators(self.loader)) == len(position.generators):
            return {}
        return {
            "order": "drawn again: Accelerate gives a sampler its own generator if there are several ranks, and only "
            "then. With DataLoaderConfiguration(use_seedable_sampler=True) it is the same for any number"
        }

    def _own_order(self, position: Position, ranks: int, sampler: object) -> str:
        """A sampler that is no DistributedSampler: by its length, each rank has all samples or a custom share."""
        size, total = position.sampler_size, position.dataset_size
        if ranks == 1:
            ranks, size = self.world_size, size_of(sampler)
        if size is not None and total is not None and ranks > 1 and abs(size * ranks - total) < ranks:
            return (
                f"{type(sampler).__name__} divides the samples among ranks by a rule of its own, so which ones were "
                f"consumed is unknown to {self.world_size} ranks: samples of this epoch repeat or are missed. Use a "
                "DistributedSampler, or change the number of ranks between epochs"
            )
        return (
            "the sampler is not distributed: every rank continues in an order of its own, as before, and new ranks "
            "in that of rank 0"
        )

    def _carry_stream(self, position: Position, then: Layout, ranks: int) -> dict[str, str]:
        if ranks != self.world_size and not self._ahead:
            changes = {"data": f"each of {self.world_size} ranks continues at batch {position.batches} of its own data"}
            position.contents = {}
        elif self._keeps_samples(position):
            position.ahead = 0
            return {"data": _describe(then, self.now, position.batches * (then.window or 0))}
        else:
            changes = {}
        position.state, position.ahead = None, 0
        if None in (then.window, self.now.window):
            return changes
        unit = (then.batch, self.now.batch) if changes else (then.window, self.now.window)
        gone = position.batches * cast(int, unit[0])
        position.batches, again = divmod(gone, cast(int, unit[1]))
        if changes:
            return changes
        if again:
            position.contents = {}
        position.samples = position.batches * cast(int, self.now.batch)
        repeated = f". The last {again} of them are seen again" if again else ""
        return {"data": _describe(then, self.now, gone) + repeated}

    def _keeps_samples(self, position: Position) -> bool:
        """Whether the saved state counts samples, so that it holds for any batch size."""
        keeper = keeper_of(self.reader)
        if keeper is None or position.state is None or self.reader.num_workers:
            return False
        dataset = self.reader.dataset
        return keeper is dataset or has_state(dataset) or not isinstance(dataset, IterableDataset)


def _describe(then: Layout, now: Layout, gone: int) -> str:
    sizes = f"{then} samples in a batch before, {now} now"
    if then.window == now.window:
        return f"{sizes}: the same {now.window} samples in each step, from sample {gone} of the epoch on. {_DRAWN}"
    return f"{sizes}: continues after the {gone} samples of this epoch that were seen. {_DRAWN}"
