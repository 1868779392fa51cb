"""Copies of tensors into a snapshot: on the host in several threads, from a device in few large transfers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from ckpt.formats.tensor_bytes import is_dense, is_plain, movable
from ckpt.save.pinned_pool import CHUNK

_PART = 8 << 20  # bytes that a thread copies at a time
_SMALL, _PACKED = 1 << 20, 16 << 20  # bytes: tensors up to the first are packed, into runs of about the second

_Part = tuple[int, int, int]  # target address, source address, number of bytes


class TensorCopy(NamedTuple):
    """A tensor to copy, and the offset in the snapshot that it is copied to."""

    path: str
    key: str
    source: torch.Tensor
    start: int

    @property
    def name(self) -> str:
        return f"{self.path}: {self.key}"

    @property
    def stop(self) -> int:
        return self.start + self.source.nbytes


def copy_on_host(copies: list[TensorCopy], memory: torch.Tensor) -> None:
    """Copy in several threads, which release the interpreter's lock."""
    base = memory.data_ptr()
    parts = []
    for copy in copies:
        if is_plain(copy.source):
            target, source, length = base + copy.start, copy.source.data_ptr(), copy.source.nbytes
            parts += [(target + b, source + b, min(_PART, length - b)) for b in range(0, length, _PART)]
        else:
            send(copy, StagingViews(memory))
    shares = _shares(parts)
    if len(shares) < 2:
        _copy_parts(parts)
        return
    with ThreadPoolExecutor(max(1, torch.get_num_threads()), thread_name_prefix="ckpt-copy") as pool:
        try:
            list(pool.map(_copy_parts, shares))
        except RuntimeError:  # at interpreter shutdown executors refuse work
            _copy_parts(parts)


def _shares(parts: list[_Part]) -> list[list[_Part]]:
    """Parts in groups that are large enough for a thread each."""
    shares: list[list[_Part]] = []
    room = 0
    for part in parts:
        if room <= 0:
            shares.append([])
            room = _PART
        shares[-1].append(part)
        room -= part[2]
    return shares


def _copy_parts(parts: list[_Part]) -> None:
    for part in parts:
        ctypes.memmove(*part)


class StagingViews:
    """Views of a snapshot's memory as the tensors that are copied into it.

    Each is created once and reused: training waits while they are created.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._views: dict[tuple[int, torch.dtype, torch.Size], torch.Tensor] = {}

    def put(self, copy: TensorCopy, source: torch.Tensor) -> None:
        """Enqueue the copy of `source`, which has the values of the copy's tensor, to its place."""
        key = copy.start, source.dtype, source.shape
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self.memory[copy.start : copy.stop].view(source.dtype).view(source.shape)
        view.copy_(source, non_blocking=True)


def send_all(copies: list[TensorCopy], views: StagingViews) -> None:
    """Enqueue copies from a device. Small neighbours are packed: the queue of a device is short."""
    run: list[TensorCopy] = []
    for copy in copies:
        if run and (copy.start != run[-1].stop or run[-1].stop - run[0].start > _PACKED):
            _send_run(run, views)
            run = []
        size = copy.source.nbytes
        if size > _SMALL:
            _send_run(run, views)
            send(copy, views)
            run = []
        elif size:
            run.append(copy)
    _send_run(run, views)


def _send_run(run: list[TensorCopy], views: StagingViews) -> None:
    if len(run) < 2:
        for copy in run:
            send(copy, views)
        return
    send(TensorCopy("", "", _packed([copy.source for copy in run]), run[0].start), views)


def _packed(sources: list[torch.Tensor]) -> torch.Tensor:
    """Tensors one after the other, in the file's byte order."""
    dtype = sources[0].dtype
    if dtype.itemsize > 1 and all(source.dtype == dtype and is_dense(source) for source in sources):
        return torch.cat([source.view(-1) for source in sources])
    return torch.cat([_flat_bytes(source) for source in sources])


def _flat_bytes(source: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in the file's order."""
    if not is_dense(source):
        source = movable(source.resolve_conj().resolve_neg()).contiguous()
    return source.view(-1).view(torch.uint8)


def send(copy: TensorCopy, views: StagingViews) -> None:
    """Enqueue a copy. Across chunks that were pinned separately it is split: one transfer must not span two of them."""
    if not copy.source.nbytes:
        return
    if copy.start // CHUNK == (copy.stop - 1) // CHUNK:
        views.put(copy, movable(copy.source))
        return
    flat = _flat_bytes(copy.source)
    for begin, stop in _within_chunks(copy.start, copy.stop):
        views.memory[begin:stop].copy_(flat[begin - copy.start : stop - copy.start], non_blocking=True)


def _within_chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """A range of the memory, cut at the boundaries of chunks."""
    while start < stop:
        end = min(stop, (start // CHUNK + 1) * CHUNK)
        yield start, end
        start = end
