"""The types that `json_values` can store: for each its tag, its form as lists and dicts, and the way back."""

from __future__ import annotations

import base64
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ckpt.errors import DamagedError
from ckpt.formats.native import dtypes
from ckpt.formats.strides import checked_shape

SAFE_INT = 1 << 63  # JSON readers hold integers of 64 bits at most
_MOST_EMPTY = 1 << 20  # elements of an array whose dtype has no bytes, such as V0
_Kind = TypeVar("_Kind")
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


def _deque(pair: list[Any]) -> deque[Any]:
    length, items = pair
    return deque(of_type(list, items), maxlen=length)


def _defaultdict(pair: list[Any]) -> defaultdict[Any, Any]:
    factory, items = pair
    return defaultdict(_FACTORY_BY_NAME[factory], of_type(dict, items))


def of_type(kind: type[_Kind], value: Any) -> _Kind:
    """The value, if it is of that very type: a range in place of a list would become a billion items."""
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} stands where a {kind.__name__} should")
    return value


# type: (tag, encode to lists and dicts, what is decoded from: its type, and how). Without a tag the JSON value is the
# value itself.
CODECS: dict[type, tuple[str, Callable[[Any], Any], type, Callable[[Any], Any]]] = {
    int: ("", _int, int, int),
    float: ("", _float, float, float),
    str: ("", _str, str, str),
    list: ("", list, list, list),
    dict: ("", lambda value: Items(value.items()), dict, dict),
    tuple: ("$tuple", list, list, tuple),
    set: ("$set", _sorted, list, set),
    frozenset: ("$frozenset", _sorted, list, frozenset),
    deque: ("$deque", lambda value: Headed(value.maxlen, list(value)), list, _deque),
    OrderedDict: ("$ordered", lambda value: Items(value.items()), dict, OrderedDict),
    Counter: ("$counter", lambda value: Items(value.items()), dict, Counter),
    defaultdict: (
        "$defaultdict",
        lambda value: Headed(FACTORIES[value.default_factory], Items(value.items())),
        list,
        _defaultdict,
    ),
    bytes: ("$bytes", to_base64, str, from_base64),
    bytearray: ("$bytearray", to_base64, str, lambda text: bytearray(from_base64(text))),
    complex: ("$complex", lambda value: [value.real, value.imag], list, lambda pair: complex(*pair)),
    range: ("$range", lambda value: [value.start, value.stop, value.step], list, lambda three: range(*three)),
    slice: ("$slice", lambda value: [value.start, value.stop, value.step], list, lambda three: slice(*three)),
    torch.Size: ("$size", list, list, torch.Size),
    torch.dtype: ("$dtype", dtypes.name_of, str, _torch_constant("dtype")),
    torch.layout: ("$layout", _last_name, str, _torch_constant("layout")),
    torch.memory_format: ("$memory_format", _last_name, str, _torch_constant("memory_format")),
    torch.device: ("$device", str, str, torch.device),
}

BY_TAG: dict[str, tuple[type, Callable[[Any], Any]]] = {
    tag: (kind, back) for tag, _, kind, back in CODECS.values() if tag
} | {
    "$float": (str, float),
    "$int": (str, lambda text: int(text, 16)),
    "$str": (str, lambda text: from_base64(text).decode("utf-8", "surrogatepass")),
}


def is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))


def _numpy_dtype(description: Any) -> Any:
    import numpy as np

    dtype = np.lib.format.descr_to_dtype(description)
    if dtype.hasobject:
        raise ValueError(f"an array of {dtype} holds Python objects")
    return dtype if dtype.itemsize else np.empty((), dtype).dtype  # S0 and U0 become S1 and U1 in an array


def numpy_size(shape: Any, description: Any) -> int:
    """The bytes of an array of that shape and dtype."""
    dtype, count = _numpy_dtype(description), math.prod(checked_shape(shape))
    if not dtype.itemsize and count > _MOST_EMPTY:
        raise ValueError(f"an array of {count} elements without a byte")
    return count * int(dtype.itemsize)


def numpy_array(shape: Any, description: Any, data: bytes | memoryview) -> Any:
    """A new array of these bytes."""
    import numpy as np

    if len(data) != numpy_size(shape, description):
        raise ValueError(f"{len(data)} bytes are no array of {shape} {description}")
    array = np.zeros(shape, dtype=_numpy_dtype(description))
    if len(data):
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, dtype=np.uint8)
    return array
