"""Where ZeRO keeps the elements of each parameter: flat partitions without names, one set of them for each rank.

Stages 1 and 2 put all parameters of a group one behind the other, and give each rank an equal part of that. Stage 3
divides every parameter by itself: each rank has as many of its elements as the others, and the last ones are padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ckpt.formats.foreign.joined_reader import JoinedReader, Stretch
from ckpt.formats.layout import Box
from ckpt.formats.pieces import Piece, PiecedTensor, Region
from ckpt.formats.strides import Sizes, dense_strides

Shapes = Mapping[str, Sizes]  # of the parameters in a group, in their order
Paddings = Sequence[Sequence[int]]  # elements behind each parameter, by group


@dataclass(frozen=True)
class Flat:
    """Elements in a row, in one file or several."""

    reader: JoinedReader
    dtype: torch.dtype

    @classmethod
    def joined(cls, tensors: Sequence[PiecedTensor]) -> Flat:
        """Flat tensors one behind the other."""
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1 or any(len(tensor.shape) != 1 for tensor in tensors):
            raise ValueError("its partitions are not flat, or not of one dtype")
        regions = [piece.region for tensor in tensors for piece in tensor.pieces]
        if any(region.strides != (1,) for region in regions):
            raise ValueError("its partitions are not contiguous")
        stretches = (Stretch(region.reader, region.start, region.nbytes) for region in regions)
        return cls(JoinedReader(stretches), dtypes.pop() if dtypes else torch.float32)

    @property
    def count(self) -> int:
        return self.reader.length // self.dtype.itemsize

    def stretch(self, start: int, count: int) -> Stretch:
        """The bytes of some elements."""
        return Stretch(self.reader, start * self.dtype.itemsize, count * self.dtype.itemsize)


def tensor_at(reader: JoinedReader, where: str, dtype: torch.dtype, start: int, shape: Sizes) -> PiecedTensor:
    """The tensor whose elements follow each other from a byte on. `where` and that byte tell it from others."""
    region = Region(reader, where, dtype, start, shape, dense_strides(shape))
    whole = Box((0,) * len(shape), shape)
    return PiecedTensor(dtype, shape, () if whole.is_empty else (Piece(whole, region),))


def share_of(count: int, world_size: int) -> int:
    """The elements that each rank has of a parameter under ZeRO 3, with padding."""
    return -(-count // world_size)


def by_group(
    groups: Sequence[Shapes], ranks: Sequence[Sequence[PiecedTensor]], paddings: Paddings | None, where: str
) -> Iterator[tuple[str, PiecedTensor]]:
    """The parameters under ZeRO 1 and 2. `ranks` has the partitions of each rank, by group."""
    for number, shapes in enumerate(groups):
        flat = Flat.joined([partitions[number] for partitions in ranks])
        behind = paddings[number] if paddings is not None else [0] * len(shapes)
        start = stop = 0
        for (name, shape), padding in zip(shapes.items(), behind, strict=True):
            first, stop = start, start + math.prod(shape)
            start = stop + padding
            at = first * flat.dtype.itemsize
            yield name, tensor_at(flat.reader, f"{where}: group {number}", flat.dtype, at, shape)
        if stop > flat.count or _aligned(start, len(ranks)) != _aligned(flat.count, len(ranks)):
            raise ValueError(f"group {number} has {flat.count} elements, and its parameters {start}")


def _aligned(count: int, world_size: int) -> int:
    """Groups are padded so that every rank has an even number of elements, and the last one may leave that out."""
    return share_of(count, 2 * world_size) * 2 * world_size


def by_parameter(
    groups: Sequence[Shapes], ranks: Sequence[Sequence[PiecedTensor]], where: str
) -> Iterator[tuple[str, PiecedTensor]]:
    """The parameters under ZeRO 3. `ranks` has the partitions of each rank, which together are its shares."""
    flats = [Flat.joined(partitions) for partitions in ranks]
    shares = [share_of(math.prod(shape), len(ranks)) for shapes in groups for shape in shapes.values()]
    if {flat.count for flat in flats} != {sum(shares)} or len({flat.dtype for flat in flats}) > 1:
        raise ValueError(f"ranks have {[flat.count for flat in flats]} elements, and their shares are {sum(shares)}")
    start = 0
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        yield name, from_shares(flats, start, shape, f"{where}: {name}")
        start += share_of(math.prod(shape), len(ranks))


def from_shares(flats: Sequence[Flat], start: int, shape: Sizes, where: str) -> PiecedTensor:
    """A parameter of which every rank has a share, from an element of its row on. The padding is left out."""
    count = math.prod(shape)
    share = share_of(count, len(flats))
    held = (max(0, min(share, count - rank * share)) for rank in range(len(flats)))
    reader = JoinedReader(flat.stretch(start, length) for flat, length in zip(flats, held, strict=True))
    return tensor_at(reader, where, flats[0].dtype, 0, shape)
