"""The dtypes of stored tensors: by name, and as safetensors spells them."""

from __future__ import annotations

import torch

from ckpt.formats.native.header import SPELLINGS

SPELLED: dict[torch.dtype, str] = {getattr(torch, name): spelling for name, spelling in SPELLINGS.items()}

# All that a stored tensor may have: of each, torch allocates `itemsize` bytes per element. Not so of quint4x2 and
# quint2x4, which have several elements in a byte: a view of numel * itemsize bytes leads past the end of their memory.
NAMES = frozenset(
    (
        *SPELLINGS,
        *("complex32", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
        *(f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8)),
    )
)
STORABLE = frozenset(getattr(torch, name) for name in NAMES if hasattr(torch, name))

BY_SPELLING = {spelling: dtype for dtype, spelling in SPELLED.items()}


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def by_name(name: str) -> torch.dtype:
    """The inverse of `name_of`, for the dtypes that a stored tensor may have. Nothing else is ever looked up."""
    if name not in NAMES:
        raise ValueError(f"{name!r} is no dtype of a stored tensor")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype
