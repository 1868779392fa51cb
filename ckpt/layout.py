"""How a loader deals out an epoch: how many samples a batch has, and how many replicas share the epoch's order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

from ckpt import order
from ckpt.position import Position


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The epoch's order is cut into pieces, which the replicas get in turn; a loader makes batches of its pieces.

    A DistributedSampler deals single samples, Accelerate whole batches or an equal part of each. Whatever it is, a step
    of all replicas takes the next `window` samples of the order. So the global batches are the same wherever the window
    is: four replicas of 8 samples and two of 16 take the same 32.
    """

    replicas: int = 1
    replica: int = 0
    piece: int = 1
    batch: int | None = None  # samples that a replica gets at a time; unknown for batches of varying length
    window: int | None = None

    @classmethod
    def of_saved(cls, position: Position, *, dealt: bool) -> Layout:
        """Of a saved position; those of earlier versions do not say it, but how many samples and batches there were."""
        if position.layout:
            return cls(**position.layout)
        full = position.batches and position.samples % position.batches == 0
        batch = position.samples // position.batches if full else None
        replicas = position.world_size if dealt else 1
        return cls(replicas=replicas, batch=batch, window=batch and batch * replicas)

    def __str__(self) -> str:
        return f"{self.replicas} x {self.batch}" if self.replicas > 1 else str(self.batch)


def layout_of(loader: Any, reads: int, rank: int) -> Layout:
    """How this rank gets its share. `reads`: how many batches Accelerate's loader reads here for each it hands out."""
    reader = order.reader(loader)
    batch = _batch_size(reader)
    if reader is not loader:
        return _of_accelerate(loader, reader, batch, reads)
    sampler = dealing_sampler(loader)
    if sampler is None:
        return Layout(batch=batch, window=batch)
    replicas = sampler.num_replicas
    return Layout(replicas=replicas, replica=sampler.rank, batch=batch, window=batch and batch * replicas)


def _of_accelerate(loader: Any, reader: Any, batch: int | None, reads: int) -> Layout:
    dealer = next((one for one in (reader.batch_sampler, reader.dataset) if hasattr(one, "process_index")), None)
    dealer = order.unsteered(dealer)
    if dealer is None:  # one rank reads: alone, or for all
        ranks = loader.state.num_processes if hasattr(loader, "split_batches") and not loader.split_batches else 1
        return Layout(batch=batch, window=batch and batch * ranks, piece=batch or 1)
    replicas, whole = dealer.num_processes, dealer.batch_size
    if whole is None:
        return Layout(replicas=replicas, replica=dealer.process_index)
    batch = whole // replicas if dealer.split_batches else whole
    window = batch * replicas
    return Layout(replicas=replicas, replica=dealer.process_index, piece=batch, batch=batch, window=window)


def _batch_size(reader: Any) -> int | None:
    sampler = getattr(reader, "batch_sampler", None)
    if sampler is None and hasattr(reader, "batch_sampler"):  # a stream, or samples one by one
        return reader.batch_size or 1
    size = getattr(sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def dealing_sampler(loader: Any) -> DistributedSampler[Any] | None:
    """The DistributedSampler that batches are made of. One inside another sampler says nothing about its order."""
    outer = order.unsteered(getattr(loader, "batch_sampler", None))
    found = order.unsteered(getattr(loader if outer is None else outer, "sampler", None))
    return found if isinstance(found, DistributedSampler) else None


def batcher_of(reader: Any) -> Any:
    """Who makes batches of what its `sampler` gives, and of nothing else: there the order can be begun at any sample."""
    if reader.batch_sampler is None:
        return reader
    found = order.unsteered(reader.batch_sampler)
    while hasattr(found, "batch_sampler"):  # Accelerate puts its own around it
        found = found.batch_sampler
    # others may have their own idea of which samples belong together, or have copied the order already
    known = isinstance(found, BatchSampler) and type(found).__module__.partition(".")[0] in ("torch", "torchdata")
    return found if known else None
