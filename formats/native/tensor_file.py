"""Reading safetensors files: any tensor, or any box of one, into any memory. `tensor_file_plan.py` writes them.

The tensors of several files of a part are put together as `PiecedTensor`s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import DamagedError
from ckpt.formats.damage import damage_reported
from ckpt.formats.layout import Box
from ckpt.formats.native import dtypes
from ckpt.formats.native.header import KIND, Extent, Header, is_bare, parsed
from ckpt.formats.native.shared_storage import View
from ckpt.formats.pieces import Piece, PiecedTensor, Region
from ckpt.formats.strides import Expansion, Sizes, checked_shape, checked_sizes, dense_strides, is_dense, reach
from ckpt.formats.transfers import ByteReader, Want, at_once


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: dtype, shape, and the range of its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass
class TensorFile:
    """An opened safetensors file: its tensors by name.

    Reads are handed to `want` as transfers. A tensor holds its data once its transfers have been carried out.
    """

    reader: ByteReader
    where: str
    want: Want = at_once
    stored: dict[str, TensorEntry] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    offsets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _bases: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def open(cls, reader: ByteReader, where: str, size: int, want: Want = at_once) -> TensorFile:
        """Open a file of `size` bytes: its header is read, and checked against that."""
        file = cls(reader, where, want)
        with damage_reported(where, KIND):
            file._read_header(size)
        return file

    def __contains__(self, name: str) -> bool:
        return name in self.stored or name in self.views

    @property
    def ties(self) -> dict[str, str]:
        """Tied tensors: views that are all of a stored tensor, each with its name."""

        def is_all(view: View) -> bool:
            base = self.stored[view.of]
            return (view.dtype, view.shape, view.start) == (base.dtype, base.shape, 0) and is_dense(
                view.shape, view.stride
            )

        return {name: view.of for name, view in self.views.items() if is_all(view)}

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and shape of a tensor, without reading it."""
        entry = self.views.get(name) or self._entry(name)
        return entry.dtype, entry.shape

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in new memory. Tensors that shared memory when they were saved share it again."""
        view = self.views.get(name)
        base_name = view.of if view else name
        if base_name not in self._bases:
            entry = self._entry(base_name)
            self._bases[base_name] = torch.empty(entry.shape, dtype=entry.dtype)
            self.read_into(base_name, self._bases[base_name])
        base = self._bases[base_name]
        return view.on(base) if view else base

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill `target`, which has the tensor's shape."""
        _, shape = self.about(name)
        self.fill(name, target, Box((0,) * len(shape), shape))

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        """Fill `target`, which is the given box of the tensor and needs no gradient."""
        self.region(name).fill(box.offsets, target, self.want)

    def region(self, name: str) -> Region:
        """The place of a tensor in the file."""
        view = self.views.get(name)
        if view is None:
            entry = self._entry(name)
            return Region(self.reader, self.where, entry.dtype, entry.start, entry.shape, dense_strides(entry.shape))
        start = self.stored[view.of].start + view.start
        return Region(self.reader, self.where, view.dtype, start, view.shape, view.stride)

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self.stored[name]
        except KeyError:
            raise DamagedError(f"{self.where} has no tensor {name!r}, though the checkpoint refers to it.") from None

    def _read_header(self, size: int) -> None:
        header = Header.read(self.reader, self.where, size)
        foreign = {name: dtypes.by_name(dtype) for name, dtype in header.own("dtypes").items()}
        self.stored = {name: _entry(extent, foreign.get(name)) for name, extent in header.entries.items()}
        expansion = Expansion()
        for name, fields in header.own("views").items():
            self.views[name] = _view_from_json(fields, self.stored)
            expansion.add(self.views[name].shape, self.views[name].stride, self.views[name].dtype.itemsize)
        if both := self.stored.keys() & self.views.keys():
            raise ValueError(f"{min(both)} is there twice")
        self.shapes = {name: checked_shape(shape) for name, shape in header.own("shapes").items()}
        sharding = parsed(header.metadata.get("DCP_SHARDING_INFO", "{}"))
        self.offsets = {name: checked_sizes(info["saved_offsets"]) for name, info in sharding.items()}


def _entry(extent: Extent, foreign: torch.dtype | None) -> TensorEntry:
    """`foreign`: the dtype, if safetensors has none for it; its bytes are the last dimension of what is stored."""
    spelling, shape, start, stop = extent
    if foreign is None:
        return TensorEntry(dtypes.BY_SPELLING[spelling], shape, start, stop)
    if spelling != "U8" or shape[-1:] != (foreign.itemsize,):
        raise ValueError(f"{spelling} of shape {list(shape)} are no elements of {foreign}")
    return TensorEntry(foreign, shape[:-1], start, stop)


def _view_from_json(fields: Mapping[str, Any], stored: Mapping[str, TensorEntry]) -> View:
    dtype, base = dtypes.by_name(fields["dtype"]), stored[fields["of"]]
    shape, stride, (start,) = (
        checked_shape(fields["shape"]),
        checked_sizes(fields["stride"]),
        checked_sizes([fields["start"]]),
    )
    if start % dtype.itemsize or start + reach(shape, stride) * dtype.itemsize > base.stop - base.start:
        raise ValueError(f"a view leads out of {fields['of']!r}")
    return View(fields["of"], dtype, shape, stride, start)


_FoundPiece = tuple[torch.dtype, Sizes, Piece]  # dtype and shape of the full tensor, and one of its pieces


def pieced(
    files: Iterable[TensorFile], counts: Callable[[TensorFile, str], bool] = lambda file, name: True
) -> dict[str, PiecedTensor]:
    """Every tensor in the files, its pieces collected from all of them in which it `counts`."""
    found: dict[str, list[_FoundPiece]] = defaultdict(list)
    for file in files:
        for name, piece in _in_file(file):
            if counts(file, name):
                found[name].append(piece)
    return {name: _joined(name, pieces) for name, pieces in found.items()}


def _in_file(file: TensorFile) -> Iterator[tuple[str, _FoundPiece]]:
    for name, region in _regions(file):
        shape = file.shapes.get(name, region.sizes)
        box = Box(_offsets(file, name, len(shape)), region.sizes)
        yield name, (region.dtype, shape, Piece(box, region))


def _offsets(file: TensorFile, name: str, dims: int) -> Sizes:
    """The offsets of a piece in its tensor. A view of a piece has the offsets of that piece."""
    base = file.views[name].of if name in file.views and name in file.shapes else name
    return file.offsets.get(name) or file.offsets.get(base) or (0,) * dims


def _regions(file: TensorFile) -> Iterator[tuple[str, Region]]:
    """The region of every tensor. Bare buffers, which only serve as bases of views, are left out."""
    bases = {view.of for view in file.views.values() if is_bare(view.of)}
    for name in (*file.stored, *file.views):
        if name not in bases:
            yield name, file.region(name)


def _joined(name: str, found: list[_FoundPiece]) -> PiecedTensor:
    dtype, shape, first = found[0]
    for other_dtype, other_shape, piece in found:
        if (other_dtype, other_shape) != (dtype, shape) or len(piece.box.offsets) != len(shape):
            raise DamagedError(
                f"the files disagree about {name}: {first.region.where} says {dtype} of shape {list(shape)}, "
                f"{piece.region.where} says {other_dtype} of shape {list(other_shape)}."
            )
    return PiecedTensor(dtype, shape, tuple(piece for *_, piece in found if not piece.box.is_empty))
