"""The header of a safetensors file: what it says of tensors, in names and numbers.

Imports no torch: a shell reads headers too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from ckpt.errors import DamagedError

SUFFIX = ".safetensors"
LENGTH = struct.Struct("<Q")
BARE = "@storage"  # ends the name of memory that is no tensor itself, but that tensors are views of
_LARGEST = 1 << 63
_MOST = 100_000_000  # bytes: safetensors refuses a longer one

# Names of dtypes, and how the safetensors specification spells them. Any other dtype is stored as bytes, with its name
# in the header's metadata.
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


class HeadReader(Protocol):
    """All that is needed of a file."""

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`."""


@dataclass(frozen=True)
class Header:
    """What a header says: the entries of tensors, metadata of others and of ours, and the byte where data begins."""

    entries: Mapping[str, Any]
    metadata: Mapping[str, str]
    ours: Mapping[str, Any]
    data: int

    @classmethod
    def read(cls, reader: HeadReader, where: str) -> Header:
        with understood(where):
            return cls._read(reader)

    @classmethod
    def _read(cls, reader: HeadReader) -> Header:
        (length,) = LENGTH.unpack(reader.read(0, LENGTH.size))
        if length > _MOST:
            raise ValueError(f"its header claims {length} bytes")
        data = LENGTH.size + length
        text = reader.read(LENGTH.size, data)
        if len(text) < length:
            raise ValueError(f"its header has {len(text)} of {length} bytes")
        entries = json.loads(text)
        metadata = entries.pop("__metadata__", {})
        return cls(entries, metadata, json.loads(metadata.get("ckpt", "{}")), data)


@dataclass(frozen=True)
class Outline:
    """A tensor without its data. One that is `tied` shares the bytes of another."""

    dtype: str
    shape: tuple[int, ...]
    tied: bool = False


def outlines(reader: HeadReader, where: str) -> dict[str, Outline]:
    """The tensors in a file, each as large as it is there."""
    header = Header.read(reader, where)
    with understood(where):
        foreign = header.ours.get("dtypes", {})
        found = {name: _outline(entry, foreign.get(name)) for name, entry in header.entries.items()}
        for name, view in header.ours.get("views", {}).items():
            found[name] = Outline(str(view["dtype"]), sizes(view["shape"]), tied=not is_bare(view["of"]))
    return {name: one for name, one in found.items() if not is_bare(name)}


def _outline(entry: Mapping[str, Any], foreign: str | None) -> Outline:
    shape = sizes(entry["shape"])
    return Outline(foreign, shape[:-1]) if foreign else Outline(_NAMES[entry["dtype"]], shape)


def is_bare(name: str) -> bool:
    """Whether it names memory that is no tensor itself."""
    return name.rstrip("+").endswith(BARE)


@contextmanager
def understood(where: str) -> Iterator[None]:
    """Whatever a header says that makes no sense is damage."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise DamagedError(f"{where} is no safetensors file that ckpt reads: {error}.") from error


def sizes(values: list[Any]) -> tuple[int, ...]:
    """Lengths or offsets from a header. Torch and the readers are never handed anything else."""
    for value in values:
        if type(value) is not int or not 0 <= value < _LARGEST:
            raise ValueError(f"{values!r} are no sizes or offsets")
    return tuple(values)
