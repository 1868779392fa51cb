"""Where every byte of a snapshot goes: the files one after the other in one image, each from a page boundary.

The image is the files themselves: what lies in it is hashed and written as it is. A snapshot for which host memory has
no room has no image; its files are made of the same bytes while they are written.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

import torch

from ckpt.formats.tensors import FilePlan, host_bytes
from ckpt.save.snapshot import devices
from ckpt.save.snapshot.fetch import Arrival, Fetcher, Transfer
from ckpt.save.snapshot.host_memory import Image
from ckpt.save.snapshot.tensor_copies import TensorCopies, TensorCopy, copy_on_host, flat_bytes

PAGE = mmap.PAGESIZE
_SMALL = 1 << 20  # bytes

_Placed = tuple[int, memoryview]  # with the place of the first byte


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
        on_host = [copy for copy in copies if devices.is_on_host(copy.source)]
        on_device = [copy for copy in copies if not devices.is_on_host(copy.source)]
        return cls(files, starts, size, headers, on_host, on_device)

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """The path, the start and the size of every file."""
        return [(file.path, start, file.size) for file, start in zip(self.files, self.starts, strict=True)]

    @property
    def host_size(self) -> int:
        """Bytes of tensors on the host."""
        return sum(copy.source.nbytes for copy in self.on_host)

    @property
    def device_sizes(self) -> dict[torch.device, int]:
        """Bytes of tensors on each device."""
        sizes: dict[torch.device, int] = {}
        for copy in self.on_device:
            sizes[copy.source.device] = sizes.get(copy.source.device, 0) + copy.source.nbytes
        return sizes

    def with_copies(self, copies: TensorCopies) -> SnapshotLayout:
        """The same with copies in place of tensors on devices; those that have none are live."""
        found = [(copy, copies.bytes_of(copy.source)) for copy in self.on_device]
        placed = [copy._replace(is_live=True) if flat is None else copy._replace(source=flat) for copy, flat in found]
        return replace(self, on_device=placed)

    def contents_on(self, device: torch.device) -> dict[str, list[bytes | torch.Tensor]]:
        """The contents of files, in order: flat bytes on the device, and on the host headers and a few small tensors.

        Without files of which more is elsewhere, or can be changed by training.
        """
        placed: dict[str, list[tuple[int, bytes | torch.Tensor]]] = {}
        for path, start, header in self.headers:
            placed.setdefault(path, []).append((start, header))
        others = {copy.file for copy in self.on_device if copy.is_live or copy.source.device != device}
        host_sizes: dict[str, int] = {}
        for path, source, start, _ in self.on_host:
            host_sizes[path] = host_sizes.get(path, 0) + source.nbytes
            if host_sizes[path] <= _SMALL:
                placed.setdefault(path, []).append((start, bytes(host_bytes(flat_bytes(source)))))
        others |= {path for path, size in host_sizes.items() if size > _SMALL}
        paths = {copy.file for copy in self.on_device} - others
        for path, source, start, _ in self.on_device:
            if path in paths:
                placed.setdefault(path, []).append((start, flat_bytes(source)))
        return {path: [content for _, content in sorted(placed[path], key=itemgetter(0))] for path in paths}

    def fill(self, image: Image) -> None:
        """Copy headers and host tensors to their places."""
        memory = image.bytes(self.size)
        ranges = [(start, len(header)) for _, start, header in self.headers]
        for start, size in (*ranges, *((copy.start, copy.source.nbytes) for copy in self.on_host)):
            image.make_resident(start, size)
        for _, start, header in self.headers:
            host_bytes(memory[start : start + len(header)])[:] = header
        copy_on_host(self.on_host, memory)

    def files_in(self, image: Image, arrival: Arrival) -> dict[str, FilePlan]:
        """The files as they lie in an image, by path. Their bytes are waited for when they are read."""
        memory = image.bytes(self.size)
        placed = zip(self.files, self.starts, strict=True)
        files = {file.path: _in_memory(file, memory, start, arrival) for file, start in placed}
        return files | {path: replace(files[path], reserved=file) for path, file in image.files.items()}

    def streamed(self, transfers: list[Transfer], fetcher: Fetcher) -> dict[str, FilePlan]:
        """The files without an image, by path: what is on devices is fetched as they are written, or read otherwise.

        Tensors on the host are copied now; those on devices must have been.
        """
        on_host: dict[str, list[_Placed]] = {file.path: [] for file in self.files}
        on_device: dict[str, list[Transfer]] = {file.path: [] for file in self.files}
        for path, start, header in self.headers:
            on_host[path].append((start, memoryview(header)))
        for path, source, start, _ in self.on_host:
            on_host[path].append((start, host_bytes(flat_bytes(source).clone())))
        for transfer in transfers:
            on_device[transfer.file].append(transfer)
        for placed in on_host.values():
            placed.sort(key=lambda placed: placed[0])
        return {file.path: _streamed(file, on_host[file.path], on_device[file.path], fetcher) for file in self.files}


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


def _in_memory(file: FilePlan, memory: torch.Tensor, start: int, arrival: Arrival) -> FilePlan:
    view = host_bytes(memory[start : start + file.size])

    def pieces() -> Iterator[memoryview]:
        return arrival.pieces(view, start, file.head)

    return replace(file, pieces=pieces, contents=None, in_memory=True)


def _streamed(file: FilePlan, on_host: list[_Placed], on_device: list[Transfer], fetcher: Fetcher) -> FilePlan:
    def pieces() -> Iterator[memoryview]:
        left = deque(on_host)
        for transfer, data in fetcher.stream(on_device):
            for offset, start, size in transfer.runs:
                while left and left[0][0] < start:
                    yield left.popleft()[1]
                yield data[offset : offset + size]
        yield from (view for _, view in left)

    return replace(file, pieces=pieces, contents=None, in_memory=False)
