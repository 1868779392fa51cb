"""The iterator that `manager.batches` and `manager.enumerate` return."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_PLUMBING = (GeneratorType, map, zip, filter, itertools.chain, itertools.islice)  # what may wrap an iterator


class Batches(Generic[T]):
    """An iterator over the batches that are left of an epoch, with a length: how many it hands out in all."""

    def __init__(
        self, batches: Iterator[T], length: Callable[[], int], before: Callable[[], object] | None = None
    ) -> None:
        self._batches = batches
        self._length = length
        self._before = before

    @classmethod
    def made(
        cls,
        make: Callable[[Callable[[], Any]], Iterator[T]],
        length: Callable[[], int],
        before: Callable[[], object] | None = None,
    ) -> Batches[T]:
        """Over what `make` returns. `make` is given a function that returns this object while it is alive. `before` is
        called before each batch."""
        found: list[weakref.ref[Batches[T]]] = []
        made = cls(make(lambda: found[0]()), length, before)
        found.append(weakref.ref(made))
        return made

    def __iter__(self) -> Batches[T]:
        return self

    def __next__(self) -> T:
        if self._before is not None:
            self._before()
        return next(self._batches)

    def __len__(self) -> int:
        return self._length()

    def close(self) -> None:
        """Leave the loop, as `break` does."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


def is_enumerated(iterator: Any) -> bool:
    """Whether the builtin `enumerate` wraps an iterator, also with a generator such as tqdm's in between."""
    wrappers = [holder for holder in gc.get_referrers(iterator) if isinstance(holder, (enumerate, *_PLUMBING))]
    inner = [wrapper for wrapper in wrappers if not isinstance(wrapper, enumerate)]
    outer = (holder for wrapper in inner[:4] for holder in gc.get_referrers(wrapper))
    return len(inner) < len(wrappers) or any(isinstance(holder, enumerate) for holder in outer)
