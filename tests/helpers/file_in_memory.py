"""A file in memory, read as `TensorFile` reads one."""

from __future__ import annotations


class FileInMemory:
    """Bytes that are read by position."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, start: int, stop: int) -> bytes:
        return self.data[start:stop]

    def read_into(self, start: int, *buffers: memoryview) -> None:
        for buffer in buffers:
            buffer[:] = self.data[start : start + len(buffer)]
            start += len(buffer)
