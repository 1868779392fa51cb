"""JSON documents: `state.json` with the values of all parts, and a document per rank with that rank's own values.

Python values become JSON, and equal values of the same types again. None, booleans, numbers, strings, lists and dicts
with string keys are themselves. Anything else is an object with a single key that starts with `$` and names the type:
`{"$tuple": [1, 2]}`. Tensors and arrays are references to tensors stored elsewhere: `{"$tensor":
"state.weight.exp_avg"}`, with their strides if these are not row-major. A type without an entry in `CODECS` is refused,
never pickled.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from ckpt.errors import DamagedError, UnsupportedError
from ckpt.formats.checks import checked_shape, checked_sizes, damage_reported, is_permuted, of_type, reason
from ckpt.formats.layout import Members
from ckpt.formats.native import tensor_file
from ckpt.formats.native.header import METADATA
from ckpt.formats.native.manifest import STATE as STATE
from ckpt.formats.native.manifest import FileRecord
from ckpt.formats.native.shard_table import ShardedState, build_table
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.sharded_tensors import is_sharded
from ckpt.formats.tensors import FilePlan, PartState, Shard, Unsharded, device_obstacle, host_bytes, on_host
from ckpt.shown import Lines

SAFE_INT = 1 << 63  # JSON readers hold integers of 64 bits at most
_MOST_EMPTY = 1 << 20  # elements of an array whose dtype has no bytes, such as V0
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
            raise DamagedError(f"the installed torch ({torch.__version__}) has no {kind} {name!r}.")
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
    torch.dtype: ("$dtype", tensor_file.dtype_name, str, _torch_constant("dtype")),
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
        raise ValueError(f"an array claims {count} elements of 0 bytes")
    return count * int(dtype.itemsize)


def numpy_array(shape: Any, description: Any, data: bytes | memoryview) -> Any:
    """A new array of these bytes."""
    import numpy as np

    if len(data) != numpy_size(shape, description):
        raise ValueError(f"{len(data)} bytes can't form an array of shape {shape} of {description}")
    array = np.zeros(shape, dtype=_numpy_dtype(description))
    if len(data):
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, dtype=np.uint8)
    return array


# the only classes that a checkpoint may name: its content cannot choose code to run
_KNOWN = {
    "torchao.optim.subclass_8bit": "OptimState8bit",
    "torchao.optim.subclass_4bit": "OptimState4bit",
    "torchao.optim.subclass_fp8": "OptimStateFp8",
}


def is_packed(value: Any) -> bool:
    """Whether this is a tensor of a known subclass."""
    kind = type(value)
    return kind.__name__ == _KNOWN.get(kind.__module__)


def pieces(tensor: Any) -> dict[str, torch.Tensor]:
    """The live inner tensors by name."""
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def about(tensor: Any) -> tuple[str, Any]:
    """The kind of a packed tensor, and the context that rebuilding it needs beside its inner tensors."""
    _, context = tensor.__tensor_flatten__()
    return type(tensor).__module__, context


def check_known(kind: str) -> None:
    if kind not in _KNOWN:
        raise DamagedError(
            f"the state has a tensor of the unknown kind {kind!r}. Did a newer version of ckpt write it?"
        )


def pack(kind: str, tensors: Mapping[str, torch.Tensor], context: Any) -> Any:
    """A packed tensor made of these inner tensors."""
    check_known(kind)
    try:
        subclass = getattr(import_module(kind), _KNOWN[kind])
    except ImportError as error:
        raise UnsupportedError(
            f"the state has a {_KNOWN[kind]}, which needs {kind} ({error}): pip install torchao"
        ) from error
    return subclass.__tensor_unflatten__(tensors, context, None, None)


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
            if is_packed(tensor):
                return {"$packed": self._packed(tensor, path)}
            return self._refuse(path, f"a {type(tensor).__module__}.{type(tensor).__qualname__}")
        if tensor.layout is not torch.strided or tensor.dtype not in tensor_file.STORABLE or tensor.is_nested:
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
        kind, context = about(tensor)
        tensors = {name: self._tensor(piece, step(path, name)) for name, piece in pieces(tensor).items()}
        return {"kind": kind, "tensors": tensors, "context": self.encode(context, path)}

    def _numpy(self, value: Any, path: str) -> Any:
        if value.dtype.hasobject:
            return self._refuse(path, f"a NumPy value of dtype {value.dtype}, which holds Python objects")
        try:
            dtype = value.dtype.str if value.dtype.fields is None else value.dtype.descr
        except ValueError as error:
            return self._refuse(path, f"a NumPy value of dtype {value.dtype}: {error}")
        tag = "$ndarray" if isinstance(value, sys.modules["numpy"].ndarray) else "$numpy"
        stored = {"dtype": self.encode(dtype, path), "shape": list(value.shape)}
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
        head = "nothing was saved, because a checkpoint can't hold these values:"
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
        with damage_reported(self.where, "state document"):
            return self._decode(data, 0)

    def _decode(self, data: Any, depth: int) -> Any:
        if depth > _DEEPEST_JSON:
            raise ValueError("the state is nested too deeply")
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
                raise ValueError("a key appears twice")
            return found
        if tag in ("$numpy", "$ndarray"):
            return self._numpy(tag, inner, depth)
        if tag == "$packed":
            return self._packed(inner, depth)
        if tag not in BY_TAG:
            raise DamagedError(
                f"the state has a value of the unknown kind {tag!r}. Did a newer version of ckpt write it?"
            )
        kind, back = BY_TAG[tag]
        return back(of_type(kind, self._decode(inner, depth)))

    def _with_strides(self, name: str, strides: list[int]) -> Any:
        """A tensor whose elements are in another order in memory than in the file: products of it round as before."""
        tensor, wanted = self.tensor(name), checked_sizes(strides)
        if not isinstance(tensor, torch.Tensor) or is_sharded(tensor) or tensor.stride() == wanted:
            return tensor  # a placeholder, before reading; or memory that is in use
        if not is_permuted(tensor.shape, wanted):
            raise ValueError(f"a tensor of shape {list(tensor.shape)} can't have the strides {list(wanted)}")
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, wanted)
        if key not in self._strided:  # tied tensors are one again
            laid = torch.empty_strided(tensor.shape, wanted, dtype=tensor.dtype, device=tensor.device)
            self._strided[key] = tensor, laid.copy_(tensor)
        return self._strided[key][1]

    def _packed(self, inner: Mapping[str, Any], depth: int) -> Any:
        check_known(inner["kind"])
        tensors = of_type(dict, self._decode(inner["tensors"], depth))
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):  # placeholders, before reading
            return tensors
        return pack(inner["kind"], tensors, self._decode(inner["context"], depth))

    def _numpy(self, tag: str, inner: Mapping[str, Any], depth: int) -> Any:
        dtype = self._decode(inner["dtype"], depth)
        if tag == "$numpy":
            return numpy_array(inner["shape"], dtype, from_base64(inner["bytes"]))[()]
        tensor = self.tensor(inner["tensor"])
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != (numpy_size(inner["shape"], dtype),):
            stored = f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise ValueError(f"{stored} can't form an array of shape {inner['shape']} of {dtype}")
        if not isinstance(tensor, torch.Tensor):  # a placeholder, before reading
            return tensor
        return numpy_array(inner["shape"], dtype, host_bytes(tensor.contiguous()))


INLINE = "state document"
_PART_FIELDS: dict[str, type[Any]] = {"spread": dict, "differs": dict, "about": dict, "plain": list}


def rank_document(rank: int) -> str:
    return f"rank-{rank:05d}.json"


_JOINED = re.compile(r"ranks-(\d{5,8})-(\d{5,8})\.jsonl")
LONGEST_JOINED = 64 << 10  # bytes: a longer document is a file of its own, or the lines beside it would be as long


def joined_name(ranks: range) -> str:
    """The file with the documents of these ranks, a line for each."""
    return f"ranks-{ranks.start:05d}-{ranks.stop - 1:05d}.jsonl"


def joined_file(ranks: range, documents: Iterable[bytes], length: int) -> FilePlan:
    """The documents of these ranks in one file. Each is a line of `length` bytes, and a block with a hash of its own,
    so that a rank reads and verifies no more than its own line. One that is a file of its own is empty here."""
    lines = io.BytesIO()
    lines.writelines(document.ljust(length - 1) + b"\n" for document in documents)
    data = lines.getvalue()
    return FilePlan(
        joined_name(ranks), len(data), lambda: iter((memoryview(data),)), contents=(data,), block_size=length
    )


class PlacedDocument(NamedTuple):
    """A JSON document of a checkpoint: a file, or a line of one."""

    file: FileRecord
    start: int
    stop: int

    @property
    def digests(self) -> tuple[str, ...]:
        """The hashes of its blocks."""
        return self.file.blocks[self.start // self.file.block_size : -(-self.stop // self.file.block_size)]


def document_places(files: Iterable[FileRecord]) -> dict[str, PlacedDocument]:
    """By name, the documents in these files; those in lines by the names that they would have as files."""
    alone, joined = {}, {}
    for file in files:
        found = _JOINED.fullmatch(file.name)
        first, last = map(int, found.groups()) if found else (0, -1)
        if found is None:
            alone[file.name] = PlacedDocument(file, 0, file.size)
        elif last - first + 1 == len(file.blocks):
            length = file.block_size
            for number in range(len(file.blocks)):
                place = PlacedDocument(file, number * length, min((number + 1) * length, file.size))
                joined[rank_document(first + number)] = place
    return joined | alone


def to_json(data: Any) -> bytes:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()


def from_json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where} is not JSON: {reason(error)}.") from error


Substitute = Callable[[Any], Any]  # the tensor to store in place of another one


def encode_part(
    kind: str, value: Any, prefix: str, problems: list[str], substitute: Substitute | None = None
) -> PartState:
    """A part's state, split into JSON and tensors. Values that cannot be stored are added to `problems` by path."""
    encoder = Encoder(prefix=prefix, problems=problems, substitute=substitute)
    values = encoder.encode(value)
    return PartState(kind, values, {name: Shard.whole(tensor) for name, tensor in encoder.tensors.items()})


