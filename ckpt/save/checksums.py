"""Checksums of tensors, by which ranks compare their state without sending it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import xxhash

from ckpt.formats.native.block_hash import digest
from ckpt.formats.state import FilePlan
from ckpt.formats.tensor_bytes import as_bytes, host_bytes, is_dense, on_host

_STEP = 1 << 23  # elements at a time: intermediate results on a device take some hundred megabytes
_MIX = (0x2545F4914F6CDD1D, 0x9E3779B97F4A7C1 | 1)


def checksum(tensor: torch.Tensor) -> Callable[[], str]:
    """The checksum of a tensor as it is now. On a device it is computed on training's stream, and the function that is
    returned waits for it."""
    if tensor.is_cpu or not is_dense(tensor) or not tensor.numel():
        value = digest(host_bytes(on_host(tensor)))
        return lambda: value
    pending = weighted_sum(tensor)
    done = torch.get_device_module(tensor.device).current_stream(tensor.device).record_event()

    def read() -> str:
        done.synchronize()  # it is read on another thread, which has another current stream
        return f"{int(pending.item()) & (1 << 64) - 1:016x}"

    return read


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's elements as integers, each weighted by a hash of its index, modulo 2**64.

    Not torch.hash_tensor, the exclusive or of all elements: any two constant tensors of an even number of elements have
    the same.
    """
    flat = as_bytes(tensor.detach())
    numbers = flat.view(torch.int32) if flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0 else flat
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, numbers.numel(), _STEP):
        part = numbers[start : start + _STEP].to(torch.int64)
        weight = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=tensor.device)
        weight.mul_(_MIX[0]).bitwise_xor_(weight >> 29).mul_(_MIX[1]).bitwise_or_(1)
        total += part.mul_(weight).sum()
    return total


def checksums(file: FilePlan, snapshot: FilePlan | None, wanted: Callable[[str], bool]) -> dict[str, str]:
    """The checksums of the wanted tensors of a file, by name: from its snapshot, or of the live tensors without one."""
    tensors = [content for content in file.contents or () if isinstance(content, tuple)]
    if snapshot is None:
        return {name: digest(host_bytes(on_host(tensor))) for name, tensor in tensors if wanted(name)}
    if not any(wanted(name) for name, _ in tensors):
        return {}
    return {name: value for name, value in _digests_in(file, snapshot.pieces()) if wanted(name)}


def _digests_in(file: FilePlan, pieces: Iterator[memoryview]) -> Iterator[tuple[str, str]]:
    """The digests of all tensors of a file, whose bytes come in pieces."""
    left = memoryview(b"")
    for content in file.contents or ():
        name, size = ("", len(content)) if isinstance(content, bytes) else (content[0], content[1].nbytes)
        hashed = xxhash.xxh3_128()
        while size:
            left = left or next(pieces)
            hashed.update(left[:size])
            left, size = left[size:], size - len(left[:size])
        if name:
            yield name, hashed.hexdigest()
