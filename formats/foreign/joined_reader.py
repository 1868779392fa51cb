"""Stretches of files, one after the other, read as if they were one file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from ckpt.formats.transfers import ByteReader


class Stretch(NamedTuple):
    """Consecutive bytes of a file."""

    reader: ByteReader
    start: int
    length: int


class JoinedReader:
    """The bytes of several stretches in their order. It has their readers, and none of their bytes."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self._stretches = [stretch for stretch in stretches if stretch.length]
        self._ends = list(accumulate(stretch.length for stretch in self._stretches))

    @property
    def length(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> bytes:
        found = bytearray(max(0, min(stop, self.length) - start))
        self.read_into(start, memoryview(found))
        return bytes(found)

    def read_into(self, start: int, *buffers: memoryview) -> None:
        for buffer in buffers:
            self._fill(start, buffer)
            start += len(buffer)

    def _fill(self, start: int, buffer: memoryview) -> None:
        number = bisect_right(self._ends, start)
        while buffer:
            stretch = self._stretches[number]
            skipped = start - (self._ends[number] - stretch.length)
            count = min(len(buffer), stretch.length - skipped)
            stretch.reader.read_into(stretch.start + skipped, buffer[:count])
            buffer, start, number = buffer[count:], start + count, number + 1
