"""A plain `for` over a loader that Accelerate has prepared, under the care of whoever manages its accelerator."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

_UNFOLLOWED = "ckpt_unfollowed"


class Follower(Protocol):
    def owns(self, loader: Any) -> bool: ...

    def follow(self, loader: Any) -> Iterator[Any]: ...


_followers: weakref.WeakSet[Any] = weakref.WeakSet()


def begin(follower: Follower) -> None:
    """From now on, a `for` over a loader that it owns goes through it. Other loaders are as ever."""
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

    for kind in (DataLoaderShard, DataLoaderDispatcher):
        if not hasattr(kind.__iter__, _UNFOLLOWED):
            kind.__iter__ = _followed(kind.__iter__)
    _followers.add(follower)


def end(follower: Follower) -> None:
    _followers.discard(follower)


def unfollowed(loader: Any) -> Iterator[Any]:
    """The loader's own iterator."""
    method = getattr(type(loader).__iter__, _UNFOLLOWED, iter)
    found: Iterator[Any] = method(loader)
    return found


def _followed(own: Any) -> Any:
    # An iterator is looked up in the class, and loaders may be prepared at any time: so it is the class that asks.
    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
        follower = next((one for one in _followers if one.owns(self)), None)
        found: Iterator[Any] = own(self) if follower is None else follower.follow(self)
        return found

    setattr(__iter__, _UNFOLLOWED, own)
    return __iter__
