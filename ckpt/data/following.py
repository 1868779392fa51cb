"""Follows a plain `for` over one loader: that object gets a subclass of its own class, and its class back at the end.

Python looks `__iter__` up in the class, so an attribute of the object would not be found. Its class itself is left
alone: no other loader of the process changes.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

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