def encode_sharded(
    kind: str,
    value: Any,
    prefix: str,
    problems: list[str],
    world_size: int,
    substitute: Substitute | None = None,
    members: Members = None,
) -> ShardedState:
    """The state of a part whose tensors may be sharded. Every rank has the same values, and its own shards.

    `members`: the ranks' numbers in the job, where they are some of its ranks.
    """
    encoder = Encoder(prefix=prefix, problems=problems, allow_sharded=True, substitute=substitute)
    values = encoder.encode(value)
    table = build_table(encoder.tensors, world_size, members)
    return ShardedState(kind, values, table, encoder.tensors, members=members)


def encode_inline(value: Any, prefix: str, problems: list[str]) -> Any:
    """A value with its tensors as base64 text beside it: for small state that belongs into one document."""
    encoder = Encoder(prefix=prefix, problems=problems)
    values = encoder.encode(value)
    return {"values": values, "tensors": {name: _tensor_to_json(t) for name, t in encoder.tensors.items()}}


def decode_inline(data: Mapping[str, Any], where: str = "the state") -> Any:
    with damage_reported(where, INLINE):
        tensors, values = data["tensors"], data["values"]
    return Decoder(lambda name: _tensor_from_json(tensors[name]), where).decode(values)


def parts_in(document: Any, key: str, where: str) -> dict[str, Any]:
    """The parts below a key of a document, each with all that a reader relies on."""
    with damage_reported(where, "document"):
        parts = of_type(dict, document[key])
        for name, part in parts.items():
            _check_part(name, of_type(dict, part))
        return parts


