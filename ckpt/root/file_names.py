"""The names of a checkpoint's tensor files, and which part and rank each belongs to."""

from __future__ import annotations

import re

from ckpt.formats.native.header import SUFFIX

_FROZEN = "+frozen"  # no part is named so
_RANK_SUFFIX = re.compile(rf"[/-](\d{{5}})(?:{re.escape(_FROZEN)})?(?:\.[0-9a-f]{{8}})?{re.escape(SUFFIX)}$")


def whole_file(key: str, *, frozen: bool = False) -> str:
    """The file with all of a part's tensors: `model.safetensors`, or `model+frozen.safetensors`."""
    return f"{key}{_FROZEN if frozen else ''}{SUFFIX}"


def spread_file(key: str, rank: int, *, frozen: bool = False) -> str:
    """The file with a rank's shards of a part: `model/00003.safetensors`."""
    return whole_file(f"{key}/{rank:05d}", frozen=frozen)


def own_key(key: str, rank: int) -> str:
    """The key, and thereby the file name, of what a rank alone holds of a part whose state differs between ranks."""
    return f"{key}-own-{rank:05d}"


def rank_of(name: str) -> int | None:
    """The rank whose tensors a file holds; None if it holds what all ranks have in common."""
    found = _RANK_SUFFIX.search(name)
    return int(found.group(1)) if found else None


def part_of(name: str) -> str:
    """The part that a tensor file belongs to."""
    return name.partition("/")[0].removesuffix(SUFFIX).removesuffix(_FROZEN)
