"""Layouts from a file: checked, so that the shards of a tensor are all of it, each element once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from ckpt.formats.layout import Box, Layout, interned
from ckpt.formats.strides import Sizes, checked_sizes
from ckpt.formats.tiling import find_fault

_PLACEMENT = re.compile(r"R|S([0-9]{1,2})(?:/([0-9]{1,9}))?")
_MOST_UNEVEN = 1 << 14  # ranks of a layout whose shards have to be compared one by one


def layout_from_json(fields: Mapping[str, Any], world_size: int | None = None) -> Layout:
    """A layout over distinct ranks, as many as its mesh has places. `world_size`: they are fewer than that."""
    mesh, ranks, placements = checked_sizes(fields["mesh"]), checked_sizes(fields["ranks"]), tuple(fields["placements"])
    if not ranks or math.prod(mesh) != len(ranks) or len(set(ranks)) != len(ranks):
        raise ValueError(
            f"a mesh of {'x'.join(map(str, mesh))} ranks has {len(set(ranks))} different ones of {len(ranks)}"
        )
    if world_size is not None and max(ranks) >= world_size:
        raise ValueError(f"rank {max(ranks)} is in a mesh, and there were {world_size}")
    if len(placements) != len(mesh) or not all(map(_PLACEMENT.fullmatch, placements)):
        raise ValueError(f"{list(placements)} are no placements on a mesh of {len(mesh)} dimensions")
    return interned(Layout(mesh, ranks, placements))


def check_covered(layout: Layout, shape: Sizes) -> None:
    """Raise unless the shards of a tensor of that shape are all of it. Cached by layout and shape."""
    if problem := _problem(layout, shape):
        raise ValueError(f"shards {','.join(layout.placements)} of a tensor of shape {list(shape)}: {problem}")


@lru_cache(maxsize=10_000)
def _problem(layout: Layout, shape: Sizes) -> str | None:
    """Shards along a dimension are those of torch.chunk, which always cover it, unless they are strided and uneven."""
    uneven = False
    for text, dim, factor, pieces, size in _divisions(layout):
        if dim >= len(shape):
            return f"it has no dimension {dim}"
        if factor is not None and factor != pieces:
            return f"{text} stands over {pieces} pieces of dimension {dim}"
        uneven = uneven or (factor is not None and shape[dim] % (pieces * size) != 0)
    return _fault_one_by_one(layout, shape) if uneven else None


_Division = tuple[str, int, int | None, int, int]


def _divisions(layout: Layout) -> Iterator[_Division]:
    """The sharded dimensions of a mesh, from the last: placement, dimension of the tensor, split factor, into how many
    pieces later ones divide that dimension, and the size of this one."""
    pieces: dict[int, int] = {}
    for size, text in reversed(list(zip(layout.mesh, layout.placements, strict=True))):
        match = _PLACEMENT.fullmatch(text)
        if match is not None and match.group(1) is not None:
            dim, factor = int(match.group(1)), match.group(2)
            yield text, dim, None if factor is None else int(factor), pieces.get(dim, 1), size
            pieces[dim] = pieces.get(dim, 1) * size


@lru_cache(maxsize=10_000)
def count_shards(layout: Layout, shape: Sizes) -> int:
    """How many different shards a tensor has, at least: those that torch.chunk makes of each dimension."""
    if 0 in shape:
        return 0
    pieces = {dim: divided * size for _, dim, _, divided, size in _divisions(layout)}
    return math.prod(-(-shape[dim] // -(-shape[dim] // count)) for dim, count in pieces.items())


def _fault_one_by_one(layout: Layout, shape: Sizes) -> str | None:
    if len(layout.ranks) > _MOST_UNEVEN:
        return "strided and uneven over too many ranks"
    fault = find_fault(layout.holders(shape, 0).values(), Box((0,) * len(shape), shape))
    return f"it {fault}" if fault else None