def _check_part(name: str, part: dict[str, Any]) -> None:
    """Raise for a part without a state, unless its rank had none, or with fields of other types."""
    if "absent" not in part and ("state" not in part or not isinstance(part.get("class"), str)):
        raise ValueError(f"the part {name} lacks its class or its state")
    for key, kind in _PART_FIELDS.items():
        of_type(kind, part.get(key, kind()))
    if not all(isinstance(tensor, str) for tensor in part.get("plain", ())):
        raise ValueError(f"the part {name} has tensors without a name")
    for ranks in of_type(dict, part.get("differs", {}).get("tensors", {})).values():
        checked_sizes(ranks)


def _tensor_to_json(tensor: torch.Tensor) -> dict[str, Any]:
    plain = on_host(tensor)
    text = to_base64(bytes(host_bytes(plain)))
    return {"dtype": tensor_file.dtype_name(plain.dtype), "shape": list(plain.shape), "bytes": text}


def _tensor_from_json(fields: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape, data = (
        tensor_file.dtype_of(fields["dtype"]),
        checked_shape(fields["shape"]),
        from_base64(fields["bytes"]),
    )
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes can't form a {dtype} of shape {list(shape)}")
    tensor = torch.empty(shape, dtype=dtype)
    host_bytes(tensor)[:] = data
    return tensor
