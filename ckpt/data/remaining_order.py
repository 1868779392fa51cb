"""The remaining order of an epoch whose layout changed in its middle."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
from torch.utils.data import DistributedSampler

from ckpt.data.batch_digest import index_bytes
from ckpt.data.epoch_layout import Batcher, Layout
from ckpt.state import rng


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
                f"{type(self.sampler).__name__} gave another order than before the resume, so samples of this epoch "
                "repeat or are missed. Give the sampler a generator of its own, or a state_dict."
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
                "the epoch anew: samples repeat. Change the number of ranks between epochs."
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
