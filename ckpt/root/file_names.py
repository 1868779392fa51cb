"""How the files of a part are named."""

from __future__ import annotations

import re

from ckpt.formats.native.header import SUFFIX

_FROZEN = "+frozen"  # no part is named so
_OF_A_RANK = re.compile(rf"[/-](\d{{5}})(?:{re.escape(_FROZEN)})?{re.escape(SUFFIX)}$")


def whole_file(key: str, *, frozen: bool = False) -> str:
    """The file with a part's tensors: `model.safetensors`, or `model+frozen.safetensors`."""
    return f"{key}{_FROZEN if frozen else ''}{SUFFIX}"


def spread_file(key: str, rank: int, *, frozen: bool = False) -> str:
    """The file with a rank's pieces of a part: `model/00003.safetensors`."""
    return whole_file(f"{key}/{rank:05d}", frozen=frozen)


def own_key(key: str, rank: int) -> str:
    """The key of a rank's own state of a part, where ranks hold different state; its file is named after it."""
    return f"{key}-own-{rank:05d}"


def rank_of(name: str) -> int | None:
    """The rank whose tensors alone a file holds; none if it holds what all ranks have in common."""
    found = _OF_A_RANK.search(name)
    return int(found.group(1)) if found else None


def part_of(name: str) -> str:
    """The part that a file of tensors belongs to."""
    return name.partition("/")[0].removesuffix(SUFFIX).removesuffix(_FROZEN)
