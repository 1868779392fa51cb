"""What ckpt knows of a loader (how its position can be restored, its sizes, who divides its batches), and how it
follows a plain `for` over one: that object gets a subclass of its own class, and its class back at the end.

Python looks `__iter__` up in the class, so an attribute of the object would not be found. Its class itself is left
alone: no other loader of the process changes.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from ckpt.compat.datasets import loses_samples
from ckpt.state import samplers
from ckpt.state.objects import Stateful
from ckpt.state.parts import has_state

Loader = Iterable[Any]  # a DataLoader, a loader around one such as Accelerate's, or any iterable of batches


def goes_by_index(loader: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether a position is restored by indices: map-style data, unless the loader saves the state of its parts."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if any(isinstance(part, DataLoader) for part in vars(loader).values()):
        return False  # as Ray Train's: it reads the other loader, and what its own sampler yields is never read
    parts = [loader.dataset, *samplers.samplers(loader)]
    return not (has_state(loader) and any(has_state(part) for part in parts))


def keeper_of(loader: Any) -> Stateful | None:
    """Whose `state_dict` holds the position: the loader's or, if it lives in this process, the dataset's, if any."""
    dataset: Any = getattr(loader, "dataset", None)
    if loses_samples(dataset):
        return None
    keeper: Stateful | None = None
    if has_state(loader) and not goes_by_index(loader):
        keeper = loader
    elif has_state(dataset) and getattr(loader, "num_workers", 0) == 0:
        keeper = dataset
    return keeper


def only_counts(state: Any) -> bool:
    """Whether the state of torchdata's loader of a stream is no more than a count, because neither the stream nor its
    iterator has a state. torchdata reads as much again, and counts that twice: a state saved after that is wrong."""
    if not isinstance(state, Mapping):
        return False
    snapshot = state.get("_snapshot")
    workers = snapshot.get("_worker_snapshots") if isinstance(snapshot, Mapping) else None
    if isinstance(workers, Mapping) and workers:
        return all(only_counts(worker) for worker in workers.values())
    fetcher = state.get("fetcher_state")
    if not isinstance(fetcher, Mapping):
        return False  # no stream
    return state.get("dataset_state") is None and fetcher.get("dataset_iter_state") is None


def stateful_samplers(loader: Any) -> list[Stateful]:
    return [sampler for sampler in samplers.samplers(loader) if has_state(sampler)]


def splits(loader: Any) -> bool:
    """Whether Accelerate gives every rank a piece of each batch."""
    splitters = (loader, getattr(loader, "batch_sampler", None))
    return any(getattr(splitter, "split_batches", False) is True for splitter in splitters)


def batches_skipped(loader: Any) -> int:
    """How many batches a loader skips that `accelerate.skip_first_batches` made; 0 for any other."""
    found = (getattr(part, "skip_batches", 0) for part in (loader, *samplers.samplers(loader)))
    return next((number for number in found if isinstance(number, int) and number > 0), 0)


def keeps_order(loader: Any) -> bool:
    """Whether every epoch has an order that needs no generator: in sequence, or Accelerate's by seed and epoch."""
    return all(_is_ordered(sampler) for sampler in samplers.samplers(loader))


def _is_ordered(sampler: Any) -> bool:
    return type(sampler) in (SequentialSampler, BatchSampler) or type(sampler).__module__.startswith("accelerate.")


def size_of(dataset: Any) -> int | None:
    """How many samples a dataset has, if it says so."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def batch_size(batch: Any) -> int:
    """The number of samples in a batch: the length of the first tensor or sequence found in it."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, dict):
        return batch_size(next(iter(batch.values()))) if batch else 0
    if isinstance(batch, list | tuple):
        return (
            batch_size(batch[0]) if batch and isinstance(batch[0], torch.Tensor | list | tuple | dict) else len(batch)
        )
    return 1


_OWN = "__ckpt_own__"  # in a subclass made here: the loader's own class, and who follows the loader

MakeIterator = Callable[[], Iterator[Any]]  # makes the iterator that the loader would have made by itself


class Follower(Protocol):
    def takes(self, loader: Any) -> bool:
        """Whether this `for` over the loader is to be followed."""

    def follow(self, loader: Any, own: MakeIterator) -> Iterator[Any]:
        """What to hand out in place of the loader's own iterator."""


def follow(loader: Any, follower: Follower) -> bool:
    """From now on a `for` over this loader asks the follower. False if its class allows no subclass, as `list` does.

    Of several followers, the last one to come has the loader. One that is garbage collected leaves it unchanged.
    """
    kind = type(loader)
    own, former = vars(kind).get(_OWN, (kind, None))
    if former is not None and former() is follower:
        return True
    if not hasattr(own, "__iter__"):
        return False
    try:
        _set_class(loader, _subclass(own, weakref.ref(follower)))
        weakref.finalize(follower, _restore, weakref.ref(loader))
    except TypeError:
        return False
    return True


def unfollow(loader: Any, follower: Follower) -> None:
    """Give the loader its own class back, unless another follower has it by now."""
    own, found = vars(type(loader)).get(_OWN, (None, None))
    if found is not None and found() in (follower, None):
        _set_class(loader, own)


def own_iterator(loader: Any) -> Iterator[Any]:
    """The loader's own iterator, whoever follows it."""
    own, _ = vars(type(loader)).get(_OWN, (None, None))
    found: Iterator[Any] = iter(loader) if own is None else own.__iter__(loader)
    return found


def begun_once(iterator: Iterator[Any], loader: Any) -> Iterator[Any]:
    """The iterator; where it is the loader itself, one that a `for` doesn't begin again: `iter(loader)` would."""
    return _steps(iterator) if iterator is loader else iterator


def _steps(iterator: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch


def _set_class(loader: Any, kind: type) -> None:
    """Past a `__setattr__` and a property `__class__` of the loader's own: torch has the one, Accelerate the other."""
    vars(object)["__class__"].__set__(loader, kind)


def _restore(found: weakref.ref[Any]) -> None:
    loader = found()
    own, follower = vars(type(loader)).get(_OWN, (None, None))
    if follower is not None and follower() is None:
        _set_class(loader, own)


def _subclass(own: Any, found: weakref.ref[Follower]) -> type:
    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
        follower = found()
        if follower is None or not follower.takes(self):
            result: Iterator[Any] = own.__iter__(self)
            return result
        return follower.follow(self, lambda: own.__iter__(self))

    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807
        """A copy, and what a process is sent, has the loader's own class."""
        made = own.__reduce_ex__(self, protocol)
        if not isinstance(made, tuple):
            return made
        return (made[0], tuple(own if part is kind else part for part in made[1]), *made[2:])

    members = {"__iter__": __iter__, "__reduce_ex__": __reduce_ex__, _OWN: (own, found)}
    members |= {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    kind = types.new_class(own.__name__, (own,), exec_body=lambda body: body.update(members))
    return kind
