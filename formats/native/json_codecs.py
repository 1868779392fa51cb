"""The types that `json_values` can store: for each its tag, its form as lists and dicts, and the way back."""

from __future__ import annotations

import base64
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import DamagedError
from ckpt.formats.native import dtypes

SAFE_INT = 1 << 63  # JSON readers hold integers of 64 bits at most
SURROGATE = re.compile("[\ud800-\udfff]")


def is_json_already(values: list[Any]) -> bool:
    """Whether a list holds values of one type that JSON stores as they are: a fast path for long lists."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return bool(min(values) >= -SAFE_INT and max(values) < SAFE_INT)
    if kinds == {str}:
        return not any(map(SURROGATE.search, values))
    return kinds == {float} and all(map(math.isfinite, values))


class Items(list[tuple[Any, Any]]):
    """The items of a dict that is to be encoded."""


@dataclass
class Headed:
    """A container that is to be encoded, with an attribute beside its items."""

    head: Any
    body: Any


def to_base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def from_base64(text: str) -> bytes:
    return base64.b64decode(text)


def _str(value: str) -> Any:
    # JSON joins two adjacent surrogates into one character, and other readers refuse a lone one
    return {"$str": to_base64(value.encode("utf-8", "surrogatepass"))} if SURROGATE.search(value) else value


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": str(value)}


def _int(value: int) -> Any:
    # Python refuses to parse very long decimal numbers, and other readers lose digits beyond 64 bits
    return value if -SAFE_INT <= value < SAFE_INT else {"$int": hex(value)}


def shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python refuses to spell out very long numbers
        return f"<{type(value).__name__}>"


def _sorted(values: Iterable[Any]) -> list[Any]:
    return sorted(values, key=lambda value: (type(value).__name__, shown(value)))


FACTORIES: dict[Any, str] = {None: "", int: "int", float: "float", list: "list", dict: "dict", set: "set", str: "str"}
_FACTORY_BY_NAME = {name: factory for factory, name in FACTORIES.items()}


def _torch_constant(kind: str) -> Callable[[str], Any]:
    """Looks up a dtype, a layout or a memory format of torch by name; nothing else is ever looked up."""

    def find(name: str) -> Any:
        found = getattr(torch, name, None)
        if type(found).__name__ != kind:
            raise DamagedError(f"this torch ({torch.__version__}) has no {kind} {name!r}.")
        return found

    return find


def _last_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


# type: (tag, encode to lists and dicts, decode). Without a tag the JSON value is the value itself.
CODECS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    int: ("", _int, int),
    float: ("", _float, float),
    str: ("", _str, str),
    list: ("", list, list),
    dict: ("", lambda value: Items(value.items()), dict),
    tuple: ("$tuple", list, tuple),
    set: ("$set", _sorted, set),
    frozenset: ("$frozenset", _sorted, frozenset),
    deque: ("$deque", lambda value: Headed(value.maxlen, list(value)), lambda d: deque(d[1], maxlen=d[0])),
    OrderedDict: ("$ordered", lambda value: Items(value.items()), OrderedDict),
    Counter: ("$counter", lambda value: Items(value.items()), Counter),
    defaultdict: (
        "$defaultdict",
        lambda value: Headed(FACTORIES[value.default_factory], Items(value.items())),
        lambda d: defaultdict(_FACTORY_BY_NAME[d[0]], d[1]),
    ),
    bytes: ("$bytes", to_base64, from_base64),
    bytearray: ("$bytearray", to_base64, lambda text: bytearray(from_base64(text))),
    complex: ("$complex", lambda value: [value.real, value.imag], lambda pair: complex(*pair)),
    range: ("$range", lambda value: [value.start, value.stop, value.step], lambda three: range(*three)),
    slice: ("$slice", lambda value: [value.start, value.stop, value.step], lambda three: slice(*three)),
    torch.Size: ("$size", list, torch.Size),
    torch.dtype: ("$dtype", dtypes.name_of, _torch_constant("dtype")),
    torch.layout: ("$layout", _last_name, _torch_constant("layout")),
    torch.memory_format: ("$memory_format", _last_name, _torch_constant("memory_format")),
    torch.device: ("$device", str, torch.device),
}

BY_TAG = {tag: back for tag, _, back in CODECS.values() if tag} | {
    "$float": float,
    "$int": lambda text: int(text, 16),
    "$str": lambda text: from_base64(text).decode("utf-8", "surrogatepass"),
}


def is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))
