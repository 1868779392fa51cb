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
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import DamagedError
from ckpt.formats.layout import Box
from ckpt.formats.native import dtypes
from ckpt.formats.native.header import Header, sizes, understood
from ckpt.formats.native.shared_storage import View
from ckpt.formats.tensor_bytes import copy_into, is_dense, narrowed
from ckpt.formats.transfers import ByteReader, Transfer, Want, at_once

_WINDOW = 8 << 20


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
