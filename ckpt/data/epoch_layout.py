"""How a loader divides an epoch: the batch size, and how many data-parallel replicas share the order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DistributedSampler

from ckpt.data.position import Position
from ckpt.state import samplers


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
