"""Where every byte of a snapshot goes: the files one after the other in one image, each from a page boundary."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ckpt.formats.tensors import FilePlan, host_bytes
from ckpt.save.arrival import Arrival
from ckpt.save.staging_copy import TensorCopy, copy_on_host

PAGE = mmap.PAGESIZE


def in_pages(sizes: Iterable[int]) -> int:
    """Bytes that these take together, each rounded up to whole pages."""
    return sum(-(-size // PAGE) * PAGE for size in sizes)


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


@dataclass(frozen=True)
class SnapshotLayout:
    """The files, where each starts, and what is copied into them: header bytes, and tensors on the host or a device."""

    files: list[FilePlan]
    starts: list[int]
    size: int
    headers: list[tuple[str, int, bytes]]  # each with its file's path, and its place
    on_host: list[TensorCopy]
    on_device: list[TensorCopy]

    @classmethod
    def of(cls, files: list[FilePlan], alignment: int = PAGE) -> SnapshotLayout:
        starts, size = [], 0
        for file in files:
            starts.append(size)
            size += -(-file.size // alignment) * alignment
        copies, headers = _copies(files, starts)
        on_host = [copy for copy in copies if is_on_host(copy.source)]
        on_device = [copy for copy in copies if not is_on_host(copy.source)]
        return cls(files, starts, size, headers, on_host, on_device)

    @property
    def devices(self) -> set[torch.device]:
        return {copy.source.device for copy in self.on_device}

    @property
    def host_size(self) -> int:
        """Bytes of tensors on the host."""
        return sum(copy.source.nbytes for copy in self.on_host)

    @property
    def device_sizes(self) -> dict[torch.device, int]:
        """Bytes of tensors on each device."""
        sizes = dict.fromkeys(self.devices, 0)
        for copy in self.on_device:
            sizes[copy.source.device] += copy.source.nbytes
        return sizes

    def fill(self, image: torch.Tensor) -> None:
        """Copy headers and host tensors to their places."""
        for _, start, header in self.headers:
            host_bytes(image[start : start + len(header)])[:] = header
        copy_on_host(self.on_host, image)

    def host_ranges(self) -> Iterator[tuple[int, int]]:
        """Where `fill` writes: the place and the size of every header and host tensor."""
        yield from ((start, len(header)) for _, start, header in self.headers)
        yield from ((copy.start, copy.source.nbytes) for copy in self.on_host)

    def files_in(
        self, image: torch.Tensor, arrival: Arrival, reserved: Mapping[str, Any] | None = None
    ) -> dict[str, FilePlan]:
        """The files as they lie in an image, by path. Their bytes are waited for when they are read.

        `reserved`: the files of a storage that parts of the image are.
        """
        placed = zip(self.files, self.starts, strict=True)
        files = {file.path: _in_memory(file, image, start, arrival) for file, start in placed}
        return files | {path: replace(files[path], reserved=file) for path, file in (reserved or {}).items()}


def _copies(files: list[FilePlan], starts: list[int]) -> tuple[list[TensorCopy], list[tuple[str, int, bytes]]]:
    """Every tensor and every other byte of the files, with its place in the image."""
    copies, headers = [], []
    for file, start in zip(files, starts, strict=True):
        for content in file.contents or ():
            if isinstance(content, bytes):
                headers.append((file.path, start, content))
                start += len(content)
            else:
                copies.append(TensorCopy(file.path, content[1], start))
                start += content[1].nbytes
    return copies, headers


def _in_memory(file: FilePlan, image: torch.Tensor, start: int, arrival: Arrival) -> FilePlan:
    view = host_bytes(image[start : start + file.size])

    def pieces() -> Iterator[memoryview]:
        return arrival.pieces(view, start, file.head)

    return replace(file, pieces=pieces, contents=None, in_memory=True)
