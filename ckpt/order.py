"""The order of samples: followed, recorded, and gone back to without reading the samples in between."""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, DistributedSampler

from ckpt import rng


@dataclass
class Course:
    """Which way an epoch goes: how many batches to leave out, and what to do at its begin and when they are left out.

    `begin` is called when the first index is asked for, and returns what to seed workers from, or None. `rest` is what
    a distributed sampler has left to give, where the number of ranks has changed in mid-epoch.
    """

    begin: Callable[[], int | None]
    arrive: Callable[[], None]
    skip: int = 0
    rest: Rest | None = None
    digest: Any = field(default_factory=xxhash.xxh3_64)  # of the indices that have reached the training loop
    skipped: str = ""  # the digest, when those to leave out were left out
    ahead: deque[tuple[int, bytes]] = field(default_factory=deque)

    def follow(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of indices to read, each noted down before it is handed out."""
        seed = self.begin()
        left = iter(batches)
        for batch in itertools.islice(left, self.skip):
            self.digest.update(repr(batch).encode())
        self.skipped = self.digest.hexdigest()
        self.arrive()
        for count, batch in enumerate(left, self.skip + 1):
            self.ahead.append((len(batch) if isinstance(batch, list | tuple) else 1, repr(batch).encode()))
            yield batch if seed is None else _seeded(batch, seed, count)

    def taken(self, reads: int = 1) -> int:
        """What this many reads brought has reached the training loop; fewer, at the end: how many samples it has."""
        found = [self.ahead.popleft() for _ in range(min(reads, len(self.ahead)))]
        for _, indices in found:
            self.digest.update(indices)
        return sum(samples for samples, _ in found)

    def forget(self) -> None:
        """Let go of whoever set this course: an iterator that nobody finishes holds on to it."""
        self.begin, self.arrive = lambda: None, lambda: None


def _seeded(batch: Any, seed: int, count: int) -> Any:
    if not isinstance(batch, list | tuple):
        return batch
    return SeededBatch(batch, xxhash.xxh3_64_intdigest(f"{seed}/{count}".encode()) >> 1)


class SeededBatch(list[Any]):
    """Indices that seed a worker's generators when it starts to read them.

    A worker's generators otherwise depend on every batch it has read before, which nobody can go back to without
    reading them all again: random augmentations would differ after a resume.
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

    def __reduce__(self) -> Any:
        return SeededBatch, (self[:], self.seed)


class SteeredSampler:
    """Stands in a loader for its batch sampler, and does as it does until a course is set for the next epoch."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.course: Course | None = None

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that the course is taken when the first index is asked for: a loader with workers makes one
        # iterator too many and drops it unused.
        course, self.course = self.course, None
        if course is None:
            yield from self.inner
        elif course.rest is None:
            yield from course.follow(self.inner)
        else:
            yield from self._follow_rest(course, course.rest)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet, as while a copy of this object is being made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def _follow_rest(self, course: Course, rest: Rest) -> Iterator[Any]:
        if self.inner is rest.sampler:
            yield from course.follow(rest)
            return
        self.inner.sampler = rest
        try:
            yield from course.follow(self.inner)
        finally:
            self.inner.sampler = rest.sampler


@dataclass(frozen=True)
class Rest:
    """What a distributed sampler has left after `start` samples of all ranks together, for the ranks there are now."""

    sampler: DistributedSampler[Any]
    start: int

    def __iter__(self) -> Iterator[int]:
        left = whole_order(self.sampler)[self.start :]
        ranks = self.sampler.num_replicas
        total = len(self) * ranks
        padded = left + (left * (total // max(1, len(left)) + 1))[: max(0, total - len(left))]
        return iter(padded[self.sampler.rank : total : ranks])

    def __len__(self) -> int:
        left = max(0, len(self.sampler.dataset) - self.start)  # type: ignore[arg-type]
        ranks = self.sampler.num_replicas
        return left // ranks if self.sampler.drop_last else -(-left // ranks)


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


def steer(loader: DataLoader[Any]) -> SteeredSampler:
    """Put a `SteeredSampler` into the loader that reads, once, and return it."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    current = getattr(loader, name)
    if isinstance(current, SteeredSampler):
        return current
    # persistent workers go on with the sampler they began with, also for a later manager
    former = getattr(getattr(loader, "_iterator", None), "_index_sampler", None)
    steered = former if isinstance(former, SteeredSampler) else SteeredSampler(current)
    object.__setattr__(loader, name, steered)  # the loader itself refuses; it means users who swap data in mid-epoch
    return steered


def reader(loader: Any) -> Any:
    """The loader that does the reading: the one inside, where Accelerate has put its own around it."""
    return getattr(loader, "base_dataloader", loader)


def release(loader: Any) -> None:
    """Give the loader its own sampler back."""
    loader = reader(loader)
    for name in ("sampler", "batch_sampler"):
        current = getattr(loader, name, None)
        if isinstance(current, SteeredSampler):
            object.__setattr__(loader, name, current.inner)


def samplers(loader: Any) -> list[Any]:
    """The loader's samplers, outermost first: each, and what it draws from."""
    found: list[Any] = []
    _collect_samplers(reader(loader), found)
    return found


def _collect_samplers(owner: Any, found: list[Any]) -> None:
    for name in ("batch_sampler", "sampler"):
        one = getattr(owner, name, None)
        one = one.inner if isinstance(one, SteeredSampler) else one
        if one is not None and not any(one is other for other in found):
            found.append(one)
            _collect_samplers(one, found)


def generators(loader: Any) -> list[Any]:
    """The generators of the loader and its samplers."""
    found: list[Any] = []
    for owner in [reader(loader), *samplers(loader)]:
        generator = getattr(owner, "generator", None)
        if rng.is_generator(generator) and not any(generator is other for other in found):
            found.append(generator)
    return found


def distributed_sampler(loader: Any) -> DistributedSampler[Any] | None:
    return next((sampler for sampler in samplers(loader) if isinstance(sampler, DistributedSampler)), None)
