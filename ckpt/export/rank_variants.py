"""A model of which ranks held different tensors, put together for tools that know no ranks."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt.formats.pieces import PiecedTensor
from ckpt.root.file_names import part_of, rank_of

_log = logging.getLogger("ckpt")
_FEW = 5


def is_own_file(name: str, part: str) -> bool:
    """Whether a file holds what one rank had otherwise than the main one: `model-own-00001.safetensors`."""
    return re.fullmatch(rf"{re.escape(part)}-own-\d{{5}}", part_of(name)) is not None


def merged(
    where: str, main: Mapping[str, PiecedTensor], own: Mapping[str, PiecedTensor], differs: Mapping[str, Any]
) -> dict[str, PiecedTensor]:
    """The main rank's tensors, and what only other ranks have: the layers of other stages of a pipeline.

    Of tensors that several ranks have, each another one, the first rank's are taken, and a warning says so.
    """
    found = {name: _without(one, differs.get(name, ())) for name, one in main.items()}
    several = [
        name for name, ranks in differs.items() if name in found or (len(ranks) > 1 and not _is_divided(own, name))
    ]
    if several:
        more = f" and {len(several) - _FEW} more" if len(several) > _FEW else ""
        _log.warning(
            "%s: ranks have different %s%s; those of rank 0 are taken, or of the first rank that has them.",
            where, ", ".join(several[:_FEW]), more,
        )  # fmt: skip
    return found | {name: _first_of_each(one) for name, one in own.items() if name not in found}


def _is_divided(own: Mapping[str, PiecedTensor], name: str) -> bool:
    """Whether ranks have pieces of one tensor: then none has a whole one of its own."""
    return name in own and len({piece.box for piece in own[name].pieces}) == len(own[name].pieces)


def _without(tensor: PiecedTensor, ranks: Any) -> PiecedTensor:
    """A tensor without the pieces of these ranks, where others have some."""
    kept = tuple(piece for piece in tensor.pieces if rank_of(piece.region.where) not in ranks)
    return replace(tensor, pieces=kept) if kept else tensor


def _first_of_each(tensor: PiecedTensor) -> PiecedTensor:
    pieces = {piece.box: piece for piece in reversed(tensor.pieces)}
    return replace(tensor, pieces=tuple(pieces.values()))
