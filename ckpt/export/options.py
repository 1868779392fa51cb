"""How exported weights are written: their dtype, and the size of their shards."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ckpt.errors import ConfigError
from ckpt.util.option_values import parse_size

SHARD_SIZE = "5GB"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The dtype that floating point tensors are cast to, and the bytes beyond which weights are written in shards.

    None keeps the dtypes, and writes one file.
    """

    dtype: torch.dtype | None = None
    max_shard_size: int | None = None

    @classmethod
    def parse(cls, dtype: str | torch.dtype | None, max_shard_size: int | str | None) -> ExportOptions:
        """The options as users give them: `"bfloat16"`, `"5GB"`."""
        from ckpt.formats.foreign.hf_safetensors import parse_dtype  # training loads no format of others

        return cls(
            dtype=None if dtype is None else parse_dtype(dtype),
            max_shard_size=None if max_shard_size is None else _parse_shard_size(max_shard_size),
        )


def _parse_shard_size(size: int | str) -> int:
    parsed = parse_size(size)
    if parsed is None:
        raise ConfigError(
            f"max_shard_size={size!r} is not a size. Give a number of bytes, or a string such as '5GB' or '500MiB'."
        )
    return parsed
