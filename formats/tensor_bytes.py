"""The bytes behind a tensor."""

from __future__ import annotations

import ctypes

import torch


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, not copied. The view keeps the tensor alive."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor on any device as a row of bytes."""
    return tensor.view(-1).view(torch.uint8)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes can be read and written in place through `host_bytes`."""
    return tensor.is_cpu and is_dense(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are its bytes, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its bytes can be read in place, a plain copy on the CPU otherwise."""
    plain = tensor.detach()
    if not is_plain(plain):
        resolved = plain.resolve_conj().resolve_neg()
        plain = movable(resolved).contiguous().cpu().view(resolved.dtype)
    return plain


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory under a dtype that torch can copy: it has no copy for int4 and its like."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def copy_into(source: torch.Tensor, target: torch.Tensor) -> None:
    """Fill `target`, which may have another dtype."""
    if source.dtype == target.dtype:
        source, target = movable(source), movable(target)
    target.copy_(source)


def narrowed(tensor: torch.Tensor, ranges: list[tuple[int, int]]) -> torch.Tensor:
    """A box of a tensor: for each dimension a start and a length."""
    for dim, (start, length) in enumerate(ranges):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor
