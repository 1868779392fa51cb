"""What is left of an epoch's order when its samples are dealt out in another way from the middle on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
from torch.utils.data import DistributedSampler

from ckpt import rng
from ckpt.layout import Layout
from ckpt.order import text_of


@dataclass(frozen=True)
class Past:
    """What a replica had been given under an earlier layout: so many samples after `start`, with this digest."""

    layout: Layout
    start: int
    samples: int
    digest: str

    def agrees(self, order: Sequence[Any]) -> bool:
        """Whether an order begins with what was given out. At its end, where samples are repeated, nobody can say."""
        if not self.digest or len(order) < self.start + self.samples * self.layout.replicas:
            return True
        deal = self.layout
        given = (
            index
            for number, index in enumerate(order[self.start :])
            if number // deal.piece % deal.replicas == deal.replica
        )
        return xxhash.xxh3_64_hexdigest(text_of(list(itertools.islice(given, self.samples)))) == self.digest


@dataclass
class Rest:
    """The order after `start` samples of all replicas together; stands in for the sampler of `owner`, who makes batches.

    `advance` draws the order, between the begin of the epoch and the position: a sampler may draw from generators that
    training goes on with. A DistributedSampler that `deals` has its share for the replicas there are now.
    """

    owner: Any
    sampler: Any
    start: int
    deals: bool
    past: Past | None = None
    unsure: bool = False  # whether the owner asks its sampler at all
    trouble: str = ""
    _used: bool = False
    _left: Iterable[Any] = field(default_factory=list)

    def advance(self) -> None:
        if not self.deals:
            iterator = iter(self.sampler)
            gone = list(itertools.islice(iterator, self.start))
            self._left = iterator
        elif deals_in_turn(self.sampler):
            whole = whole_order(self.sampler)
            gone, self._left = whole[: self.start], self._share(whole[self.start :])
        else:
            self._left = itertools.islice(self.sampler, self.start // self.sampler.num_replicas, None)
            self.trouble = (
                f"{type(self.sampler).__name__} does not deal samples to the ranks in turn, so that nobody can tell which "
                "ones another number of ranks had: samples of this epoch may repeat or be missed. Take a "
                "DistributedSampler, or change the number of ranks between epochs."
            )
            return
        if self.past is not None and not self.past.agrees(gone):
            self.trouble = (
                f"{type(self.sampler).__name__} gave another order than before the resume, so samples of this epoch may "
                "repeat or be missed. Give the sampler a generator of its own, or a state_dict."
            )

    def __iter__(self) -> Iterator[Any]:
        self._used = True
        return iter(self._left)

    def __len__(self) -> int:
        if not self.deals:
            return max(0, len(self.sampler) - self.start)
        left = max(0, len(self.sampler.dataset) - self.start)
        ranks = self.sampler.num_replicas
        return int(left // ranks if self.sampler.drop_last else -(-left // ranks))

    def checked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of an owner that may have copied the order long ago: then they begin with the epoch's first."""
        first = list(itertools.islice(batches, 1))
        if first and not self._used:
            self.trouble = (
                f"{type(self.owner).__name__} does not ask its sampler for the order when it is gone through, so that it "
                "begins the epoch anew: samples repeat. Change the number of ranks between epochs."
            )
        return itertools.chain(first, batches)

    def _share(self, left: list[int]) -> list[int]:
        ranks = self.sampler.num_replicas
        total = len(self) * ranks
        padded = left + (left * (total // max(1, len(left)) + 1))[: max(0, total - len(left))]
        return padded[self.sampler.rank : total : ranks]


def whole_order(sampler: DistributedSampler[Any]) -> list[int]:
    """The order of this epoch over all ranks, without padding."""
    names = ("num_replicas", "rank", "num_samples", "total_size")
    kept = {name: getattr(sampler, name) for name in names}
    size = len(sampler.dataset)  # type: ignore[arg-type]
    vars(sampler).update(num_replicas=1, rank=0, num_samples=size, total_size=size)
    try:
        return list(sampler)
    finally:
        vars(sampler).update(kept)


def deals_in_turn(sampler: DistributedSampler[Any]) -> bool:
    """Whether rank r of R gets the samples r, r + R, ... of the order: torch's own does, a subclass may not."""
    if type(sampler).__iter__ is DistributedSampler.__iter__:
        return True
    before = rng.capture()
    try:
        share = list(sampler)
        rng.restore(before)
        whole = whole_order(sampler)
    finally:
        rng.restore(before)
    expected = whole[sampler.rank :: sampler.num_replicas]
    return share[: len(expected)] == expected[: len(share)] and abs(len(share) - len(expected)) <= 1
