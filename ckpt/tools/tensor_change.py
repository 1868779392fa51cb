"""How far two tensors of one shape are apart: element by element, in bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ckpt.formats.pieces import SLAB, PiecedTensor
from ckpt.formats.tensor_bytes import host_bytes


@dataclass(slots=True)
class Squares:
    """Sums of squares: of the differences between two tensors, and of the elements of the first."""

    difference: float = 0.0
    first: float = 0.0

    @property
    def relative(self) -> float:
        """RMS of the difference over RMS of the first: 0.01 is a change by 1 %. Infinite where the first was all zeros,
        NaN where an element is not finite."""
        if not math.isfinite(self.difference):
            return math.nan
        if self.difference == 0:
            return 0.0
        return math.sqrt(self.difference / self.first) if self.first else math.inf

    def __add__(self, other: Squares) -> Squares:
        return Squares(self.difference + other.difference, self.first + other.first)


@dataclass
class TensorChange:
    """How many elements differ, the largest difference, and the squares. NaN where an element is no number."""

    elements: int = 0
    most: float = 0.0
    squares: Squares | None = None


def compare_tensors(first: PiecedTensor, second: PiecedTensor) -> TensorChange:
    """Compare two tensors of the same shape, a slab at a time."""
    found = TensorChange(squares=Squares())
    for box in first.boxes(SLAB // max(first.dtype.itemsize, second.dtype.itemsize)):
        slab = _compare_slabs(first.read(box), second.read(box))
        found.elements += slab.elements
        found.most = slab.most if math.isnan(slab.most) else max(found.most, slab.most)
        found.squares = found.squares + slab.squares if found.squares and slab.squares else None
    return found


def squares_between(first: PiecedTensor, second: PiecedTensor) -> Squares:
    """Only the squares: for tensors of the same shape. NaN for dtypes that torch has no arithmetic for."""
    found = Squares()
    for box in first.boxes(SLAB // max(first.dtype.itemsize, second.dtype.itemsize)):
        try:
            mine, theirs = _numbers(first.read(box)), _numbers(second.read(box))
        except (RuntimeError, NotImplementedError):
            return Squares(math.nan, math.nan)
        found += Squares(_square_sum(mine - theirs), _square_sum(mine))
    return found


def _compare_slabs(first: torch.Tensor, second: torch.Tensor) -> TensorChange:
    """Elements differ bitwise where the dtypes are the same; otherwise by their numbers."""
    differs = _bits_differ(first, second) if first.dtype == second.dtype else None
    try:
        mine, theirs = _numbers(first), _numbers(second)
        if differs is not None and not differs.any():
            return TensorChange(squares=Squares(0.0, _square_sum(mine)))
        distances = _distances(mine, theirs)
    except (RuntimeError, NotImplementedError):  # a dtype that torch has no arithmetic for
        count = first.numel() if differs is None else int(differs.sum())
        return TensorChange(count, math.nan if count else 0.0)
    if differs is None:
        differs = distances != 0
    squares = Squares(_square_sum(distances), _square_sum(mine))
    return TensorChange(int(differs.sum()), float(distances.max()), squares)


def _bits_differ(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """By element, whether its bits differ."""
    bits = [torch.frombuffer(host_bytes(tensor), dtype=torch.uint8) for tensor in (first, second)]
    if torch.equal(*bits):
        return torch.zeros(first.numel(), dtype=torch.bool)
    return (bits[0] != bits[1]).view(-1, first.dtype.itemsize).any(1)


def _distances(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    distances = (mine - theirs).abs()
    distances[mine == theirs] = 0.0  # infinities
    distances[mine.isnan() & theirs.isnan()] = 0.0
    return distances


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).to(torch.complex128 if tensor.is_complex() else torch.float64)


def _square_sum(numbers: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(numbers) ** 2) if numbers.numel() else 0.0
