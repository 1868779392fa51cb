"""The order of samples: recorded by a wrapped sampler, and continued without reading the samples that are skipped."""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch.utils.data import DataLoader

from ckpt.data.batch_digest import index_bytes
from ckpt.data.repartition import RemainingIndices
from ckpt.state.samplers import SamplerWrapper, reader


@dataclass
class EpochPlan:
    """The plan of one epoch: how many batches of indices to skip, and what to call at its start and after skipping.

    `begin` is called when the first index is asked for, and returns what to seed workers from, or None. `rest` is the
    remaining order, where the epoch was divided in another way before. `samples`, if not None, is the number of samples
    to skip, in place of `skip` batches: those of a custom batch sampler may have another length now. `expected` is the
    digest of what is skipped, `expected_batches` that of earlier versions.
    """

    begin: Callable[[], int | None]
    arrive: Callable[[], None]
    skip: int = 0
    samples: int | None = None
    rest: RemainingIndices | None = None
    batched: bool = True
    skips_inside: bool = False  # what is skipped is skipped by the loader itself
    expected: str = ""
    expected_batches: str = ""
    digest: Any = field(default_factory=xxhash.xxh3_64)  # of the indices that have reached the training loop
    same_order: bool = True
    left_out: int = 0  # samples that were skipped
    ahead: deque[tuple[int, bytes]] = field(default_factory=deque)  # batches the training loop has not got yet

    def follow(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of indices to read, each recorded before it is yielded."""
        seed = self.begin()
        if self.rest is not None:
            self.rest.advance()
        skipped, left = self._skip(iter(batches))
        if self.skips_inside:  # the order is drawn with its first index: before the generators are those of the save
            first = list(itertools.islice(left, 1))
            left = itertools.chain(first, left)
        self.arrive()
        for count, batch in enumerate(left, skipped + 1):
            indices = self._indices(batch)
            self.ahead.append((len(indices), index_bytes(indices)))
            yield batch if seed is None else _seeded(batch, seed, count)

    def taken(self, reads: int = 1) -> int:
        """The training loop has got the batches of this many reads, or fewer at the end: how many samples they have."""
        taken = 0
        for _ in range(min(reads, len(self.ahead))):
            samples, indices = self.ahead.popleft()
            self.digest.update(indices)
            taken += samples
        return taken

    def forget(self) -> None:
        """Drop the callbacks: an iterator that is never finished keeps this object alive."""
        self.begin, self.arrive = lambda: None, lambda: None

    def problem(self, name: str) -> str:
        """Why samples of this epoch repeat or are missed; empty if they do not."""
        if self.same_order or (self.rest is not None and self.rest.problem):
            return "" if self.rest is None else self.rest.problem
        return (
            f"the sampler of {name} gave a different order than before the resume, so samples of this epoch may repeat "
            "or be missed. Give the sampler a generator of its own, or a state_dict."
        )

    def _skip(self, left: Iterator[Any]) -> tuple[int, Iterator[Any]]:
        """Skip what was handed out. Returns how many batches that was, and the others; the first may be cut."""
        if self.rest is not None and self.rest.may_bypass_sampler:
            left = self.rest.checked(left)
        by_batch, skipped, missing = xxhash.xxh3_64(), 0, self.samples or 0
        while skipped < self.skip if self.samples is None else missing > 0:
            batch = next(left, None)
            if batch is None:
                break
            indices = self._indices(batch)
            if self.samples is not None and len(indices) > missing:
                self.left_out += missing
                self.digest.update(index_bytes(indices[:missing]))
                left = itertools.chain([batch[missing:]], left)
                break
            self.digest.update(index_bytes(indices))
            by_batch.update(repr(batch).encode())
            missing -= len(indices)
            self.left_out += len(indices)
            skipped += 1
        digests = (self.expected, self.digest.hexdigest()), (self.expected_batches, by_batch.hexdigest())
        self.same_order = all(expected in ("", found) for expected, found in digests)
        return skipped, left

    def _indices(self, batch: Any) -> list[Any]:
        if not self.batched or not isinstance(batch, list | tuple | torch.Tensor):
            return [batch]
        return batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)


def _seeded(batch: Any, seed: int, count: int) -> Any:
    if not isinstance(batch, list | tuple):
        return batch
    return SeededBatch(batch, xxhash.xxh3_64_intdigest(f"{seed}/{count}".encode()) >> 1)


class SeededBatch(list[Any]):
    """Indices that seed a worker's generators when it starts to read them.

    A worker's generators otherwise depend on every batch it has read before, and could only be restored by reading them
    all again: random augmentations would differ after a resume.
    """

    def __init__(self, indices: Iterable[Any], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        if torch.utils.data.get_worker_info() is not None:
            torch.default_generator.manual_seed(self.seed)
            random.seed(self.seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(self.seed % (1 << 32))
        return super().__iter__()

    def __reduce__(self) -> tuple[type[SeededBatch], tuple[list[Any], int]]:
        return SeededBatch, (self[:], self.seed)


class ResumableSampler(SamplerWrapper):
    """Replaces the batch sampler of a loader, and yields the same until a plan is set for the next epoch."""

    def __init__(self, inner: Iterable[Any]) -> None:
        self.inner = inner
        self.plan: EpochPlan | None = None

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that the plan is taken when the first index is asked for: a loader with workers makes one
        # iterator too many and drops it unused.
        plan, self.plan = self.plan, None
        if plan is None:
            yield from self.inner
        elif plan.rest is None:
            yield from plan.follow(self.inner)
        else:
            yield from self._follow_rest(plan, plan.rest)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, as while this object is being copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def _follow_rest(self, plan: EpochPlan, rest: RemainingIndices) -> Iterator[Any]:
        if self.inner is rest.sampler:
            yield from plan.follow(rest)
            return
        rest.owner.sampler = rest
        try:
            yield from plan.follow(self.inner)
        finally:
            rest.owner.sampler = rest.sampler


_installed: WeakKeyDictionary[DataLoader[Any], ResumableSampler] = WeakKeyDictionary()


def install(loader: DataLoader[Any]) -> ResumableSampler:
    """Replace the loader's sampler by a `ResumableSampler`, once, and return that."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    current = getattr(loader, name)
    if isinstance(current, ResumableSampler):
        return current
    # persistent workers keep the sampler they began with, also under a later manager
    former = _installed.get(loader)
    sampler = former if former is not None and former.inner is current else ResumableSampler(current)
    _installed[loader] = sampler
    object.__setattr__(loader, name, sampler)  # DataLoader forbids it: it means users who swap data in mid-epoch
    return sampler


def uninstall(loader: Any) -> None:
    """Give the loader its own sampler back."""
    loader = reader(loader)
    for name in ("sampler", "batch_sampler"):
        current = getattr(loader, name, None)
        if isinstance(current, ResumableSampler):
            object.__setattr__(loader, name, current.inner)
