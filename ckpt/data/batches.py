"""What `manager.batches` and `manager.enumerate` return."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_PLUMBING = (GeneratorType, map, zip, filter, itertools.chain, itertools.islice)  # what may stand around an iterator


class Batches(Generic[T]):
    """An iterator over the batches that are left of an epoch, with a length: how many it hands out in all."""

    def __init__(self, batches: Iterator[T], length: Callable[[], int]) -> None:
        self._batches = batches
        self._length = length

    @classmethod
    def made(cls, make: Callable[[Callable[[], Any]], Iterator[T]], length: Callable[[], int]) -> Batches[T]:
        """With what `make` returns. That is given a function which finds what is returned here, while it lives."""
        found: list[weakref.ref[Batches[T]]] = []
        made = cls(make(lambda: found[0]()), length)
        found.append(weakref.ref(made))
        return made

    def __iter__(self) -> Batches[T]:
        return self

    def __next__(self) -> T:
        return next(self._batches)

    def __len__(self) -> int:
        return self._length()

    def close(self) -> None:
        """Leave the loop, as `break` does."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


def is_enumerated(iterator: Any) -> bool:
    """Whether the builtin `enumerate` stands around an iterator, also around a generator such as tqdm's."""
    around = [one for one in gc.get_referrers(iterator) if isinstance(one, (enumerate, *_PLUMBING))]
    inner = [one for one in around if not isinstance(one, enumerate)]
    further = (one for each in inner[:4] for one in gc.get_referrers(each))
    return len(inner) < len(around) or any(isinstance(one, enumerate) for one in further)
