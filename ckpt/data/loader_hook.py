"""Hooks `__iter__` of DataLoader classes, so that a plain `for` over a loader can be followed and resumed."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader

_UNFOLLOWED = "ckpt_unfollowed"
_ELSEWHERE = (  # loaders with an `__iter__` of their own, patched where the script has imported them
    ("torchdata.stateful_dataloader", "StatefulDataLoader"),
    ("accelerate.data_loader", "DataLoaderShard"),
    ("accelerate.data_loader", "DataLoaderDispatcher"),
)

MakeIterator = Callable[[], Iterator[Any]]  # makes the iterator that the loader would have made by itself


class Follower(Protocol):
    def owns(self, loader: Any) -> bool:
        """Whether the loader was given to this follower by name."""

    def takes(self, loader: Any) -> bool:
        """Whether a loader that nobody owns may be this follower's training data."""

    def follow(self, loader: Any, own: MakeIterator) -> Iterator[Any]:
        """What to hand out in place of the loader's own iterator."""


_followers: list[weakref.ref[Follower]] = []  # in the order in which they began


def begin(follower: Follower) -> None:
    """From now on, a `for` over a loader that the follower owns or takes calls it. Other loaders are unchanged."""
    patch()
    end(follower)
    _followers.append(weakref.ref(follower))


def patch() -> None:
    """Hook the loader classes that are imported by now."""
    modules = ((sys.modules.get(module), name) for module, name in _ELSEWHERE)
    for kind in (DataLoader, *(getattr(module, name) for module, name in modules if module is not None)):
        if _UNFOLLOWED not in vars(kind.__iter__):
            kind.__iter__ = _followed(kind.__iter__)


def end(follower: Follower) -> None:
    _followers[:] = [found for found in _followers if found() not in (follower, None)]


def unfollowed(loader: Any) -> Iterator[Any]:
    """The loader's own iterator."""
    method = getattr(type(loader).__iter__, _UNFOLLOWED, iter)
    found: Iterator[Any] = method(loader)
    return found


def _followed(own: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    # Python looks `__iter__` up in the class, and loaders may be made at any time: so the class is hooked.
    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
        follower = _follower_of(self)
        return own(self) if follower is None else follower.follow(self, lambda: own(self))

    setattr(__iter__, _UNFOLLOWED, own)
    return __iter__


def _follower_of(loader: Any) -> Follower | None:
    """The owner of the loader; failing that, the last follower to have begun that takes it."""
    live = [follower for found in reversed(_followers) if (follower := found()) is not None]
    owners = (follower for follower in live if follower.owns(loader))
    return next(owners, None) or next((follower for follower in live if follower.takes(loader)), None)
