"""Checksums of tensors, by which ranks find out whether they hold the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ckpt.formats.native.block_hash import digest
from ckpt.formats.state import FilePlan
from ckpt.formats.tensor_bytes import as_bytes, host_bytes, is_dense, on_host

_STEP = 1 << 23  # elements at a time: for which a device needs some hundred megabytes besides
_MIX = (0x2545F4914F6CDD1D, 0x9E3779B97F4A7C1 | 1)


def checksum(tensor: torch.Tensor) -> Callable[[], str]:
    """The checksum of a tensor as it is now. On a device it is worked out in the stream that training uses, and only
    the call of what is returned waits for it."""
    if tensor.is_cpu or not is_dense(tensor) or not tensor.numel():
        found = digest(host_bytes(on_host(tensor)))
        return lambda: found
    later = weighted_sum(tensor)
    done = torch.get_device_module(tensor.device).current_stream(tensor.device).record_event()

    def read() -> str:
        done.synchronize()  # whoever reads it is on another thread, and has another stream
        return f"{int(later.item()) & (1 << 64) - 1:016x}"

    return read


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's elements as integers, each times a number that follows from its place, modulo 2**64.

    torch.hash_tensor is the exclusive or of all elements: it takes any two tensors of equal elements, of which there is
    an even number, for the same.
    """
    row = as_bytes(tensor.detach())
    numbers = row.view(torch.int32) if row.numel() % 4 == 0 and row.storage_offset() % 4 == 0 else row
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, numbers.numel(), _STEP):
        part = numbers[start : start + _STEP].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=tensor.device)
        place.mul_(_MIX[0]).bitwise_xor_(place >> 29).mul_(_MIX[1]).bitwise_or_(1)
        total += part.mul_(place).sum()
    return total


def checksums(image: FilePlan, filled: FilePlan | None, wanted: Callable[[str], bool]) -> dict[str, str]:
    """The checksums of tensors in a file that is to be written: as they lie in its copy, or live if there is none."""
    copy = next(filled.pieces()) if filled is not None else None
    found, start = {}, 0
    for content in image.contents or ():
        if isinstance(content, bytes):
            start += len(content)
            continue
        name, tensor = content
        stop = start + tensor.nbytes
        if wanted(name):
            found[name] = digest(host_bytes(on_host(tensor)) if copy is None else copy[start:stop])
        start = stop
    return found
