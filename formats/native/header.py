"""The header of a safetensors file, read and written: names, dtypes, shapes and byte offsets.

Imports no torch, so that `ckpt show` starts without it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ckpt.errors import UnsupportedError
from ckpt.formats.checks import Sizes, checked_shape, checked_sizes, damage_reported, of_type

SUFFIX = ".safetensors"
ALIGNMENT = 4096  # bytes: tensor data starts at a multiple of it
BARE = "@storage"  # suffix of a stored buffer that is no tensor itself: only views into it are
METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_HEADER_LIMIT = 100_000_000  # bytes: safetensors refuses a longer header

# dtype names and their spelling in the safetensors specification. Any other dtype is stored as U8, with its name in the
# header's metadata.
SPELLINGS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_NAMES = {spelling: name for name, spelling in SPELLINGS.items()}
_BY_ITEM_SIZE = {
    1: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"),
    2: ("U16", "I16", "F16", "BF16"),
    4: ("U32", "I32", "F32"),
    8: ("U64", "I64", "F64", "C64"),
}
ITEM_SIZES = {spelling: size for size, spellings in _BY_ITEM_SIZE.items() for spelling in spellings}
KIND = "safetensors file"


class TensorHeader(NamedTuple):
    """The header entry of a tensor that is to be written."""

    name: str
    spelling: str  # of its dtype
    shape: Sequence[int]
    nbytes: int


def to_bytes(tensors: Iterable[TensorHeader], metadata: Mapping[str, str]) -> bytes:
    """A file's header, padded to `ALIGNMENT`. The data of the tensors follows it in this order, without gaps."""
    entries: dict[str, object] = {METADATA: metadata}
    end = 0
    for name, spelling, shape, nbytes in tensors:
        if name == METADATA:
            raise UnsupportedError(f"a tensor is named {METADATA!r}, which safetensors reserves. Rename it.")
        start, end = end, end + nbytes
        entries[name] = {"dtype": spelling, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = -(-(len(text) + _LENGTH.size) // ALIGNMENT) * ALIGNMENT - _LENGTH.size
    return _LENGTH.pack(length) + text.ljust(length)


class HeaderReader(Protocol):
    """A file, as far as reading its header needs it."""

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`."""


class Extent(NamedTuple):
    """A stored tensor: the spelling of its dtype, its shape, and the range of its bytes in the file."""

    spelling: str
    shape: Sizes
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A parsed header: the tensors, the metadata, and ckpt's own part of that. Tensors fill the file without gaps."""

    entries: Mapping[str, Extent]
    metadata: Mapping[str, str]
    ours: Mapping[str, Any]

    @classmethod
    def read(cls, reader: HeaderReader, where: str, size: int) -> Header:
        """Read the header of a file of `size` bytes."""
        with damage_reported(where, KIND):
            return cls._read(reader, size)

    @classmethod
    def _read(cls, reader: HeaderReader, size: int) -> Header:
        data = _data_start(reader, size)
        fields = parsed(reader.read(_LENGTH.size, data))
        metadata = _texts(fields.pop(METADATA, {}))
        entries = {name: _extent(name, entry, data) for name, entry in fields.items()}
        _check_contiguous(entries.values(), data, size)
        return cls(entries, metadata, parsed(metadata.get("ckpt", "{}")))

    def own(self, key: str) -> Mapping[str, Any]:
        """A table of ckpt's own metadata."""
        return of_type(dict, self.ours.get(key, {}))


def _data_start(reader: HeaderReader, size: int) -> int:
    if size < _LENGTH.size:
        raise ValueError(f"it has {size} bytes")
    (length,) = _LENGTH.unpack(reader.read(0, _LENGTH.size))
    if length > min(_HEADER_LIMIT, size - _LENGTH.size):
        raise ValueError(f"its header claims {length} bytes, but the file has {size}")
    return int(_LENGTH.size + length)


def parsed(text: str | bytes) -> dict[str, Any]:
    """A JSON object in which no key is there twice: readers would differ in which of the two counts."""
    return of_type(dict, json.loads(text, object_pairs_hook=_distinct))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _texts(value: Any) -> dict[str, str]:
    if any(not isinstance(text, str) for text in of_type(dict, value).values()):
        raise ValueError("the metadata in its header has a value that is not a string")
    return of_type(dict, value)


def _extent(name: str, entry: Any, data: int) -> Extent:
    """An entry whose data offsets count from byte `data`."""
    fields = of_type(dict, entry)
    spelling, shape = fields["dtype"], checked_shape(fields["shape"])
    start, stop = checked_sizes(fields["data_offsets"])
    if spelling not in ITEM_SIZES:
        raise ValueError(f"tensor {name} has the unknown dtype {spelling!r}")
    if stop - start != math.prod(shape) * ITEM_SIZES[spelling]:
        raise ValueError(f"{name}: {stop - start} bytes can't form a {spelling} of shape {list(shape)}")
    return Extent(spelling, shape, data + start, data + stop)


def _check_contiguous(entries: Iterable[Extent], data: int, size: int) -> None:
    """Refuse overlaps, gaps, and a file shorter or longer than its tensors, as the readers of safetensors do."""
    at = data
    for start, stop in sorted((entry.start, entry.stop) for entry in entries):
        if start != at:
            raise ValueError(f"a tensor begins at byte {start}, but the previous tensor ends at byte {at}")
        at = stop
    if at != size:
        raise ValueError(f"the last tensor ends at byte {at}, but the file has {size} bytes")


@dataclass(frozen=True)
class Outline:
    """A tensor's dtype and shape. A `tied` tensor shares the bytes of another one."""

    dtype: str
    shape: tuple[int, ...]
    tied: bool = False


def outlines(reader: HeaderReader, where: str, size: int) -> dict[str, Outline]:
    """The tensors in a file. Of a sharded tensor, the shape is that of the shard in this file."""
    header = Header.read(reader, where, size)
    with damage_reported(where, KIND):
        foreign = header.own("dtypes")
        found = {name: _outline(entry, foreign.get(name)) for name, entry in header.entries.items()}
        for name, view in header.own("views").items():
            found[name] = Outline(str(view["dtype"]), checked_shape(view["shape"]), tied=not is_bare(view["of"]))
    return {name: outline for name, outline in found.items() if not is_bare(name)}


def _outline(entry: Extent, foreign: Any) -> Outline:
    return Outline(str(foreign), entry.shape[:-1]) if foreign else Outline(_NAMES[entry.spelling], entry.shape)


def is_bare(name: str) -> bool:
    """Whether a stored name is that of a bare buffer, which only serves as the base of views."""
    return name.rstrip("+").endswith(BARE)
