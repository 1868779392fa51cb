"""Where every byte of a snapshot goes: the files one after the other in one buffer, each from a page boundary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ckpt.formats.state import FilePlan
from ckpt.formats.tensor_bytes import host_bytes
from ckpt.save.staging_copy import TensorCopy, copy_on_host

_PAGE = 4096


def in_pages(sizes: Iterable[int]) -> int:
    """Bytes that these take together, each rounded up to whole pages."""
    return sum(-(-size // _PAGE) * _PAGE for size in sizes)


@dataclass(frozen=True)
class SnapshotLayout:
    """The files, where each starts, and what is copied into them: header bytes, and tensors on the host or a device."""

    files: list[FilePlan]
    starts: list[int]
    size: int
    headers: list[tuple[int, bytes]]
    on_host: list[TensorCopy]
    on_device: list[TensorCopy]

    @classmethod
    def of(cls, files: list[FilePlan]) -> SnapshotLayout:
        starts, size = [], 0
        for file in files:
            starts.append(size)
            size += in_pages([file.size])
        copies, headers = _copies(files, starts)
        on_host = [copy for copy in copies if copy.source.is_cpu]
        on_device = [copy for copy in copies if not copy.source.is_cpu]
        return cls(files, starts, size, headers, on_host, on_device)

    @property
    def device(self) -> torch.device | None:
        return self.on_device[0].source.device if self.on_device else None

    def fill(self, memory: torch.Tensor) -> dict[str, FilePlan]:
        """Copy headers and host tensors, and return the files as they lie in memory, by path."""
        for start, header in self.headers:
            host_bytes(memory[start : start + len(header)])[:] = header
        copy_on_host(self.on_host, memory)
        placed = zip(self.files, self.starts, strict=True)
        return {file.path: _in_memory(file, memory, start) for file, start in placed}


def _copies(files: list[FilePlan], starts: list[int]) -> tuple[list[TensorCopy], list[tuple[int, bytes]]]:
    """Every tensor and every other byte of the files, with its place in memory."""
    copies, headers = [], []
    for file, start in zip(files, starts, strict=True):
        for content in file.contents or ():
            if isinstance(content, bytes):
                headers.append((start, content))
                start += len(content)
            else:
                name, tensor = content
                copies.append(TensorCopy(file.path, name, tensor, start))
                start += tensor.nbytes
    return copies, headers


def _in_memory(file: FilePlan, memory: torch.Tensor, start: int) -> FilePlan:
    view = host_bytes(memory[start : start + file.size])
    return FilePlan(file.path, file.size, lambda: iter((view,)), file.likely_unchanged, in_memory=True, head=file.head)
