"""Python values as JSON, and back as equal values of the same types.

None, booleans, numbers, strings, lists and dicts with string keys are themselves. Anything else is an object with a
single key that starts with `$` and names the type: `{"$tuple": [1, 2]}`. Tensors and arrays are references to tensors
stored elsewhere: `{"$tensor": "state.weight.exp_avg"}`, with their strides if these are not row-major. A type without
an entry in `json_codecs` is refused, never pickled.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ckpt.errors import DamagedError, UnsupportedError
from ckpt.formats.damage import damage_reported
from ckpt.formats.native import dtypes, tensor_subclasses
from ckpt.formats.native.header import METADATA
from ckpt.formats.native.json_codecs import (
    BY_TAG,
    CODECS,
    FACTORIES,
    SURROGATE,
    Headed,
    Items,
    from_base64,
    is_json_already,
    is_numpy,
    numpy_array,
    numpy_size,
    of_type,
    shown,
    to_base64,
)
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.sharded_tensors import is_sharded
from ckpt.formats.state import Unsharded
from ckpt.formats.strides import checked_sizes, is_permuted
from ckpt.formats.tensor_bytes import device_obstacle, host_bytes
from ckpt.shown import Lines

_NAME = re.compile("[^\\[\\]'\"\\s\ud800-\udfff]+")
_RESERVED = METADATA  # no tensor of a safetensors file may have this name
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_TOO_DEEP = 100  # levels; with more, reading the JSON back could end in a RecursionError
_DEEPEST_JSON = 6 * _TOO_DEEP  # a level of values is up to five of JSON
_SCALARS = frozenset((int, float, str, bool, type(None)))


@dataclass
class Encoder:
    """Turns values into JSON. Collects tensors by name, and the paths of values that cannot be stored."""

    tensors: dict[str, Any] = field(default_factory=dict)  # live tensors or `PiecedTensor`s
    problems: list[str] = field(default_factory=list)
    prefix: str = ""
    allow_sharded: bool = False  # whether tensors may be sharded over ranks
    substitute: Callable[[Any], Any] | None = None  # the tensor to store in place of another one
    _enclosing: set[int] = field(default_factory=set)  # identities of the containers around the current value

    def encode(self, value: Any, path: str = "") -> Any:
        return self._encode(value, path, 0)

    def _encode(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in _PLAIN_TENSORS:  # first: most values are tensors, and training waits
            return self._tensor(value, path)
        if depth > _TOO_DEEP:
            return self._refuse(path[:80] + "...", f"nested more than {_TOO_DEEP} levels deep")
        if id(value) in self._enclosing:
            return self._refuse(path, f"{describe(value)} inside itself")
        if kind is defaultdict and value.default_factory not in FACTORIES:
            return self._refuse(path, f"a defaultdict whose factory is {describe(value.default_factory)}")
        if kind in CODECS:
            return self._coded(value, path, depth)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, PiecedTensor):
            return {"$tensor": self._add(path, value)}
        if kind is Unsharded:
            return {"$unsharded": self._tensor(value.tensor, path)}
        if is_numpy(value):
            return self._numpy(value, path)
        return self._refuse(path, describe(value))

    def _coded(self, value: Any, path: str, depth: int) -> Any:
        tag, parts, _, _ = CODECS[type(value)]
        self._enclosing.add(id(value))
        data = self._parts(parts(value), path, depth)
        self._enclosing.discard(id(value))
        return {tag: data} if tag else data

    def _parts(self, plain: Any, path: str, depth: int) -> Any:
        """Encode the items of a value that its codec has turned into lists and dicts."""
        if isinstance(plain, Headed):
            return [plain.head, self._parts(plain.body, path, depth)]
        if isinstance(plain, Items):
            return self._items(plain, path, depth)
        if isinstance(plain, list):
            if is_json_already(plain):
                return plain
            return [self._encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(plain)]
        return plain

    def _items(self, items: Items, path: str, depth: int) -> Any:
        below = [(key, self._encode(value, step(path, key), depth + 1)) for key, value in items]
        if all(type(key) is str and _is_json_key(key) for key, _ in items):
            return dict(below)
        return {"$items": [[self._encode(key, f"{path}(key)", depth + 1), value] for key, value in below]}

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        if self.substitute is not None:
            tensor = self.substitute(tensor)
        if self.allow_sharded and is_sharded(tensor):
            return {"$tensor": self._add(path, tensor)}
        if type(tensor) not in _PLAIN_TENSORS:
            if tensor_subclasses.is_packed(tensor):
                return {"$packed": self._packed(tensor, path)}
            return self._refuse(path, f"a {type(tensor).__module__}.{type(tensor).__qualname__}")
        if tensor.layout is not torch.strided or tensor.dtype not in dtypes.STORABLE or tensor.is_nested:
            return self._refuse(path, f"a tensor of layout {tensor.layout} and dtype {tensor.dtype}; only dense ones")
        if tensor.is_meta:
            return self._refuse(path, "a tensor on the meta device, which has no data")
        if (why := device_obstacle(tensor.device)) is not None:
            return self._refuse(path, f"a tensor {why}")
        name = self._add(path, tensor.detach())
        if tensor.is_contiguous() or not is_permuted(tensor.shape, tensor.stride()):
            return {"$tensor": name}
        return {"$strided": [name, list(tensor.stride())]}

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
    """The path of a key below `path`: `groups[0].lr`."""
    if type(key) is str and _is_name(key):
        return f"{path}.{key}" if path else key
    return f"{path}[{shown(key)}]"


@lru_cache(maxsize=1 << 16)  # the keys are the same in every save, and training waits
def _is_name(key: str) -> bool:
    return _NAME.fullmatch(key) is not None


@lru_cache(maxsize=1 << 16)
def _is_json_key(key: str) -> bool:
    return not key.startswith("$") and not SURROGATE.search(key)


def describe(value: Any) -> str:
    """What a refused value is, for error messages: `a function`, `a mypackage.Thing`."""
    if callable(value) and hasattr(value, "__name__") and not isinstance(value, type):
        return "a function"
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def refuse(problems: Iterable[str]) -> None:
    """Raise one error that lists all values that cannot be stored, if there are any."""
    listed = tuple(problems)
    if listed:
        head = "nothing was saved, because these values cannot be held in a checkpoint:"
        advice = "Leave them out of state_dict(), or turn them into numbers, strings, tensors, lists and dicts there."
        raise UnsupportedError(Lines.listing(head, listed, advice), listed)


@dataclass
class Decoder:
    """Turns the JSON of an `Encoder` back into values. `tensor` returns the tensor of a reference by its name.

    Raises no other errors than those of ckpt. `where` names the state in them. `unsharded` is called with what `tensor`
    gave for a tensor that was no shard of its parameter.
    """

    tensor: Callable[[str], Any]
    where: str = "the state"
    unsharded: Callable[[Any], Any] = lambda tensor: tensor
    _strided: dict[Any, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def decode(self, data: Any) -> Any:
        with damage_reported(self.where, "state that ckpt writes"):
            return self._decode(data, 0)

    def _decode(self, data: Any, depth: int) -> Any:
        if depth > _DEEPEST_JSON:
            raise ValueError("it is nested too deep")
        if isinstance(data, list):
            return [item if type(item) in _SCALARS else self._decode(item, depth + 1) for item in data]
        if not isinstance(data, dict):
            return data
        if len(data) == 1:
            ((tag, inner),) = data.items()
            if tag.startswith("$"):
                return self._tagged(tag, inner, depth + 1)
        return {key: self._decode(value, depth + 1) for key, value in data.items()}

    def _tagged(self, tag: str, inner: Any, depth: int) -> Any:
        if tag == "$tensor":
            return self.tensor(inner)
        if tag == "$strided":
            return self._with_strides(*inner)
        if tag == "$unsharded":
            return self.unsharded(self._decode(inner, depth))
        if tag == "$items":
            found = {self._decode(key, depth): self._decode(value, depth) for key, value in inner}
            if len(found) != len(inner):
                raise ValueError("a key is there twice")
            return found
        if tag in ("$numpy", "$ndarray"):
            return self._numpy(tag, inner, depth)
        if tag == "$packed":
            return self._packed(inner, depth)
        if tag not in BY_TAG:
            raise DamagedError(f"the state holds a value of an unknown kind, {tag!r}. Was it written by a newer ckpt?")
        kind, back = BY_TAG[tag]
        return back(of_type(kind, self._decode(inner, depth)))

    def _with_strides(self, name: str, strides: list[int]) -> Any:
        """A tensor whose elements are in another order in memory than in the file: products of it round as before."""
        tensor, wanted = self.tensor(name), checked_sizes(strides)
        if not isinstance(tensor, torch.Tensor) or is_sharded(tensor) or tensor.stride() == wanted:
            return tensor  # a placeholder, before reading; or memory that is in use
        if not is_permuted(tensor.shape, wanted):
            raise ValueError(f"a tensor of shape {list(tensor.shape)} has no strides {list(wanted)}")
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, wanted)
        if key not in self._strided:  # tied tensors are one again
            laid = torch.empty_strided(tensor.shape, wanted, dtype=tensor.dtype, device=tensor.device)
            self._strided[key] = tensor, laid.copy_(tensor)
        return self._strided[key][1]

    def _packed(self, inner: Mapping[str, Any], depth: int) -> Any:
        tensor_subclasses.check_known(inner["kind"])
        tensors = of_type(dict, self._decode(inner["tensors"], depth))
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):  # placeholders, before reading
            return tensors
        return tensor_subclasses.pack(inner["kind"], tensors, self._decode(inner["context"], depth))

    def _numpy(self, tag: str, inner: Mapping[str, Any], depth: int) -> Any:
        dtype = self._decode(inner["dtype"], depth)
        if tag == "$numpy":
            return numpy_array(inner["shape"], dtype, from_base64(inner["bytes"]))[()]
        tensor = self.tensor(inner["tensor"])
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != (numpy_size(inner["shape"], dtype),):
            raise ValueError(f"{tensor.dtype} of shape {list(tensor.shape)} are no array of {inner['shape']} {dtype}")
        if not isinstance(tensor, torch.Tensor):  # a placeholder, before reading
            return tensor
        return numpy_array(inner["shape"], dtype, host_bytes(tensor.contiguous()))
