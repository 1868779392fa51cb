"""Tensors go to their places in a snapshot: on the host in several threads, from a device in few large copies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from ckpt.formats.tensor_bytes import is_dense, is_plain, movable
from ckpt.save.pinned_pool import PIECE

_PART = 8 << 20  # bytes that one thread copies at a time
_SMALL, _PACKED = 1 << 20, 16 << 20  # bytes: what is packed, and into how much

_Part = tuple[int, int, int]  # where to, where from, how many bytes


class TensorCopy(NamedTuple):
    """A tensor, and the bytes in the snapshot that it is copied to."""

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
    """Copy in several threads, which do not hold the interpreter's lock."""
    base = memory.data_ptr()
    parts = []
    for one in copies:
        if is_plain(one.source):
            at, length = one.source.data_ptr(), one.source.nbytes
            parts += [(base + one.start + b, at + b, min(_PART, length - b)) for b in range(0, length, _PART)]
        else:
            send(one, StagingViews(memory))
    shares = _shared_out(parts)
    if len(shares) < 2:
        _move(parts)
        return
    with ThreadPoolExecutor(max(1, torch.get_num_threads()), thread_name_prefix="ckpt-copy") as pool:
        try:
            list(pool.map(_move, shares))
        except RuntimeError:  # the program ends: executors take no work any more
            _move(parts)


def _shared_out(parts: list[_Part]) -> list[list[_Part]]:
    """Small parts together, until they are worth a thread's attention."""
    shares: list[list[_Part]] = []
    room = 0
    for part in parts:
        if room <= 0:
            shares.append([])
            room = _PART
        shares[-1].append(part)
        room -= part[2]
    return shares


def _move(parts: list[_Part]) -> None:
    for part in parts:
        ctypes.memmove(*part)


class StagingViews:
    """Memory of a snapshot, seen as the tensors that are copied into it. Each is made once: training waits for it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._made: dict[Any, torch.Tensor] = {}

    def put(self, copy: TensorCopy, source: torch.Tensor) -> None:
        key = copy.start, source.dtype, source.shape
        place = self._made.get(key)
        if place is None:
            place = self._made[key] = self.memory[copy.start : copy.stop].view(source.dtype).view(source.shape)
        place.copy_(source, non_blocking=True)


def send_all(copies: list[TensorCopy], places: StagingViews) -> None:
    """Copy from a device. Small neighbours go together: a device takes only so many copies in its queue."""
    run: list[TensorCopy] = []
    for one in copies:
        if run and (one.start != run[-1].stop or run[-1].stop - run[0].start > _PACKED):
            _send_run(run, places)
            run = []
        size = one.source.nbytes
        if size > _SMALL:
            _send_run(run, places)
            send(one, places)
            run = []
        elif size:
            run.append(one)
    _send_run(run, places)


def _send_run(run: list[TensorCopy], places: StagingViews) -> None:
    if len(run) < 2:
        for one in run:
            send(one, places)
        return
    send(TensorCopy("", "", _packed([one.source for one in run]), run[0].start), places)


def _packed(sources: list[torch.Tensor]) -> torch.Tensor:
    """Tensors one after the other, as they will lie in the file."""
    dtype = sources[0].dtype
    if dtype.itemsize > 1 and all(one.dtype == dtype and is_dense(one) for one in sources):
        return torch.cat([one.view(-1) for one in sources])
    return torch.cat([_row(one) for one in sources])


def _row(source: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as they will lie in the file."""
    if not is_dense(source):
        source = movable(source.resolve_conj().resolve_neg()).contiguous()
    return source.view(-1).view(torch.uint8)


def send(copy: TensorCopy, places: StagingViews) -> None:
    if not copy.source.nbytes:
        return
    if copy.start // PIECE == (copy.stop - 1) // PIECE:
        places.put(copy, movable(copy.source))
        return
    row = _row(copy.source)
    for begin, stop in _within_pieces(copy.start, copy.stop):
        places.memory[begin:stop].copy_(row[begin - copy.start : stop - copy.start], non_blocking=True)


def _within_pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """A range of the memory, cut where pieces meet that were pinned one by one."""
    while start < stop:
        end = min(stop, (start // PIECE + 1) * PIECE)
        yield start, end
        start = end
