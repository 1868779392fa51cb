"""Python values as JSON, and back as the same values.

None, booleans, numbers, strings, lists and dicts with string keys are themselves. Anything else is an object with one
key that starts with `$` and says what it is: `{"$tuple": [1, 2]}`. Tensors and arrays stand as references to tensors
that are stored elsewhere: `{"$tensor": "state.weight.exp_avg"}`. What has no entry here is refused, never pickled.
"""

from __future__ import annotations

import base64
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ckpt.errors import DamagedError, UnsupportedError
from ckpt.formats.layout import is_sharded
from ckpt.formats.native import dtypes, tensor_subclasses
from ckpt.formats.pieces import PiecedTensor

_SAFE_INT = 1 << 63
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME = re.compile("[^\\[\\]'\"\\s\ud800-\udfff]+")
_RESERVED = "__metadata__"  # no name for a tensor in a safetensors file
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_TOO_DEEP = 100  # levels; with more, reading the JSON back could end in a RecursionError


@dataclass
class Encoder:
    """Turns values into JSON; collects tensors by name, and every value that cannot be held by its path."""

    tensors: dict[str, Any] = field(default_factory=dict)  # as they are here, or as `PiecedTensor`s
    problems: list[str] = field(default_factory=list)
    prefix: str = ""
    spread: bool = False  # whether tensors may be such that every rank holds a piece
    _around: set[int] = field(default_factory=set)  # the containers that the value in hand is inside

    def encode(self, value: Any, path: str = "") -> Any:
        return self._encode(value, path, 0)

    def _encode(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in _PLAIN_TENSORS:  # most values are, and training waits
            return self._tensor(value, path)
        if depth > _TOO_DEEP:
            return self._refuse(path[:80] + "...", f"nested more than {_TOO_DEEP} levels deep")
        if id(value) in self._around:
            return self._refuse(path, f"{describe(value)} inside itself")
        if kind is defaultdict and value.default_factory not in _FACTORIES:
            return self._refuse(path, f"a defaultdict whose factory is {describe(value.default_factory)}")
        if kind in _CODECS:
            return self._coded(value, path, depth)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, PiecedTensor):
            return {"$tensor": self._add(path, value)}
        if _is_numpy(value):
            return self._numpy(value, path)
        return self._refuse(path, describe(value))

    def _coded(self, value: Any, path: str, depth: int) -> Any:
        tag, parts, _ = _CODECS[type(value)]
        self._around.add(id(value))
        data = self._parts(parts(value), path, depth)
        self._around.discard(id(value))
        return {tag: data} if tag else data

    def _parts(self, plain: Any, path: str, depth: int) -> Any:
        """Go on below a value that its codec has turned into lists and dicts."""
        if isinstance(plain, _Headed):
            return [plain.head, self._parts(plain.body, path, depth)]
        if isinstance(plain, _Items):
            return self._items(plain, path, depth)
        if isinstance(plain, list):
            if _is_json_already(plain):
                return plain
            return [self._encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(plain)]
        return plain

    def _items(self, items: _Items, path: str, depth: int) -> Any:
        below = [(key, self._encode(value, step(path, key), depth + 1)) for key, value in items]
        if all(type(key) is str and _is_json_key(key) for key, _ in items):
            return dict(below)
        return {"$items": [[self._encode(key, f"{path}(key)", depth + 1), value] for key, value in below]}

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        if self.spread and is_sharded(tensor):
            return {"$tensor": self._add(path, tensor)}
        if type(tensor) not in _PLAIN_TENSORS:
            if tensor_subclasses.is_packed(tensor):
                return {"$packed": self._packed(tensor, path)}
            return self._refuse(path, f"a {type(tensor).__module__}.{type(tensor).__qualname__}")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return self._refuse(path, f"a tensor of layout {tensor.layout} and dtype {tensor.dtype}; only dense ones")
        if tensor.is_meta:
            return self._refuse(path, "a tensor on the meta device, which has no data")
        return {"$tensor": self._add(path, tensor.detach())}

    def _packed(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        kind, context = tensor_subclasses.about(tensor)
        tensors = {
            name: self._tensor(piece, step(path, name)) for name, piece in tensor_subclasses.pieces(tensor).items()
        }
        return {"kind": kind, "tensors": tensors, "context": self._encode(context, path, 0)}

    def _numpy(self, value: Any, path: str) -> Any:
        if value.dtype.hasobject:
            return self._refuse(path, f"a NumPy value of dtype {value.dtype}, which holds Python objects")
        try:
            dtype = value.dtype.str if value.dtype.fields is None else value.dtype.descr
        except ValueError as error:
            return self._refuse(path, f"a NumPy value of dtype {value.dtype}: {error}")
        tag = "$ndarray" if isinstance(value, sys.modules["numpy"].ndarray) else "$numpy"
        stored = {"dtype": self._encode(dtype, path, 0), "shape": list(value.shape)}
        if tag == "$numpy":
            return {tag: {**stored, "bytes": to_base64(value.tobytes())}}
        data = bytearray(value.tobytes())
        tensor = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return {tag: {**stored, "tensor": self._add(path, tensor)}}

    def _add(self, path: str, tensor: torch.Tensor | PiecedTensor) -> str:
        name, again = path or "value", 1
        while name in self.tensors or name == _RESERVED:
            again += 1
            name = f"{path}#{again}"
        self.tensors[name] = tensor
        return name

    def _refuse(self, path: str, what: str) -> None:
        dot = "." if self.prefix and path and not path.startswith(("[", "(")) else ""
        self.problems.append(f"{self.prefix}{dot}{path}: {what}")


def step(path: str, key: Any) -> str:
    """The path one key further down: `groups[0].lr`."""
    if type(key) is str and _is_name(key):
        return f"{path}.{key}" if path else key
    return f"{path}[{_shown(key)}]"


@lru_cache(maxsize=1 << 16)  # the same keys come with every save, and training waits
def _is_name(key: str) -> bool:
    return _NAME.fullmatch(key) is not None


@lru_cache(maxsize=1 << 16)
def _is_json_key(key: str) -> bool:
    return not key.startswith("$") and not _SURROGATE.search(key)


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python refuses to spell out very long numbers
        return f"<{type(value).__name__}>"


def describe(value: Any) -> str:
    """What a refused value is, for people: `a function`, `a mypackage.Thing`."""
    if callable(value) and hasattr(value, "__name__") and not isinstance(value, type):
        return "a function"
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def refuse(problems: Iterable[str]) -> None:
    """Raise one error for all values that cannot be held, if there are any."""
    listed = tuple(problems)
    if listed:
        lines = "\n  ".join(listed)
        raise UnsupportedError(
            f"nothing was saved, because these values cannot be held in a checkpoint:\n  {lines}\n"
            "Leave them out of state_dict(), or turn them into numbers, strings, tensors, lists and dicts there.",
            listed,
        )


@dataclass
class Decoder:
    """Turns the JSON of an `Encoder` back into values. `tensor` finds a tensor by the name in a reference."""

    tensor: Callable[[str], Any]

    def decode(self, data: Any) -> Any:
        if isinstance(data, list):
            return [self.decode(item) for item in data]
        if not isinstance(data, dict):
            return data
        if len(data) == 1:
            ((tag, inner),) = data.items()
            if tag.startswith("$"):
                return self._tagged(tag, inner)
        return {key: self.decode(value) for key, value in data.items()}

    def _tagged(self, tag: str, inner: Any) -> Any:
        if tag == "$tensor":
            return self.tensor(inner)
        if tag == "$items":
            return {self.decode(key): self.decode(value) for key, value in inner}
        if tag in ("$numpy", "$ndarray"):
            return self._numpy(tag, inner)
        if tag == "$packed":
            return self._packed(inner)
        if tag not in _BY_TAG:
            raise DamagedError(f"the state holds a value of an unknown kind, {tag!r}. Was it written by a newer ckpt?")
        return _BY_TAG[tag](self.decode(inner))

    def _packed(self, inner: Mapping[str, Any]) -> Any:
        tensors = self.decode(inner["tensors"])
        if not all(isinstance(one, torch.Tensor) for one in tensors.values()):  # somebody looks before reading
            return tensors
        return tensor_subclasses.pack(inner["kind"], tensors, self.decode(inner["context"]))

    def _numpy(self, tag: str, inner: Mapping[str, Any]) -> Any:
        import numpy as np

        array = np.zeros(inner["shape"], dtype=np.lib.format.descr_to_dtype(self.decode(inner["dtype"])))
        if tag == "$numpy":
            data = np.frombuffer(from_base64(inner["bytes"]), dtype=np.uint8)
        else:
            tensor = self.tensor(inner["tensor"])
            if not isinstance(tensor, torch.Tensor):  # somebody looks before reading
                return tensor
            data = tensor.numpy()
        if data.size:
            array.reshape(-1).view(np.uint8)[:] = data
        return array[()] if tag == "$numpy" else array


def _is_json_already(values: list[Any]) -> bool:
    """Whether these are all of one kind, which JSON holds as they are: long lists of them go at once."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return bool(min(values) >= -_SAFE_INT and max(values) < _SAFE_INT)
    if kinds == {str}:
        return not any(map(_SURROGATE.search, values))
    return kinds == {float} and all(map(math.isfinite, values))


class _Items(list[tuple[Any, Any]]):
    """The items of a dict, on their way to JSON."""


@dataclass
class _Headed:
    """A container with one fact more than what is in it, on its way to JSON."""

    head: Any
    body: Any


def to_base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def from_base64(text: str) -> bytes:
    return base64.b64decode(text)


def _str(value: str) -> Any:
    # JSON makes one character of two surrogates that stand side by side, and other readers refuse a lone one
    return {"$str": to_base64(value.encode("utf-8", "surrogatepass"))} if _SURROGATE.search(value) else value


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": str(value)}


def _int(value: int) -> Any:
    # Python refuses to parse very long decimal numbers, and other readers lose digits beyond 64 bits
    return value if -_SAFE_INT <= value < _SAFE_INT else {"$int": hex(value)}


def _sorted(values: Iterable[Any]) -> list[Any]:
    return sorted(values, key=lambda value: (type(value).__name__, _shown(value)))


_FACTORIES: dict[Any, str] = {None: "", int: "int", float: "float", list: "list", dict: "dict", set: "set", str: "str"}
_FACTORY_BY_NAME = {name: factory for factory, name in _FACTORIES.items()}


def _named(prefix: str) -> Callable[[str], Any]:
    def find(name: str) -> Any:
        found = getattr(torch, name, None)
        if type(found).__name__ != prefix:
            raise DamagedError(f"this torch ({torch.__version__}) has no {prefix} {name!r}.")
        return found

    return find


def _last_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


# type: (tag, to lists and dicts, back). Without a tag the JSON value is the value itself.
_CODECS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    int: ("", _int, int),
    float: ("", _float, float),
    str: ("", _str, str),
    list: ("", list, list),
    dict: ("", lambda value: _Items(value.items()), dict),
    tuple: ("$tuple", list, tuple),
    set: ("$set", _sorted, set),
    frozenset: ("$frozenset", _sorted, frozenset),
    deque: ("$deque", lambda value: _Headed(value.maxlen, list(value)), lambda d: deque(d[1], maxlen=d[0])),
    OrderedDict: ("$ordered", lambda value: _Items(value.items()), OrderedDict),
    Counter: ("$counter", lambda value: _Items(value.items()), Counter),
    defaultdict: (
        "$defaultdict",
        lambda value: _Headed(_FACTORIES[value.default_factory], _Items(value.items())),
        lambda d: defaultdict(_FACTORY_BY_NAME[d[0]], d[1]),
    ),
    bytes: ("$bytes", to_base64, from_base64),
    bytearray: ("$bytearray", to_base64, lambda text: bytearray(from_base64(text))),
    complex: ("$complex", lambda value: [value.real, value.imag], lambda pair: complex(*pair)),
    range: ("$range", lambda value: [value.start, value.stop, value.step], lambda three: range(*three)),
    slice: ("$slice", lambda value: [value.start, value.stop, value.step], lambda three: slice(*three)),
    torch.Size: ("$size", list, torch.Size),
    torch.dtype: ("$dtype", dtypes.name_of, _named("dtype")),
    torch.layout: ("$layout", _last_name, _named("layout")),
    torch.memory_format: ("$memory_format", _last_name, _named("memory_format")),
    torch.device: ("$device", str, torch.device),
}

_BY_TAG = {tag: back for tag, _, back in _CODECS.values() if tag} | {
    "$float": float,
    "$int": lambda text: int(text, 16),
    "$str": lambda text: from_base64(text).decode("utf-8", "surrogatepass"),
}


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))
