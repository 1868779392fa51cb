"""A Triton kernel that scales numbers in place. To be imported only where Triton is installed."""

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

_BLOCK = 1024


def _scale(values, count, factor, block: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * block + tl.arange(0, block)
    inside = places < count
    tl.store(values + places, tl.load(values + places, mask=inside) * factor, mask=inside)


_kernel = triton.jit(_scale)


def scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply a contiguous tensor by a factor, in the current stream."""
    _kernel[(triton.cdiv(tensor.numel(), _BLOCK),)](tensor.detach(), tensor.numel(), factor, block=_BLOCK)
