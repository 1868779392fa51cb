"""Archives of `torch.save`: the place of every tensor's bytes, and what the pickle describes. It is not executed."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import CkptError, DamagedError
from ckpt.formats.damage import reason
from ckpt.formats.foreign.pickle_bounds import Described
from ckpt.formats.foreign.pickle_reader import PERSISTENT, read_pickle
from ckpt.formats.native import dtypes
from ckpt.formats.pieces import Region
from ckpt.formats.strides import checked_shape, checked_sizes, reach
from ckpt.formats.transfers import ByteReader

ARCHIVE = b"PK\x03\x04"  # what a file of torch.save begins with
_ENDS = 4096  # bytes at either end, which usually hold all of the archive except the data
_MOST_TIES = 16  # tensors may share storages, and each of them is read
_ALWAYS = 256 << 20  # bytes of tensors, however small an archive is: one element may be expanded to many
_LOCAL_HEADER = struct.Struct("<26xHH")  # skips to the lengths of the name and of the extra field
_REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_PARAMETER = "torch._utils._rebuild_parameter"
_TYPED = "torch._tensor._rebuild_from_type_v2"  # of a tensor that has attributes, which are not read
_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter")
_UNTYPED = "torch.storage.UntypedStorage"
_STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
}
DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
TENSORS = frozenset(
    (*_REBUILD, _PARAMETER, _TYPED, *_CLASSES, _UNTYPED, *_STORAGES, *DTYPES, "collections.OrderedDict")
)


def find_tensor(reader: ByteReader, start: int, length: int, where: str) -> Region:
    """The place of the single tensor that `torch.save` wrote to these bytes of a file. Reads only a few kB."""
    with open_archive(reader, start, length, where, "no tensor of torch.save") as archive:
        region = archive.region(archive.described(TENSORS))
        if region.nbytes > length:
            raise ValueError(f"{length} bytes do not hold a tensor of {region.nbytes}")
        return region


def is_tensor(found: Any) -> bool:
    """Whether a value that was read from a pickle describes a tensor."""
    return isinstance(found, Described) and found.name in (*_REBUILD, _PARAMETER, _TYPED)


@contextmanager
def open_archive(reader: ByteReader, start: int, length: int, where: str, not_found: str) -> Iterator[TorchArchive]:
    """The archive in these bytes of a file. Any defect raises one `DamagedError`: the file holds `not_found`."""
    window = _FileWindow(reader, start, length)
    try:
        with zipfile.ZipFile(window) as archive:
            yield TorchArchive(window, archive, where)
    except CkptError:
        raise
    except Exception as error:  # of zipfile, of zlib, of torch: hostile bytes raise errors of any kind
        cut_off = isinstance(error, zipfile.BadZipFile) and window.begins_an_archive
        why = "it begins as one, and was cut off" if cut_off else reason(error)
        raise DamagedError(f"{where} holds {not_found} at byte {start}: {why}.") from error


class TorchArchive:
    """An archive of `torch.save`: a pickle, and the bytes of every storage."""

    def __init__(self, window: _FileWindow, archive: zipfile.ZipFile, where: str) -> None:
        self._window = window
        self._archive = archive
        self._where = where
        self._root = archive.namelist()[0].partition("/")[0]
        self._room = _ALWAYS + _MOST_TIES * window.length  # bytes that its tensors may have together
        order = f"{self._root}/byteorder"
        if order in archive.namelist() and self._bytes(order) != b"little":
            raise ValueError("its bytes are in the order of another kind of machine")

    def described(self, allowed: Container[str]) -> Any:
        """What the pickle describes. `allowed` are the names that it may contain."""
        return read_pickle(self._bytes(f"{self._root}/data.pkl"), allowed, self._where)

    def _bytes(self, name: str) -> bytes:
        entry = self._archive.getinfo(name)
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > self._window.length:
            raise ValueError(f"its {name.rpartition('/')[2]} is compressed, and could be of any size")
        return self._archive.read(entry)

    def region(self, found: Any) -> Region:
        """The place of the bytes of a tensor that the pickle describes."""
        saved = _TensorRecord.described(found)
        entry = self._archive.getinfo(f"{self._root}/data/{saved.key}")
        if saved.stop > entry.file_size or entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{entry.file_size} bytes, compressed or not, do not hold its tensor of {saved.stop}")
        data = self._window.start + self._window.data_of(entry.header_offset, entry.file_size)
        region = Region(self._window.reader, self._where, saved.dtype, data + saved.start, saved.sizes, saved.strides)
        self._room -= region.nbytes
        if self._room < 0:
            raise ValueError(f"its tensors are far larger than its {self._window.length} bytes")
        return region


@dataclass(frozen=True)
class _TensorRecord:
    """A tensor in the pickle: the key of its storage, and which elements of that it is."""

    key: str
    dtype: torch.dtype
    first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def described(cls, found: Described) -> _TensorRecord:
        if found.name == _PARAMETER:
            found = found.arguments[0]
        if found.name == _TYPED:
            found = _without_attributes(found)
        if found.name not in _REBUILD:
            raise ValueError(f"it describes {found.name}, not a tensor")
        storage, first, sizes, strides, _, _, *rest = found.arguments
        if storage.name != PERSISTENT:
            raise ValueError(f"its storage is a {storage.name}")
        _, kind, key, _, _ = storage.arguments[0]
        dtype = _dtype(kind.name, rest, typed=found.name == _REBUILD[0])
        return cls(str(key), dtype, *_checked(first, sizes, strides))

    @property
    def start(self) -> int:
        return self.first * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + reach(self.sizes, self.strides) * self.dtype.itemsize


def _without_attributes(found: Described) -> Described:
    rebuild, kind, arguments, _ = found.arguments
    if kind.name not in _CLASSES:
        raise ValueError(f"it describes {kind.name}, not a tensor")
    return Described(rebuild.name, arguments)


def _dtype(storage: str, rest: list[Any], *, typed: bool) -> torch.dtype:
    if typed:
        if any(rest):
            raise ValueError("it is conjugated or negated when it is used")
        return _STORAGES[storage]
    return stored_dtype(rest[0].name)


def stored_dtype(name: str) -> torch.dtype:
    """The dtype of a tensor by its name in a pickle: `torch.float32`."""
    return dtypes.by_name(dtypes.name_of(DTYPES[name]))


def _checked(first: Any, sizes: Any, strides: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    if len(sizes) != len(strides):
        raise ValueError(f"a tensor of {len(sizes)} sizes and {len(strides)} strides cannot be")
    return checked_sizes([first])[0], checked_shape(sizes), checked_sizes(strides)


class _FileWindow:
    """A range of a file, as a file object for `zipfile`. Both ends are read once: they hold all of a small archive."""

    def __init__(self, reader: ByteReader, start: int, length: int) -> None:
        self.start = start
        self.reader = reader
        self.length = length
        self._at = 0
        self._tail_at = max(0, length - _ENDS)
        self._tail = reader.read(start + self._tail_at, start + length)
        self._head = reader.read(start, start + min(length, _ENDS))

    @property
    def begins_an_archive(self) -> bool:
        return self._head.startswith(ARCHIVE)

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.length)[whence]
        if self._at < 0:
            raise ValueError("it leads before its first byte")
        return self._at

    def read(self, count: int = -1) -> bytes:
        stop = self.length if count < 0 else min(self.length, self._at + count)
        found = self._between(self._at, stop)
        self._at = max(self._at, stop)
        return found

    def _between(self, start: int, stop: int) -> bytes:
        if start >= self._tail_at:
            return self._tail[start - self._tail_at : stop - self._tail_at]
        if stop <= len(self._head):
            return self._head[start:stop]
        return self.reader.read(self.start + start, self.start + stop)

    def data_of(self, header: int, length: int) -> int:
        """The offset of an entry's data."""
        name, extra = _LOCAL_HEADER.unpack(self._between(header, header + _LOCAL_HEADER.size))
        data: int = header + _LOCAL_HEADER.size + name + extra
        if data + length > self.length:
            raise ValueError("it ends too early")
        return data
