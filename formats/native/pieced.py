"""The tensors of safetensors files as `PiecedTensor`s, put together over all the files of a part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch

from ckpt.errors import DamagedError
from ckpt.formats.layout import Box
from ckpt.formats.native.header import is_bare
from ckpt.formats.native.tensor_file import TensorFile
from ckpt.formats.pieces import Piece, PiecedTensor, Region
from ckpt.formats.strides import Sizes, dense_strides

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
    for name, entry in file.stored.items():
        if name not in bases:
            strides = dense_strides(entry.shape)
            yield name, Region(file.reader, file.where, entry.dtype, entry.start, entry.shape, strides)
    for name, view in file.views.items():
        start = file.stored[view.of].start + view.start
        yield name, Region(file.reader, file.where, view.dtype, start, view.shape, view.stride)


def _joined(name: str, found: list[_FoundPiece]) -> PiecedTensor:
    dtype, shape, first = found[0]
    for other_dtype, other_shape, piece in found:
        if (other_dtype, other_shape) != (dtype, shape) or len(piece.box.offsets) != len(shape):
            raise DamagedError(
                f"the files disagree about {name}: {first.region.where} says {dtype} of shape {list(shape)}, "
                f"{piece.region.where} says {other_dtype} of shape {list(other_shape)}."
            )
    return PiecedTensor(dtype, shape, tuple(piece for *_, piece in found if not piece.box.is_empty))
