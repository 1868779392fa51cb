"""Tensors whose pieces lie in files: where every piece is, and how any box of the whole is read.

All that a sharded format has to tell of a tensor is a `PiecedTensor`. Whoever writes the whole takes it slab by slab,
in the order of its bytes, and never holds more than one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import torch

from ckpt.errors import DamagedError
from ckpt.formats.memory import host_bytes, movable
from ckpt.formats.native import ByteReader

SLAB = 8 << 20  # bytes: small enough to stay in a cache between reading and writing, large enough to be one request
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """Elements of a file that form a box: the byte of the first one, and the steps between them, in elements."""

    reader: ByteReader = field(compare=False, repr=False)
    where: str
    dtype: torch.dtype
    start: int
    sizes: Sizes
    strides: Sizes

    def read_into(self, offsets: Sizes, target: torch.Tensor) -> None:
        """Fill `target` with as many elements from `offsets` on. Holds no more than a slab of memory beside it."""
        steps = sum(offset * stride for offset, stride in zip(offsets, self.strides, strict=True))
        self._fill(self.start + steps * self.dtype.itemsize, target)

    def _fill(self, start: int, target: torch.Tensor) -> None:
        span = _span(target.shape, self.strides)
        dense = _is_dense(target.shape, self.strides)
        if dense and target.is_contiguous():
            self.reader.read_into(start, host_bytes(target))
        elif span * self.dtype.itemsize <= SLAB:
            read = torch.empty(span, dtype=self.dtype)
            self.reader.read_into(start, host_bytes(read))
            movable(target).copy_(movable(read).as_strided(target.shape, self.strides))
        else:
            self._fill_halves(start, target)

    def _fill_halves(self, start: int, target: torch.Tensor) -> None:
        dim = max(range(target.dim()), key=lambda one: (target.shape[one] - 1) * self.strides[one])
        half = target.shape[dim] // 2
        self._fill(start, target.narrow(dim, 0, half))
        later = start + half * self.strides[dim] * self.dtype.itemsize
        self._fill(later, target.narrow(dim, half, target.shape[dim] - half))


def _span(sizes: Sizes, strides: Sizes) -> int:
    """From the first to the last of the elements of a box, both counted."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _is_dense(sizes: Sizes, strides: Sizes) -> bool:
    """Whether the elements lie one after the other, the last index running fastest."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def dense_strides(sizes: Sizes) -> Sizes:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and where its elements lie."""

    offsets: Sizes
    region: Region

    @property
    def sizes(self) -> Sizes:
        return self.region.sizes


@dataclass(frozen=True)
class PiecedTensor:
    """A tensor, and the pieces of it that were saved. None of them is empty."""

    dtype: torch.dtype
    shape: Sizes
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self, offsets: Sizes, sizes: Sizes) -> torch.Tensor:
        """A box of the tensor, in new memory."""
        box = torch.empty(sizes, dtype=self.dtype)
        for piece in self.pieces:
            meeting = _meeting(piece, offsets, sizes)
            if meeting:
                starts, lengths = meeting
                inside = tuple(start - offset for start, offset in zip(starts, offsets, strict=True))
                within = tuple(start - offset for start, offset in zip(starts, piece.offsets, strict=True))
                piece.region.read_into(within, _narrowed(box, inside, lengths))
        return box

    def slabs(self) -> Iterator[torch.Tensor]:
        """The whole in contiguous parts, in the order of its bytes."""
        for offsets, sizes in _slabs(self.shape, max(1, SLAB // self.dtype.itemsize)):
            yield self.read(offsets, sizes)

    def holes(self) -> list[tuple[Sizes, Sizes]]:
        """The boxes (offsets, sizes) that no piece covers."""
        missing = [((0,) * len(self.shape), self.shape)] if self.size else []
        for piece in self.pieces:
            missing = [rest for box in missing for rest in _without(box, piece)]
        return missing


def _meeting(piece: Piece, offsets: Sizes, sizes: Sizes) -> tuple[Sizes, Sizes] | None:
    """The box that a piece and another box share."""
    starts = tuple(map(max, piece.offsets, offsets))
    stops = map(min, _ends(piece.offsets, piece.sizes), _ends(offsets, sizes))
    lengths = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return (starts, lengths) if all(length > 0 for length in lengths) else None


def _ends(offsets: Sizes, sizes: Sizes) -> Iterator[int]:
    return (offset + size for offset, size in zip(offsets, sizes, strict=True))


def _narrowed(tensor: torch.Tensor, offsets: Sizes, sizes: Sizes) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _slabs(shape: Sizes, limit: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Boxes of at most `limit` elements, contiguous and one after the other: ranges of rows, or of parts of a row."""
    if 0 in shape:
        return
    if math.prod(shape) <= limit:
        yield (0,) * len(shape), shape
        return
    dim = next(dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= limit)
    rows = limit // math.prod(shape[dim + 1 :])
    for index in product(*map(range, shape[:dim])):
        for first in range(0, shape[dim], rows):
            offsets = (*index, first, *(0 for _ in shape[dim + 1 :]))
            yield offsets, (*(1 for _ in index), min(rows, shape[dim] - first), *shape[dim + 1 :])


def _without(box: tuple[Sizes, Sizes], piece: Piece) -> Iterator[tuple[Sizes, Sizes]]:
    """What is left of a box outside a piece: for each dimension the slice before it and the slice after it."""
    meeting = _meeting(piece, *box)
    if meeting is None:
        yield box
        return
    offsets, sizes = map(list, box)
    for dim, (start, length) in enumerate(zip(*meeting, strict=True)):
        before, after = start - offsets[dim], offsets[dim] + sizes[dim] - start - length
        for first, count in ((offsets[dim], before), (start + length, after)):
            if count:
                yield _replaced(offsets, dim, first), _replaced(sizes, dim, count)
        offsets[dim], sizes[dim] = start, length


def _replaced(values: list[int], index: int, value: int) -> Sizes:
    return (*values[:index], value, *values[index + 1 :])


def check_complete(tensors: dict[str, PiecedTensor], where: str) -> None:
    """Raise one error that names every tensor of which a part was not saved."""
    found = {name: holes for name, tensor in tensors.items() if (holes := tensor.holes())}
    if found:
        listed = "; ".join(
            f"{name} {list(tensors[name].shape)} lacks {_spelled(*holes[0])}" for name, holes in found.items()
        )
        raise DamagedError(f"{where} is incomplete: {listed}. Is the file of a rank missing, or was its save cut off?")


def _spelled(offsets: Sizes, sizes: Sizes) -> str:
    """`[0:4, 8:16]`, as one would index it."""
    ranges = (f"{offset}:{offset + size}" for offset, size in zip(offsets, sizes, strict=True))
    return f"[{', '.join(ranges)}]"
