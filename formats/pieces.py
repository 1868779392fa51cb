"""Tensors whose pieces lie in files: the place of every piece, and reading any box of the full tensor.

A sharded format describes each tensor as a `PiecedTensor`. Writers stream it slab by slab, in the order of its bytes,
and hold one slab in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ckpt.errors import DamagedError
from ckpt.formats.checks import Sizes, is_dense, reach, widest
from ckpt.formats.layout import Box, Fault, find_fault, part_of_box
from ckpt.formats.tensors import ByteReader, Transfer, Want, at_once, copy_into, narrowed
from ckpt.formats.tensors import is_dense as is_dense_tensor

SLAB = 8 << 20  # bytes: fits a CPU cache between reading and writing, and is large enough for one request


@dataclass(frozen=True)
class Region:
    """A strided tensor in a file: the byte of its first element, its sizes and its strides in elements."""

    reader: ByteReader = field(compare=False, repr=False)
    where: str
    dtype: torch.dtype
    start: int
    sizes: Sizes
    strides: Sizes

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor in memory."""
        return math.prod(self.sizes) * self.dtype.itemsize

    def read_into(self, offsets: Sizes, target: torch.Tensor) -> None:
        """Fill `target` with the box of its shape that begins at `offsets`. Uses at most `SLAB` bytes of memory."""
        self.fill(offsets, target, at_once)

    def fill(self, offsets: Sizes, target: torch.Tensor, want: Want) -> None:
        """Ask `want` for the bytes of that box. Another dtype is cast; the target needs no gradient.

        What is contiguous in the file and in the target is read in place, anything else through buffers of at most
        `SLAB` bytes, each from the first to the last element of its part.
        """
        steps = sum(offset * stride for offset, stride in zip(offsets, self.strides, strict=True))
        self._fill(self.start + steps * self.dtype.itemsize, target, want)

    def _fill(self, start: int, target: torch.Tensor, want: Want) -> None:
        size = reach(target.shape, self.strides) * self.dtype.itemsize
        if not size:
            return
        if target.dtype == self.dtype and is_dense(target.shape, self.strides) and is_dense_tensor(target):
            want(Transfer(self.reader, start, size, into=target))
        elif size <= SLAB:
            want(Transfer(self.reader, start, size, take=lambda data: self._copy(data, target)))
        else:
            dim = widest(target.shape, self.strides)
            half = target.shape[dim] // 2
            self._fill(start, target.narrow(dim, 0, half), want)
            later = start + half * self.strides[dim] * self.dtype.itemsize
            self._fill(later, target.narrow(dim, half, target.shape[dim] - half), want)

    def _copy(self, data: torch.Tensor, target: torch.Tensor) -> None:
        copy_into(data.view(self.dtype).as_strided(target.shape, self.strides), target)


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the region of a file that holds it."""

    box: Box
    region: Region


@dataclass(frozen=True)
class PiecedTensor:
    """A tensor and its saved pieces, none of which is empty."""

    dtype: torch.dtype
    shape: Sizes
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def box(self) -> Box:
        """The box that is the full tensor."""
        return Box((0,) * len(self.shape), self.shape)

    def read(self, box: Box) -> torch.Tensor:
        """A box of the tensor, in new memory."""
        target = torch.empty(box.sizes, dtype=self.dtype)
        for piece in self.pieces:
            overlap = piece.box.overlap(box)
            if overlap is not None:
                into = narrowed(target, [(start, length) for _, start, length in overlap])
                piece.region.read_into(tuple(start for start, _, _ in overlap), into)
        return target

    def slabs(self) -> Iterator[torch.Tensor]:
        """The full tensor in contiguous parts, in the order of its bytes."""
        return map(self.read, self.boxes(SLAB // self.dtype.itemsize))

    def boxes(self, limit: int) -> Iterator[Box]:
        """The full tensor in boxes of at most `limit` elements, in the order of its bytes."""
        return _slabs(self.box, max(1, limit))

    def fault(self) -> Fault | None:
        """The first part of the tensor that no piece covers, or several: data that is missing, or ambiguous.

        Copies of a piece count once.
        """
        return find_fault({piece.box for piece in self.pieces}, self.box)


def _slabs(box: Box, limit: int) -> Iterator[Box]:
    """Consecutive contiguous boxes of at most `limit` elements: ranges of rows, or of parts of a row."""
    if math.prod(box.sizes) <= limit:
        if not box.is_empty:
            yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    rows = max(1, limit // math.prod(box.sizes[dim + 1 :]))
    for first in range(0, box.sizes[dim], rows):
        yield from _slabs(part_of_box(box, dim, first, min(rows, box.sizes[dim] - first)), limit)


def check_complete(tensors: dict[str, PiecedTensor], where: str) -> None:
    """Raise one error that names every tensor that lacks something, or has it twice."""
    found = {name: fault for name, tensor in tensors.items() if (fault := tensor.fault())}
    if found:
        listed = "; ".join(f"{name} {list(tensors[name].shape)} {fault}" for name, fault in found.items())
        raise DamagedError(f"{where} is incomplete: {listed}. Is a rank's file missing, or was the save interrupted?")
