"""Foreign pickles, read as data: nothing that they name is imported, built or called.

A pickle is a program that names classes and functions and calls them. This interpreter follows its opcodes, and puts a
`Described` with the name and the arguments where the pickle would call something. A name that the caller did not allow
is an error, so a file of another kind than expected is refused.

A few bytes can describe more than memory holds, deeper than a stack is. Objects may be shared: ten lists, each of ten
references to the one before, are ten billion items to whoever goes through them. So every object is counted as often
as it is referred to, and there are bounds.
"""

from __future__ import annotations

import pickletools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import DamagedError
from ckpt.formats.damage import damage_reported

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


PERSISTENT = "<persistent>"  # the name of a reference to data outside the pickle


class _EveryName:
    """Allows every name: objects that the caller does not know remain `Described`, without what is put into them."""

    def __contains__(self, name: object) -> bool:
        return True


EVERY_NAME = _EveryName()


def read_pickle(data: bytes, allowed: Container[str], where: str) -> Any:
    """What a pickle describes. `allowed` are the full names it may contain; `where` names the file in errors.

    However it is gone through, that takes no more than in proportion to its length: see `check_bounds`.
    """
    with damage_reported(where, "pickle that ckpt reads"):
        found = _Machine(allowed, where).run(data)
        check_bounds(found, len(data), where)
        return found


@dataclass
class _Machine:
    """Interprets the opcodes that Python's pickler writes for plain data and objects."""

    allowed: Container[str]
    where: str
    stack: list[Any] = field(default_factory=list)
    below: list[list[Any]] = field(default_factory=list)  # the stacks under each mark
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return self.stack.pop()
            self._follow(opcode.name, argument)
        raise ValueError("it has no end")

    def _follow(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            self.stack[-_TUPLES[name] :] = [tuple(self.stack[-_TUPLES[name] :])]
        elif name in _STEPS:
            getattr(self, f"_{name.lower()}")()
        elif name in _NUMBERED:
            getattr(self, _NUMBERED[name])(argument)
        elif name not in _IGNORED:
            raise ValueError(f"it uses {name}, which none of its kind needs")

    def _mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def _since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def _tuple(self) -> None:
        items = self._since_mark()
        self.stack.append(tuple(items))

    def _list(self) -> None:
        items = self._since_mark()
        self.stack.append(items)

    def _dict(self) -> None:
        items = self._since_mark()
        self.stack.append(dict(_pairs(items)))

    def _frozenset(self) -> None:
        items = self._since_mark()
        self.stack.append(frozenset(map(checked_key, items)))

    def _append(self) -> None:
        item = self.stack.pop()
        self._target(list, deque).append(item)

    def _appends(self) -> None:
        items = self._since_mark()
        self._target(list, deque).extend(items)

    def _additems(self) -> None:
        items = self._since_mark()
        self._target(set).update(map(checked_key, items))

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._target(dict)[checked_key(key)] = value

    def _setitems(self) -> None:
        items = self._since_mark()
        target = self._target(dict)
        for key, value in _pairs(items):
            target[key] = value

    def _target(self, *kinds: type) -> Any:
        """The container to fill. What an unknown class of a container is filled with is not kept."""
        target = self.stack[-1]
        unknown = self.allowed is EVERY_NAME and isinstance(target, Described)
        return kinds[0]() if unknown else _of(target, *kinds)

    def _pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._since_mark()

    def _pop_mark(self) -> None:
        self._since_mark()

    def _memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def _global(self, spaced: str) -> None:
        self.stack.append(self._named(spaced.replace(" ", ".", 1)))

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(self._named(f"{module}.{name}"))

    def _named(self, name: str) -> Described:
        if name not in self.allowed:
            raise DamagedError(
                f"{self.where} names {name!r}, which has no place in such a file. It was not executed. "
                "Do not load this file with anything else unless you trust whoever wrote it."
            )
        return Described(name)

    def _reduce(self) -> None:
        arguments, called = _of(self.stack.pop(), tuple), _of(self.stack.pop(), Described)
        make = CONTAINERS.get(called.name)
        self.stack.append(make(*arguments) if make else Described(called.name, arguments))

    _newobj = _reduce

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], OrderedDict):
            return  # the `_metadata` of a module's state_dict(): versions of its classes, not state
        if not isinstance(self.stack[-1], Described):
            raise TypeError(f"it gives a state to {type(self.stack[-1]).__name__}")
        self.stack[-1].state = state

    def _binpersid(self) -> None:
        self.stack.append(Described(PERSISTENT, (self.stack.pop(),)))


def _of(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"a {type(value).__name__} stands where a {kinds[0].__name__} should")
    return value


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Keys and values, which follow each other."""
    return zip(map(checked_key, items[::2]), items[1::2], strict=True)


def _ordered(items: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict((checked_key(key), value) for key, value in _of(items, list, tuple))


def _counter(counts: Any = None) -> Counter[Any]:
    return Counter(_of(counts or {}, dict))


def _deque(items: Any = (), length: int | None = None) -> deque[Any]:
    return deque(_of(items, list, tuple), length)


def _set(items: Any = ()) -> set[Any]:
    return set(map(checked_key, _of(items, list, tuple)))


def _defaultdict(factory: Described | None = None) -> defaultdict[Any, Any]:
    return defaultdict(_FACTORIES[factory.name] if factory else None)


_BUILTIN = ("builtins", "__builtin__")  # in Python 3 and Python 2
_FACTORIES: dict[str, type] = {
    f"{home}.{kind.__name__}": kind for home in _BUILTIN for kind in (int, float, str, list, dict, set)
}
# built for real, because the pickle fills them after their construction; all of them are plain containers
CONTAINERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counter,
    "collections.defaultdict": _defaultdict,
    "collections.deque": _deque,
    **{f"{home}.set": _set for home in _BUILTIN},
}
FACTORIES = frozenset(_FACTORIES)

_LITERALS = frozenset(
    [
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
    ]
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, type] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_STEPS = frozenset(
    [
        "MARK",
        "TUPLE",
        "LIST",
        "DICT",
        "FROZENSET",
        "APPEND",
        "APPENDS",
        "ADDITEMS",
        "SETITEM",
        "SETITEMS",
        "POP",
        "POP_MARK",
        "MEMOIZE",
        "STACK_GLOBAL",
        "REDUCE",
        "NEWOBJ",
        "BUILD",
        "BINPERSID",
    ]
)
_NUMBERED = {
    "PUT": "_put",
    "BINPUT": "_put",
    "LONG_BINPUT": "_put",
    "GET": "_get",
    "BINGET": "_get",
    "LONG_BINGET": "_get",
    "GLOBAL": "_global",
}
_IGNORED = frozenset(("PROTO", "FRAME"))
