"""Tensors in safetensors files.

A file is what the safetensors specification says: eight bytes of header length, a JSON header padded with spaces, the
data without gaps. On top of that, for those who read closer (docs/format.md):

- the header is padded so that the data starts at a multiple of 4096, and tensors stand in the order of their alignment;
- `__metadata__["DCP_SHARDING_INFO"]` says where a piece of a larger tensor belongs, in the words that PyTorch uses;
- `__metadata__["ckpt"]` holds what safetensors cannot say: dtypes it does not know (their bytes stand there as U8),
  the shapes of the wholes of pieces, and tensors that are views of others.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ckpt.errors import DamagedError
from ckpt.formats.layout import Box
from ckpt.formats.native import dtypes
from ckpt.formats.native.header import LENGTH, Header, sizes, understood
from ckpt.formats.native.shared_storage import View, untie
from ckpt.formats.state import FilePlan, Shard
from ckpt.formats.tensor_bytes import host_bytes, is_dense, is_plain, movable, on_host
from ckpt.formats.transfers import ByteReader, Transfer, Want, at_once

_log = logging.getLogger("ckpt")

ALIGNMENT = 4096
SMALL = 1 << 16  # bytes
_WINDOW = 8 << 20

_Outlines = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]  # name, dtype and shape of what is stored
_Pieces = tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]  # name, shape of the whole, and offsets in it


def image(path: str, shards: Mapping[str, Shard], *, steady: bool = False) -> FilePlan:
    """The file that holds these tensors. Plain tensors on the CPU are read from where they lie when it is written."""
    stored, views = untie({name: shard.tensor for name, shard in shards.items()})
    order = in_file_order(stored)
    header, end = _header([(name, stored[name]) for name in order], shards, views)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(header)
        for name in order:
            yield host_bytes(on_host(stored[name]))

    contents: list[bytes | tuple[str, torch.Tensor]] = [header, *((name, stored[name]) for name in order)]
    settled = all(is_plain(stored[name]) for name in order)
    return FilePlan(path, len(header) + end, pieces, steady, contents, settled, head=len(header))


def gathered_image(
    path: str,
    outlines: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    fetch: Callable[[str], torch.Tensor],
    *,
    together: bool = True,
) -> FilePlan:
    """The file that holds these tensors, each of which is fetched when its turn to be written comes.

    `outlines` are tensors on the meta device. `fetch` is called once for each, in `in_file_order`; where ranks do it
    `together`, also if writing fails half-way.
    """
    order = in_file_order(outlines)
    views = {
        name: View(of, outlines[of].dtype, tuple(outlines[of].shape), outlines[of].stride(), 0)
        for name, of in aliases.items()
    }
    header, end = _header([(name, outlines[name]) for name in order], {}, views)

    def pieces() -> Iterator[memoryview]:
        left = iter(order)
        try:
            yield memoryview(header)
            for name in left:
                yield host_bytes(on_host(fetch(name)))
        except (Exception, GeneratorExit):
            if together:
                take_part(fetch, left)
            raise

    return FilePlan(path, len(header) + end, pieces, head=len(header))


def take_part(fetch: Callable[[Any], object], left: Iterable[Any]) -> None:
    """Go on with what ranks do together, after a failure here. A failure of that is logged: the first one is raised."""
    try:
        for one in left:
            fetch(one)
    except Exception as error:
        _log.warning("other ranks could not be helped to their end: %s: %s", type(error).__name__, error)


def in_file_order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names as they come in a file: larger elements first, so that all are aligned.

    Among those of one size small tensors come last, and so stand together: the step counts of an optimizer, which
    every rank wants of the one rank that writes them, are then in one block, and not in all.
    """

    def place(name: str) -> tuple[int, bool]:
        tensor = tensors[name]
        return -tensor.element_size(), tensor.numel() * tensor.element_size() < SMALL

    return sorted(tensors, key=place)


def _header(
    tensors: list[tuple[str, torch.Tensor]], shards: Mapping[str, Shard], views: Mapping[str, View]
) -> tuple[bytes, int]:
    """The header, and how many bytes of data come after it."""
    outlines = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors)
    pieces = tuple((name, one.shape, one.offsets) for name, one in shards.items() if not one.is_whole)
    return _spelled_out(outlines, pieces, tuple(views.items()))


