"""Merge a model whose tensors differ between ranks, for tools that know no ranks."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from ckpt.formats.pieces import PiecedTensor
from ckpt.root.file_names import part_of, rank_of

_log = logging.getLogger("ckpt")
_FEW = 5


def is_own_file(name: str, part: str) -> bool:
    """True for files with tensors that one rank had different from the main rank: `model-own-00001.safetensors`."""
    return re.fullmatch(rf"{re.escape(part)}-own-\d{{5}}", part_of(name)) is not None


def merged(
    where: str,
    main: Mapping[str, PiecedTensor],
    own: Mapping[str, PiecedTensor],
    differs: Mapping[str, Collection[int]],
) -> dict[str, PiecedTensor]:
    """The main rank's tensors, and those that only other ranks have, such as the layers of other pipeline stages.

    Where several ranks have different values of a tensor, those of the first rank are used, with a warning.
    """
    found = {name: _without(tensor, differs.get(name, ())) for name, tensor in main.items()}
    several = [
        name for name, ranks in differs.items() if name in found or (len(ranks) > 1 and not _is_divided(own, name))
    ]
    warn_of_variants(where, several)
    return found | {name: _first_of_each_box(tensor) for name, tensor in own.items() if name not in found}


def warn_of_variants(where: str, names: Collection[str]) -> None:
    """Say which tensors several ranks have different values of."""
    if names:
        more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
        _log.warning(
            "%s: ranks have different %s%s; those of rank 0 are used, or of the first rank that has them.",
            where, ", ".join(list(names)[:_FEW]), more,
        )  # fmt: skip


def _is_divided(own: Mapping[str, PiecedTensor], name: str) -> bool:
    """True if the ranks hold disjoint pieces of the tensor instead of different values of all of it."""
    return name in own and len({piece.box for piece in own[name].pieces}) == len(own[name].pieces)


def _without(tensor: PiecedTensor, ranks: Collection[int]) -> PiecedTensor:
    """A tensor without the pieces of these ranks, unless no other rank has any."""
    kept = tuple(piece for piece in tensor.pieces if rank_of(piece.region.where) not in ranks)
    return replace(tensor, pieces=kept) if kept else tensor


def _first_of_each_box(tensor: PiecedTensor) -> PiecedTensor:
    """A tensor with one piece per box: that of the first rank."""
    pieces = {piece.box: piece for piece in reversed(tensor.pieces)}
    return replace(tensor, pieces=tuple(pieces.values()))
