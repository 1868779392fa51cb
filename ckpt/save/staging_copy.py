"""Copies of tensors on the host into the image of a snapshot, in several threads."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from ckpt.formats.tensors import as_bytes, is_dense, is_plain, memory_size, movable

_PART = 8 << 20  # bytes that a thread copies at a time

_Part = tuple[int, int, int]  # target address, source address, number of bytes


class TensorCopy(NamedTuple):
    """A tensor to copy, and its place in the image of the snapshot."""

    file: str  # the path of its file
    source: torch.Tensor
    start: int


def copy_on_host(copies: list[TensorCopy], memory: torch.Tensor) -> None:
    """Copy in several threads, which release the interpreter's lock."""
    base = memory.data_ptr()
    parts = []
    for copy in copies:
        if is_plain(copy.source):
            target, source, length = base + copy.start, copy.source.data_ptr(), memory_size(copy.source)
            parts += [(target + b, source + b, min(_PART, length - b)) for b in range(0, length, _PART)]
        else:
            memory[copy.start : copy.start + copy.source.nbytes].copy_(flat_bytes(copy.source))
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


@torch.no_grad()
def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the order of the file; a copy if its memory has another."""
    tensor = tensor.detach()
    if not is_dense(tensor):
        tensor = movable(tensor.resolve_conj().resolve_neg()).contiguous()
    return as_bytes(tensor)
