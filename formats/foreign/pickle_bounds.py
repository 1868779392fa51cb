"""Bounds of what a pickle may describe: a few bytes can describe more than memory holds, deeper than a stack is.

Objects may be shared: ten lists, each of ten references to the one before, are ten billion items to whoever goes
through them. So every object is counted as often as it is referred to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckpt.errors import DamagedError

DEEPEST = 100  # levels, as of what ckpt saves
_LONGEST_KEY = 64  # items of a tuple
_WIDEST_KEY = 1024  # bits of an integer
_PER_BYTE = 8  # nodes for each byte of the pickle: an item needs at least one, unless it is shared
_ALWAYS = 1_000_000  # nodes, however short the pickle is


@dataclass(eq=False)
class Described:
    """An object that a pickle names, with the `arguments` of its call and the `state` it is given, if any."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes))


def checked_key(key: Any) -> Any:
    """A key of a dict or an item of a set: hashing tuples inside tuples overflows the stack, or takes forever."""
    if isinstance(key, Described) or _is_scalar(key):
        return key
    if type(key) is tuple and len(key) <= _LONGEST_KEY and all(map(_is_scalar, key)):
        return key
    raise ValueError(f"a {type(key).__name__} is a key in it; only numbers, text and tuples of a few of them are")


def _is_scalar(key: Any) -> bool:
    return type(key) in _SCALARS and (type(key) is not int or key.bit_length() <= _WIDEST_KEY)


def check_bounds(value: Any, length: int, where: str) -> None:
    """Refuse what is inside itself, nested too deep, or much larger than a pickle of that length can be by itself."""
    _Measure(_ALWAYS + _PER_BYTE * length, where).of(value, 0)


class _Measure:
    """Counts the nodes of a value, and its levels. Each object is gone through once."""

    def __init__(self, limit: int, where: str) -> None:
        self._limit = limit
        self._where = where
        self._done: dict[int, tuple[int, int]] = {}  # nodes and levels of each object, by its identity
        self._enclosing: set[int] = set()

    def of(self, value: Any, depth: int) -> tuple[int, int]:
        if id(value) in self._done:
            return self._done[id(value)]
        if depth > DEEPEST or id(value) in self._enclosing:
            self._refuse("something that is inside itself, or nested beyond measure")
        self._enclosing.add(id(value))
        nodes, levels = _own_nodes(value), 0
        for child in _children(value):
            if type(child) in _SCALARS:
                nodes += _own_nodes(child)
            else:
                more, below = self.of(child, depth + 1)
                nodes, levels = nodes + more, max(levels, 1 + below)
        if levels > DEEPEST:
            self._refuse("something that is inside itself, or nested beyond measure")
        if nodes > self._limit:
            self._refuse("references to the same objects over and over: more than its bytes can mean")
        self._enclosing.discard(id(value))
        self._done[id(value)] = nodes, levels
        return nodes, levels

    def _refuse(self, what: str) -> None:
        raise DamagedError(f"{self._where} holds {what}.")


def _own_nodes(value: Any) -> int:
    if type(value) is bytes:
        return 1 + len(value) // 2
    return 1 + len(value) // 32 if type(value) is str else 1


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Described):
        yield from (value.arguments, value.state)
    elif isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
