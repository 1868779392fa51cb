"""How the files of a part are named."""

from __future__ import annotations

from ckpt.formats.native import SUFFIX

_FROZEN = "+frozen"  # no part is named so


def whole_file(key: str, *, frozen: bool = False) -> str:
    """The file with a part's tensors: `model.safetensors`, or `model+frozen.safetensors`."""
    return f"{key}{_FROZEN if frozen else ''}{SUFFIX}"


def spread_file(key: str, rank: int, *, frozen: bool = False) -> str:
    """The file with a rank's pieces of a part: `model/00003.safetensors`."""
    return whole_file(f"{key}/{rank:05d}", frozen=frozen)


def part_of(name: str) -> str:
    """The part that a file of tensors belongs to."""
    return name.partition("/")[0].removesuffix(SUFFIX).removesuffix(_FROZEN)
