"""ZeRO's partitions of one number of ranks, cut anew for another: which elements go where."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

Lengths = Sequence[int]  # of a rank's flat partitions, by group
Sizes = tuple[int, ...]


class Move(NamedTuple):
    """Elements of a saved partition, and their place in a live one."""

    rank: int  # that saved them
    saved_group: int
    start: int
    group: int
    to: int
    length: int


def moves_by_group(saved: Sequence[Lengths], live: Lengths, rank: int) -> Iterator[Move]:
    """Under ZeRO 1 and 2, where the ranks have consecutive parts of each group, all of the same length but the last."""
    for group, length in enumerate(live):
        start = 0
        for other, lengths in enumerate(saved):
            first, stop = max(start, rank * length), min(start + lengths[group], (rank + 1) * length)
            if first < stop:
                yield Move(other, group, first - start, group, first - rank * length, stop - first)
            start += lengths[group]


def moves_by_parameter(
    counts: Sequence[int], saved: Sequence[Lengths], live: Lengths, rank: int, world_size: int
) -> Iterator[Move]:
    """Under ZeRO 3, where the ranks have equal shares of each parameter, the last one with padding."""
    from_, to = _Row(saved[0]), _Row(live)
    for count in counts:
        before, now = -(-count // len(saved)), -(-count // world_size)
        saved_group, begin = from_.take(before)
        group, target = to.take(now)
        for other in range(len(saved)):
            first = max(other * before, rank * now)
            stop = min((other + 1) * before, (rank + 1) * now, count)
            if first < stop:
                start = begin + first - other * before
                yield Move(other, saved_group, start, group, target + first - rank * now, stop - first)


class _Row:
    """A rank's partitions one behind the other, from which parameters are taken in their order."""

    def __init__(self, lengths: Lengths) -> None:
        self._ends = list(accumulate(lengths))
        self._at = 0

    def take(self, count: int) -> tuple[int, int]:
        """The group of the next elements, and where in it they begin."""
        group = min(bisect_right(self._ends, self._at), len(self._ends) - 1)
        begin = self._at - (self._ends[group - 1] if group else 0)
        self._at += count
        return group, begin


def cut(groups: Sequence[Mapping[str, Sizes]], lengths: Lengths, world_size: int) -> list[dict[str, Sizes]]:
    """The parameters in the groups that partitions of these lengths are: ZeRO 3 makes smaller ones of few ranks."""
    row, found = _Row(lengths), [dict[str, Sizes]() for _ in lengths]
    for name, shape in ((name, shape) for group in groups for name, shape in group.items()):
        number, _ = row.take(-(-math.prod(shape) // world_size))
        found[number][name] = shape
    return found


def moved(moves: Sequence[Move], live: Lengths, tensor: Callable[[int, int], torch.Tensor]) -> list[torch.Tensor]:
    """The live partitions, filled from the saved ones, which `tensor` gives by rank and group. Padding is zero."""
    dtype = tensor(moves[0].rank, moves[0].saved_group).dtype if moves else torch.float32
    targets = [torch.zeros(length, dtype=dtype) for length in live]
    for move in moves:
        piece = tensor(move.rank, move.saved_group).narrow(0, move.start, move.length)
        targets[move.group].narrow(0, move.to, move.length).copy_(piece)
    return targets


def is_flat(value: Any) -> bool:
    """Whether a value has an element for each one of a partition."""
    return hasattr(value, "shape") and len(value.shape) == 1
