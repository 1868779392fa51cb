"""Checks of what files claim: the sizes and strides of tensors, and one `DamagedError` for whatever else is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ckpt.errors import CkptError, DamagedError

Sizes = tuple[int, ...]
_Kind = TypeVar("_Kind")

MOST_DIMENSIONS = 64  # torch iterates over no more
_SIZE_LIMIT = 1 << 63
_ELEMENT_LIMIT = _SIZE_LIMIT // 16  # no dtype is longer than 16 bytes
_EXPANSION_LIMIT = 256 << 20  # bytes that all tensors of a file together may have beyond those they are stored in


def of_type(kind: type[_Kind], value: Any) -> _Kind:
    """The value, if it is of that very type: a range in place of a list would become a billion items."""
    if type(value) is not kind:
        raise ValueError(f"expected a {kind.__name__}, found a {type(value).__name__}")
    return value


def checked_sizes(values: Iterable[object]) -> Sizes:
    """Sizes, strides or offsets from a file: a damaged one must not make torch allocate or read at random."""
    listed = []
    for value in values:
        if type(value) is not int or not 0 <= value < _SIZE_LIMIT:
            shown = value if isinstance(value, int | float) else f"a {type(value).__name__}"
            raise ValueError(f"a size or offset can't be {shown}")
        listed.append(value)
    return tuple(listed)


def checked_shape(values: Iterable[object]) -> Sizes:
    """The shape of a tensor from a file. Dimensions of size 0 do not make the others' product harmless to torch."""
    shape = checked_sizes(values)
    if len(shape) > MOST_DIMENSIONS or math.prod(max(1, size) for size in shape) > _ELEMENT_LIMIT:
        raise ValueError(f"a tensor can't have the shape {list(shape)}")
    return shape


def reach(sizes: Sizes, strides: Sizes) -> int:
    """The number of elements from the first to the last one of a strided tensor, inclusive; 0 if it has none."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def is_dense(sizes: Sizes, strides: Sizes) -> bool:
    """Whether the elements are contiguous in row-major order."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def is_permuted(sizes: Sizes, strides: Sizes) -> bool:
    """Whether the elements are contiguous, in row-major order of some order of the dimensions: a transposed tensor."""
    if len(sizes) != len(strides) or 0 in sizes:
        return False
    order = sorted(range(len(sizes)), key=lambda dim: (strides[dim], sizes[dim]), reverse=True)
    return is_dense(tuple(sizes[dim] for dim in order), tuple(strides[dim] for dim in order))


def dense_strides(sizes: Sizes) -> Sizes:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def widest(sizes: Sizes, strides: Sizes) -> int:
    """The dimension along which a strided tensor reaches furthest."""
    return max(range(len(sizes)), key=lambda dim: (sizes[dim] - 1) * strides[dim])


class Expansion:
    """Adds up the bytes that tensors have beyond those they are stored in: strides of 0 make gigabytes of 40 bytes."""

    def __init__(self, limit: int = _EXPANSION_LIMIT) -> None:
        self._left = limit

    def add(self, sizes: Sizes, strides: Sizes, itemsize: int) -> None:
        """Count a tensor. Raises if its elements, and those of the ones before it, overlap too much."""
        self._left -= max(0, math.prod(sizes) - reach(sizes, strides)) * itemsize
        if self._left < 0:
            stored = reach(sizes, strides) * itemsize
            raise ValueError(f"a tensor of shape {list(sizes)} has too few stored bytes: {stored}")


_LONGEST = 300  # characters of a reason: it may quote the file


@contextmanager
def damage_reported(where: str, what: str) -> Iterator[None]:
    """Raise `DamagedError` if the bytes of `where` are not a valid `what`: parsers of hostile bytes raise any error.

    Errors of ckpt's own pass unchanged, those of the storage among them.
    """
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        raise DamagedError(f"{where} is not a valid {what}: {reason(error)}.") from error


def reason(error: Exception) -> str:
    """What an error says, short enough to be shown."""
    text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    text = text.rstrip(".")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
