"""Writes a file of `torch.save` whose tensors are streamed into it: first the file without data, then every tensor.

The pickle is written by torch's own `torch.save`. It holds what a checkpoint holds: plain data, and tensors.
"""

from __future__ import annotations

import copy
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from ckpt.formats.foreign.accelerate import in_memory
from ckpt.formats.foreign.hf_safetensors import LiveTensor, StreamedTensor
from ckpt.formats.foreign.torch_errors import first_error_raised
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.tensor_bytes import host_bytes

_LOCAL = struct.Struct("<4s10xL8xHH")  # of an entry: its signature, its checksum, the lengths of its name and extra
_LISTED = struct.Struct("<4s12xL8xHHH")  # the same in the directory at the end, with the length of a comment
_LISTED_SIZE = 46
_CRC_AT, _LISTED_CRC_AT = 14, 16  # where these have the checksum


def write_file(path: str, tree: Any, advance: Callable[[int], None]) -> None:
    """Write a value that has `PiecedTensor`s in it to a new file, and sync it to disk. `advance` is told of bytes.

    What lies in the same place, or is the same object, as tied weights are, is saved once.
    """
    skeleton = _Skeleton()
    with open(path, "x+b") as file, first_error_raised():
        if _has_subclasses(tree):  # which are saved as torch saves them, from memory
            torch.save(in_memory(tree), file)
            os.fsync(file.fileno())
            return
        with skip_data(materialize_fake_tensors=True):
            torch.save(skeleton.of(tree), file)
        sums = {name: _fill(file, place, skeleton.tensors[name], advance) for name, place in _places(file)}
        _write_checksums(file, sums)
        file.flush()
        os.fsync(file.fileno())


def _has_subclasses(value: Any) -> bool:
    """Whether there are tensors of special kinds in a value: of torchao, of bitsandbytes."""
    if isinstance(value, dict):
        return any(map(_has_subclasses, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_subclasses, value))
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter)


class _Skeleton:
    """A value in which tensors have no data. `tensors` has them by the number under which `torch.save` stores each."""

    def __init__(self) -> None:
        self.tensors: dict[str, StreamedTensor] = {}
        self._fake = FakeTensorMode()
        self._done: dict[Any, torch.Tensor] = {}
        self._kept: list[Any] = []  # or a new object could get the identity of one that was freed

    def of(self, value: Any) -> Any:
        if isinstance(value, PiecedTensor | torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            new = copy.copy(value)  # also a Counter, or an OrderedDict
            for key, item in value.items():
                new[key] = self.of(item)
            return new
        if type(value) in (list, tuple, set):
            return type(value)(map(self.of, value))
        return value

    def _tensor(self, value: PiecedTensor | torch.Tensor) -> torch.Tensor:
        identity: Any = id(value)
        if isinstance(value, PiecedTensor) and value.size:
            identity = value.dtype, value.shape, frozenset(value.pieces)
        if identity not in self._done:
            self._kept.append(value)
            shape = tuple(value.shape)
            with self._fake:
                self._done[identity] = torch.empty(shape, dtype=value.dtype)
            source = LiveTensor(value.dtype, shape, value.detach) if isinstance(value, torch.Tensor) else value
            self.tensors[str(len(self.tensors))] = source
        return self._done[identity]


def _places(file: IO[bytes]) -> Iterator[tuple[str, tuple[int, int]]]:
    """The number of every tensor in the file, with the offset and the length of its data."""
    with zipfile.ZipFile(file) as archive:
        entries = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    for entry in entries:
        file.seek(entry.header_offset)
        _, _, name, extra = _LOCAL.unpack(file.read(_LOCAL.size))
        yield entry.filename.rpartition("/")[2], (entry.header_offset + _LOCAL.size + name + extra, entry.file_size)


def _fill(file: IO[bytes], place: tuple[int, int], tensor: StreamedTensor, advance: Callable[[int], None]) -> int:
    """Write the data of a tensor to its place. Returns the checksum."""
    start, length = place
    checksum, at = 0, start
    for slab in tensor.slabs() if length else ():
        data = host_bytes(slab)
        file.seek(at)
        file.write(data)
        checksum, at = zlib.crc32(data, checksum), at + len(data)
        advance(len(data))
    if at != start + length:
        raise RuntimeError(f"{at - start} bytes of a tensor were written where {length} are needed")
    return checksum


def _write_checksums(file: IO[bytes], sums: dict[str, int]) -> None:
    """Write the checksums of data into the archive's directory and before the data: torch left them out."""
    with zipfile.ZipFile(file) as archive:
        listed, headers = archive.start_dir, [(entry.filename, entry.header_offset) for entry in archive.infolist()]
    for path, header in headers:
        file.seek(listed)
        _, _, *lengths = _LISTED.unpack(file.read(_LISTED.size))
        number = path.rpartition("/")[2]
        if "/data/" in path:
            for at in (header + _CRC_AT, listed + _LISTED_CRC_AT):
                file.seek(at)
                file.write(struct.pack("<L", sums[number]))
        listed += _LISTED_SIZE + sum(lengths)
