"""Files of a snapshot that lies on devices alone, as host memory has no room for it: fetched as they are written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from ckpt.formats.tensors import FilePlan, host_bytes
from ckpt.save.device_fetch import Fetcher
from ckpt.save.device_staging import DeviceBlock
from ckpt.save.snapshot_layout import SnapshotLayout
from ckpt.save.staging_copy import flat_bytes

_Placed = tuple[int, memoryview]  # with the place of the first byte


def streamed_files(layout: SnapshotLayout, blocks: list[DeviceBlock], fetcher: Fetcher) -> dict[str, FilePlan]:
    """The files, by path. Tensors on the host are copied now; those on devices must be staged."""
    on_host: dict[str, list[_Placed]] = {file.path: [] for file in layout.files}
    on_device: dict[str, list[DeviceBlock]] = {file.path: [] for file in layout.files}
    for path, start, header in layout.headers:
        on_host[path].append((start, memoryview(header)))
    for path, source, start in layout.on_host:
        on_host[path].append((start, host_bytes(flat_bytes(source).clone())))
    for block in blocks:
        on_device[block.file].append(block)
    for placed in on_host.values():
        placed.sort(key=_place)
    return {file.path: _streamed(file, on_host[file.path], on_device[file.path], fetcher) for file in layout.files}


def _place(placed: _Placed) -> int:
    return placed[0]


def _streamed(file: FilePlan, on_host: list[_Placed], on_device: list[DeviceBlock], fetcher: Fetcher) -> FilePlan:
    def pieces() -> Iterator[memoryview]:
        left = deque(on_host)
        for transfer, data in fetcher.stream(on_device):
            for offset, start, size in transfer.runs:
                while left and left[0][0] < start:
                    yield left.popleft()[1]
                yield data[offset : offset + size]
        yield from (view for _, view in left)

    return replace(file, pieces=pieces, contents=None, in_memory=False)
