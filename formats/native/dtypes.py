"""Torch dtypes by name, and how safetensors spells them."""

from __future__ import annotations

import torch

from ckpt.formats.native.header import SPELLINGS

SPELLED: dict[torch.dtype, str] = {getattr(torch, name): spelling for name, spelling in SPELLINGS.items()}

BY_SPELLING = {spelling: dtype for dtype, spelling in SPELLED.items()}


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def by_name(name: str) -> torch.dtype:
    """The inverse of `name_of`. Nothing but a dtype is ever looked up."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype
