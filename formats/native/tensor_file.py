"""Reading safetensors files: any tensor, or any box of one, into any memory. `tensor_file_plan.py` writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import DamagedError
from ckpt.formats.layout import Box
from ckpt.formats.native import dtypes
from ckpt.formats.native.header import Header, damage_reported, sizes
from ckpt.formats.native.shared_storage import View
from ckpt.formats.tensor_bytes import copy_into, is_dense, narrowed
from ckpt.formats.transfers import ByteReader, Transfer, Want, at_once

_WINDOW = 8 << 20  # bytes that pass through memory at a time where a tensor cannot be read in place


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
    def open(cls, reader: ByteReader, where: str, want: Want = at_once) -> TensorFile:
        file = cls(reader, where, want)
        with damage_reported(where):
            file._read_header()
        return file

    def __contains__(self, name: str) -> bool:
        return name in self.stored or name in self.views

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
        """Fill `target`, which is the given box of the tensor and needs no gradient.

        A box of whole rows in the target's dtype is read in place. Otherwise the rows that contain the box are read
        through a buffer, `_WINDOW` bytes at a time.
        """
        if name in self.views:
            self._fill_from_view(self.views[name], target, box)
            return
        entry = self._entry(name)
        row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        start = entry.start + (box.offsets[0] * row if box.offsets else 0)
        if box.sizes[1:] == entry.shape[1:] and entry.dtype == target.dtype and is_dense(target):
            self._want(start, target.nbytes, into=target)
        elif not box.sizes:
            self._read_and_copy(start, (), entry.dtype, [], target)
        else:
            self._fill_by_rows(entry, start, row, target, box)

    def _fill_by_rows(self, entry: TensorEntry, start: int, row: int, target: torch.Tensor, box: Box) -> None:
        """Copy a box out of its rows, which begin at `start` and are `row` bytes long."""
        (_, count), *others = box.ranges
        step = max(1, _WINDOW // max(1, row))
        for begin in range(0, count, step):
            length = min(step, count - begin)
            rows = (length, *entry.shape[1:])
            part = target.narrow(0, begin, length)
            self._read_and_copy(start + begin * row, rows, entry.dtype, [(0, length), *others], part)

    def _fill_from_view(self, view: View, target: torch.Tensor, box: Box) -> None:
        """Read the bytes from the view's first to its last element, and copy the box out of them."""
        reach = 1 + sum((length - 1) * step for length, step in zip(view.shape, view.stride, strict=True))
        size = reach * view.dtype.itemsize if math.prod(view.shape) else 0

        def take(data: torch.Tensor) -> None:
            copy_into(narrowed(data.view(view.dtype).as_strided(view.shape, view.stride), box.ranges), target)

        self._want(self.stored[view.of].start + view.start, size, take=take)

    def _read_and_copy(
        self,
        start: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        inside: list[tuple[int, int]],
        target: torch.Tensor,
    ) -> None:
        """Read a dense tensor, and copy the ranges `inside` it to the target."""

        def take(data: torch.Tensor) -> None:
            copy_into(narrowed(data.view(dtype).view(shape), inside), target)

        self._want(start, math.prod(shape) * dtype.itemsize, take=take)

    def _want(self, start: int, size: int, **where: Any) -> None:
        if size:
            self.want(Transfer(self.reader, start, size, **where))

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self.stored[name]
        except KeyError:
            raise DamagedError(f"{self.where} has no tensor {name!r}, though the checkpoint refers to it.") from None

    def _read_header(self) -> None:
        header = Header.read(self.reader, self.where)
        ours = header.ours
        foreign = {name: dtypes.by_name(dtype) for name, dtype in ours.get("dtypes", {}).items()}
        for name, fields in header.entries.items():
            self.stored[name] = _entry_from_json(fields, header.data, foreign.get(name))
        self.views = {name: _view_from_json(view, self.stored) for name, view in ours.get("views", {}).items()}
        self.shapes = {name: sizes(shape) for name, shape in ours.get("shapes", {}).items()}
        sharding = json.loads(header.metadata.get("DCP_SHARDING_INFO", "{}"))
        self.offsets = {name: sizes(info["saved_offsets"]) for name, info in sharding.items()}


def _entry_from_json(fields: Mapping[str, Any], data: int, foreign: torch.dtype | None) -> TensorEntry:
    """An entry whose data offsets count from byte `data`. `foreign`: the dtype, if safetensors has none for it."""
    dtype = foreign or dtypes.BY_SPELLING[fields["dtype"]]
    shape = sizes(fields["shape"][:-1] if foreign else fields["shape"])
    start, stop = sizes(fields["data_offsets"])
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{stop - start} bytes are no {dtype} of shape {list(shape)}")
    return TensorEntry(dtype, shape, data + start, data + stop)


def _view_from_json(fields: Mapping[str, Any], stored: Mapping[str, TensorEntry]) -> View:
    dtype, base = dtypes.by_name(fields["dtype"]), stored[fields["of"]]
    shape, stride, (start,) = sizes(fields["shape"]), sizes(fields["stride"]), sizes([fields["start"]])
    reach = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    if start % dtype.itemsize or start + reach * dtype.itemsize > base.stop - base.start:
        raise ValueError(f"a view leads out of {fields['of']!r}")
    return View(fields["of"], dtype, shape, stride, start)
