"""Whether boxes are a tensor: every element in exactly one of them. Takes time in proportion to their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckpt.formats.layout import Box

_DEEPEST = 16  # cuts across cuts: a mesh has as many as a tensor has dimensions


class Fault(NamedTuple):
    """What is wrong with the boxes of a tensor, and where."""

    what: str
    box: Box

    def __str__(self) -> str:
        ranges = (f"{offset}:{offset + size}" for offset, size in zip(self.box.offsets, self.box.sizes, strict=False))
        return f"{self.what} [{', '.join(ranges)}]"


def find_fault(boxes: Iterable[Box], whole: Box) -> Fault | None:
    """The first part of a tensor that is in no box or in several, or the first box that leads out; None if all is well.

    Boxes that interlock, so that no cut divides them, count as overlapping: no mesh of ranks gives such.
    """
    filled = [box for box in boxes if not box.is_empty]
    outside = next((box for box in filled if not _is_inside(box, whole)), None)
    return Fault("has a piece outside it,", outside) if outside else _fault(filled, whole, 0)


def _is_inside(box: Box, whole: Box) -> bool:
    if not len(box.offsets) == len(box.sizes) == len(whole.offsets):
        return False
    spans = zip(box.ranges, whole.ranges, strict=True)
    return all(first <= start and start + size <= first + length for (start, size), (first, length) in spans)


def _fault(boxes: list[Box], whole: Box, depth: int) -> Fault | None:
    if not boxes:
        return None if whole.is_empty else Fault("lacks", whole)
    if depth < _DEEPEST:
        for dim in range(len(whole.offsets)):
            layers = list(_layers(boxes, dim))
            if len(layers) > 1 or (layers[0][1], layers[0][2]) != whole.ranges[dim]:
                return _fault_in_layers(layers, whole, dim, depth)
    return None if boxes == [whole] else Fault("has several pieces at", whole)


_Layer = tuple[list[Box], int, int]  # boxes that lie between two cuts across a dimension: start and length of that


def _layers(boxes: list[Box], dim: int) -> Iterator[_Layer]:
    """The boxes between cuts across a dimension that go through none of them."""
    layer: list[Box] = []
    start = stop = 0
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        offset, size = box.ranges[dim]
        if layer and offset >= stop:
            yield layer, start, stop - start
            layer = []
        if not layer:
            start = stop = offset
        layer.append(box)
        stop = max(stop, offset + size)
    yield layer, start, stop - start


def _fault_in_layers(layers: list[_Layer], whole: Box, dim: int, depth: int) -> Fault | None:
    first, length = whole.ranges[dim]
    at = first
    for boxes, start, thickness in layers:
        if start > at:
            return Fault("lacks", part_of_box(whole, dim, at - first, start - at))
        fault = _fault(boxes, part_of_box(whole, dim, start - first, thickness), depth + 1)
        if fault:
            return fault
        at = start + thickness
    rest = first + length - at
    return Fault("lacks", part_of_box(whole, dim, at - first, rest)) if rest else None


def part_of_box(box: Box, dim: int, start: int, length: int) -> Box:
    """The part of a box within a range of one dimension. `start` counts from the beginning of the box."""
    offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
    return Box(offsets, (*box.sizes[:dim], length, *box.sizes[dim + 1 :]))
