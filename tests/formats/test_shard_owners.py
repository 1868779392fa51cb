"""Which copy of a piece is whose: whatever the mesh, every piece is written once, by somebody."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from ckpt.formats.layout import Layout
from ckpt.formats.native.shard_table import ShardSpec, ShardTable, balanced, written_by
from ckpt.formats.native.tensor_file import SMALL

MESHES = [
    ((2, 2), ("R", "R")),
    ((2, 3), ("R", "R")),
    ((3, 2), ("R", "S0")),
    ((2, 3), ("S0", "R")),
    ((2, 2, 2), ("R", "R", "S0")),
    ((2, 2, 2), ("R", "S0", "R")),
    ((2, 3, 2), ("R", "R", "R")),
]


def laid_out(mesh: tuple[int, ...], placements: tuple[str, ...]) -> Layout:
    """Ranks are numbered from the end, so that none is where one would guess."""
    return Layout(mesh, tuple(reversed(range(math.prod(mesh)))), placements)


@pytest.mark.parametrize(("mesh", "placements"), MESHES)
def test_each_copy_of_each_piece_is_held_by_one_rank(mesh: tuple[int, ...], placements: tuple[str, ...]) -> None:
    layout = laid_out(mesh, placements)
    held = Counter((layout.copy_of(rank), layout.box((24, 5), rank)) for rank in layout.ranks)
    assert set(held.values()) == {1}
    assert {copy for copy, _ in held} == set(range(layout.copies))
    for copy in range(layout.copies):
        pieces = layout.holders((24, 5), copy)
        assert sum(math.prod(box.sizes) for box in pieces.values()) == 24 * 5
        assert {rank: layout.box((24, 5), rank) for rank in pieces} == pieces


@pytest.mark.parametrize(("mesh", "placements"), MESHES)
def test_every_large_tensor_is_written_once_and_all_copies_have_some_to_write(
    mesh: tuple[int, ...], placements: tuple[str, ...]
) -> None:
    layout, shape = laid_out(mesh, placements), (24, SMALL // 4)
    names = [f"tensor-{number}" for number in range(2 * layout.copies)]
    table = ShardTable(balanced({name: ShardSpec(torch.float32, shape, layout) for name in names}))
    live = {name: torch.zeros(shape) for name in names}
    written: Counter[str] = Counter()
    for rank in layout.ranks:
        mine = written_by(table, live, rank)
        assert mine, f"rank {rank} has nothing to write"
        for name in mine:
            written[name] += math.prod(layout.box(shape, rank).sizes)
    assert written == dict.fromkeys(names, math.prod(shape))