@lru_cache(maxsize=64)  # save after save they are the same, and training waits
def _spelled_out(outlines: _Outlines, pieces: _Pieces, views: tuple[tuple[str, View], ...]) -> tuple[bytes, int]:
    entries: dict[str, Any] = {"__metadata__": _metadata(outlines, pieces, views)}
    end = 0
    for name, dtype, shape in outlines:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        spelling, spelled_shape = _spelled(dtype, shape)
        entries[name] = {"dtype": spelling, "shape": spelled_shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return LENGTH.pack(_padded(len(text))) + text.ljust(_padded(len(text))), end


def _padded(length: int) -> int:
    return -(-(length + LENGTH.size) // ALIGNMENT) * ALIGNMENT - LENGTH.size


def _spelled(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    if dtype in dtypes.SPELLED:
        return dtypes.SPELLED[dtype], list(shape)
    return "U8", [*shape, dtype.itemsize]


def _metadata(outlines: _Outlines, pieces: _Pieces, views: tuple[tuple[str, View], ...]) -> dict[str, str]:
    metadata = {"format": "pt"}
    ours = {
        "dtypes": {name: dtypes.name_of(dtype) for name, dtype, _ in outlines if dtype not in dtypes.SPELLED},
        "shapes": {name: list(shape) for name, shape, _ in pieces},
        "views": {name: _view_to_json(view) for name, view in views},
    }
    if pieces:
        # PyTorch's reader asks for every tensor of a file in which it finds this key
        known = {name: list(offsets) for name, _, offsets in pieces}
        offsets = {name: {"saved_offsets": known.get(name, [0] * len(shape))} for name, _, shape in outlines}
        metadata["DCP_SHARDING_INFO"] = json.dumps(offsets)
    if any(ours.values()):
        metadata["ckpt"] = json.dumps({key: value for key, value in ours.items() if value})
    return metadata


def _view_to_json(view: View) -> dict[str, Any]:
    geometry = {"shape": list(view.shape), "stride": list(view.stride), "start": view.start}
    return {"of": view.of, "dtype": dtypes.name_of(view.dtype), **geometry}


@dataclass(frozen=True)
class Saved:
    """A tensor in a file: what it is, and where its bytes are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass
class TensorFile:
    """A safetensors file, opened: its tensors by name.

    What is asked for is handed to `want` as transfers, and is there when those have been carried out.
    """

    reader: ByteReader
    where: str
    want: Want = at_once
    stored: dict[str, Saved] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    offsets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _bases: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def open(cls, reader: ByteReader, where: str, want: Want = at_once) -> TensorFile:
        file = cls(reader, where, want)
        with understood(where):
            file._read_header()
        return file

    def __contains__(self, name: str) -> bool:
        return name in self.stored or name in self.views

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and shape of a tensor, without reading it."""
        entry = self.views.get(name) or self._saved(name)
        return entry.dtype, entry.shape

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, read into new memory. Tensors that shared memory share it again."""
        view = self.views.get(name)
        base_name = view.of if view else name
        if base_name not in self._bases:
            saved = self._saved(base_name)
            self._bases[base_name] = torch.empty(saved.shape, dtype=saved.dtype)
            self.read_into(base_name, self._bases[base_name])
        base = self._bases[base_name]
        return view.on(base) if view else base

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill `target`, which has the tensor's shape."""
        _, shape = self.about(name)
        self.fill(name, target, Box((0,) * len(shape), shape))

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        """Fill `target`, which is the given box of the tensor, and needs no gradient.

        Its bytes come straight from the file where they fit. Elsewhere the rows in which the box lies pass through
        memory, some megabytes at a time.
        """
        if name in self.views:
            self._fill_from_view(self.views[name], target, box)
            return
        saved = self._saved(name)
        row = math.prod(saved.shape[1:]) * saved.dtype.itemsize
        start = saved.start + (box.offsets[0] * row if box.offsets else 0)
        if box.sizes[1:] == saved.shape[1:] and saved.dtype == target.dtype and is_dense(target):
            self._want(start, target.nbytes, into=target)
            return
        if not box.sizes:
            self._pass_on(start, (), saved.dtype, [], target)
            return
        (_, count), *others = box.ranges
        step = max(1, _WINDOW // max(1, row))
        for begin in range(0, count, step):
            length = min(step, count - begin)
            rows = (length, *saved.shape[1:])
            part = target.narrow(0, begin, length)
            self._pass_on(start + begin * row, rows, saved.dtype, [(0, length), *others], part)

    def _fill_from_view(self, view: View, target: torch.Tensor, box: Box) -> None:
        """The bytes from the first to the last element of the view are read, and it is taken from them."""
        reach = 1 + sum((length - 1) * step for length, step in zip(view.shape, view.stride, strict=True))
        size = reach * view.dtype.itemsize if math.prod(view.shape) else 0

        def take(data: torch.Tensor) -> None:
            copy_into(narrowed(data.view(view.dtype).as_strided(view.shape, view.stride), box.ranges), target)

        self._want(self.stored[view.of].start + view.start, size, take=take)

    def _pass_on(
        self,
        start: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        inside: list[tuple[int, int]],
        target: torch.Tensor,
    ) -> None:
        """Read elements, and copy those `inside` some ranges to the target."""

        def take(data: torch.Tensor) -> None:
            copy_into(narrowed(data.view(dtype).view(shape), inside), target)

        self._want(start, math.prod(shape) * dtype.itemsize, take=take)

    def _want(self, start: int, size: int, **where: Any) -> None:
        if size:
            self.want(Transfer(self.reader, start, size, **where))

    def _saved(self, name: str) -> Saved:
        try:
            return self.stored[name]
        except KeyError:
            raise DamagedError(f"{self.where} has no tensor {name!r}, though the checkpoint refers to it.") from None

    def _read_header(self) -> None:
        header = Header.read(self.reader, self.where)
        entries, metadata, ours, data = header.entries, header.metadata, header.ours, header.data
        foreign = {name: dtypes.by_name(dtype) for name, dtype in ours.get("dtypes", {}).items()}
        for name, entry in entries.items():
            self.stored[name] = _saved_from_json(entry, data, foreign.get(name))
        self.views = {name: _view_from_json(view, self.stored) for name, view in ours.get("views", {}).items()}
        self.shapes = {name: sizes(shape) for name, shape in ours.get("shapes", {}).items()}
        sharding = json.loads(metadata.get("DCP_SHARDING_INFO", "{}"))
        self.offsets = {name: sizes(info["saved_offsets"]) for name, info in sharding.items()}


def copy_into(source: torch.Tensor, target: torch.Tensor) -> None:
    """Fill `target`, which may have another dtype."""
    if source.dtype == target.dtype:
        source, target = movable(source), movable(target)
    target.copy_(source)


def narrowed(tensor: torch.Tensor, ranges: list[tuple[int, int]]) -> torch.Tensor:
    """A box of a tensor: for each dimension a start and a length."""
    for dim, (start, length) in enumerate(ranges):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def _saved_from_json(entry: Mapping[str, Any], data: int, foreign: torch.dtype | None) -> Saved:
    dtype = foreign or dtypes.BY_SPELLING[entry["dtype"]]
    shape = sizes(entry["shape"][:-1] if foreign else entry["shape"])
    start, stop = sizes(entry["data_offsets"])
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{stop - start} bytes are no {dtype} of shape {list(shape)}")
    return Saved(dtype, shape, data + start, data + stop)


def _view_from_json(fields: Mapping[str, Any], stored: Mapping[str, Saved]) -> View:
    dtype, base = dtypes.by_name(fields["dtype"]), stored[fields["of"]]
    shape, stride, (start,) = sizes(fields["shape"]), sizes(fields["stride"]), sizes([fields["start"]])
    reach = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    if start % dtype.itemsize or start + reach * dtype.itemsize > base.stop - base.start:
        raise ValueError(f"a view leads out of {fields['of']!r}")
    return View(fields["of"], dtype, shape, stride, start)
