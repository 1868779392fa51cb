"""The header of a safetensors file, read and written: names, dtypes, shapes and byte offsets.

Imports no torch, so that `ckpt show` starts without it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ckpt.errors import DamagedError

SUFFIX = ".safetensors"
ALIGNMENT = 4096  # bytes: tensor data starts at a multiple of it
BARE = "@storage"  # suffix of a stored buffer that is no tensor itself: only views into it are
METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_SIZE_LIMIT = 1 << 63
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
        start, end = end, end + nbytes
        entries[name] = {"dtype": spelling, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = -(-(len(text) + _LENGTH.size) // ALIGNMENT) * ALIGNMENT - _LENGTH.size
    return _LENGTH.pack(length) + text.ljust(length)


class HeaderReader(Protocol):
    """A file, as far as reading its header needs it."""

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`."""


@dataclass(frozen=True)
class Header:
    """A parsed header: tensor entries, the metadata, ckpt's own part of it, and the byte where data starts."""

    entries: Mapping[str, Any]
    metadata: Mapping[str, str]
    ours: Mapping[str, Any]
    data: int

    @classmethod
    def read(cls, reader: HeaderReader, where: str) -> Header:
        with damage_reported(where):
            return cls._read(reader)

    @classmethod
    def _read(cls, reader: HeaderReader) -> Header:
        (length,) = _LENGTH.unpack(reader.read(0, _LENGTH.size))
        if length > _HEADER_LIMIT:
            raise ValueError(f"its header claims {length} bytes")
        data = _LENGTH.size + length
        text = reader.read(_LENGTH.size, data)
        if len(text) < length:
            raise ValueError(f"its header has {len(text)} of {length} bytes")
        entries = json.loads(text)
        metadata = entries.pop(METADATA, {})
        return cls(entries, metadata, json.loads(metadata.get("ckpt", "{}")), data)


@dataclass(frozen=True)
class Outline:
    """A tensor's dtype and shape. A `tied` tensor shares the bytes of another one."""

    dtype: str
    shape: tuple[int, ...]
    tied: bool = False


def outlines(reader: HeaderReader, where: str) -> dict[str, Outline]:
    """The tensors in a file. Of a sharded tensor, the shape is that of the shard in this file."""
    header = Header.read(reader, where)
    with damage_reported(where):
        foreign = header.ours.get("dtypes", {})
        found = {name: _outline(entry, foreign.get(name)) for name, entry in header.entries.items()}
        for name, view in header.ours.get("views", {}).items():
            found[name] = Outline(str(view["dtype"]), sizes(view["shape"]), tied=not is_bare(view["of"]))
    return {name: outline for name, outline in found.items() if not is_bare(name)}


def _outline(entry: Mapping[str, Any], foreign: str | None) -> Outline:
    shape = sizes(entry["shape"])
    return Outline(foreign, shape[:-1]) if foreign else Outline(_NAMES[entry["dtype"]], shape)


def is_bare(name: str) -> bool:
    """Whether a stored name is that of a bare buffer, which only serves as the base of views."""
    return name.rstrip("+").endswith(BARE)


@contextmanager
def damage_reported(where: str) -> Iterator[None]:
    """Raise `DamagedError` for a header that cannot be parsed or contradicts itself."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise DamagedError(f"{where} is no safetensors file that ckpt reads: {error}.") from error


def sizes(values: list[Any]) -> tuple[int, ...]:
    """Validated sizes or offsets from a header: a damaged file must not make torch allocate or read at random."""
    for value in values:
        if type(value) is not int or not 0 <= value < _SIZE_LIMIT:
            raise ValueError(f"{values!r} are no sizes or offsets")
    return tuple(values)
