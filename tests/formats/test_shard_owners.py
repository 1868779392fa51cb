"""Which copy of a piece is whose: whatever the mesh, every piece is written once, by somebody."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch

from ckpt.errors import DamagedError
from ckpt.formats.layout import Box, Layout
from ckpt.formats.native import shard_table
from ckpt.formats.native.shard_table import EVERY, ShardSpec, ShardTable, balanced, joined_box, shares, written_by
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


@pytest.mark.parametrize(
    ("copies", "megabytes", "writers"),
    [(8, 64, 8), (64, 64, 8), (64, 32 * 128, 32), (64, 20 * 128, 22), (64, 64 * 128, 64), (12, 64, 12)],
)
def test_of_many_copies_so_few_write_that_each_file_is_worth_it_and_hosts_far_apart_have_them(
    copies: int, megabytes: int, writers: int
) -> None:
    layout = Layout((copies, 4), tuple(range(4 * copies)), ("R", "S0"))
    shape = 4, (megabytes << 20) // 1000 + 1  # a row is a thousandth of what each of the four ranks would write alone
    found = balanced({f"t{number}": ShardSpec(torch.uint8, shape, layout) for number in range(1000)})
    used = Counter(spec.copy for spec in found.values())
    assert len(used) == writers
    numbers = sorted(used)
    assert len({later - earlier for earlier, later in pairwise(numbers)}) == 1  # they are spaced evenly
    assert max(used.values()) - min(used.values()) <= 1


def test_a_model_replicated_on_a_thousand_ranks_is_in_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, shape = Layout((128, 8), tuple(range(1024)), ("R", "S0")), (24, SMALL // 4)
    specs = {f"t{number}": ShardSpec(torch.float32, shape, layout) for number in range(500)}

    def files() -> int:
        return len(set().union(*(spec.writers() for spec in balanced(specs).values())))

    assert files() == 8 * 8
    monkeypatch.setattr(shard_table, "_WORTH_A_FILE", 1)
    assert files() == 1024


def of(shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[str, ...], copy: int = 0) -> ShardSpec:
    return ShardSpec(torch.float32, shape, Layout(mesh, tuple(range(math.prod(mesh))), placements), copy)


@pytest.mark.parametrize(
    ("spec", "ranks", "expected"),
    [
        (of((10, 3), (4,), ("S0",)), range(2), Box((0, 0), (6, 3))),
        (of((10, 3), (4,), ("S0",)), range(2, 4), Box((6, 0), (4, 3))),
        (of((3, 2), (4,), ("S0",)), range(2, 4), Box((2, 0), (1, 2))),  # rank 3 has none
        (of((2, 2), (4,), ("S0",)), range(2, 4), None),  # neither has any
        (of((8, 2), (2, 4), ("R", "S0"), copy=1), range(4, 8), Box((0, 0), (8, 2))),
        (of((8, 2), (2, 4), ("R", "S0"), copy=1), range(4), None),  # the other copy is written
        (of((8, 2), (2, 4), ("R", "S0")), range(8), Box((0, 0), (8, 2))),
        (of((8, 4), (4,), ("S1",)), range(2), Box((0, 0), (8, 2))),  # columns, side by side
        (of((8, 5), (2, 2), ("S0", "S1")), range(4), Box((0, 0), (8, 5))),  # bands of rows
        (of((8, 5), (2, 2), ("S0", "S1")), range(1, 3), None),  # corners that do not meet
        (of((8, 4), (2, 2), ("S1", "S0")), range(2), Box((0, 0), (8, 2))),
        (of((8, 4), (4,), ("S1",)), range(1), Box((0, 0), (8, 1))),  # of one rank alone, they need not
        (of((8, 4), (2, 2), ("S0", "S1")), range(2), Box((0, 0), (4, 4))),
        (of((5,), (4,), ("R",), copy=2), range(4), Box((0,), (5,))),
        (of((), (4,), ("R",)), range(4), Box((), ())),
        (of((0, 3), (4,), ("S0",)), range(4), Box((0, 0), (0, 3))),  # an empty tensor is in a file too
        (of((8, 2), (2, 4), ("R", "S0"), copy=EVERY), range(4), None),
        (ShardSpec(torch.float32, (4, 2), Layout((4,), (3, 2, 1, 0), ("S0",))), range(4), Box((0, 0), (4, 2))),
    ],
)
def test_what_ranks_write_is_one_box_only_if_nothing_lies_between_their_shards(
    spec: ShardSpec, ranks: range, expected: Box | None
) -> None:
    assert joined_box(spec, ranks) == expected
    if expected is not None and 0 not in spec.shape:
        assert sum(math.prod(box.sizes) for _, box in shares(spec, ranks)) == math.prod(expected.sizes)


def test_a_table_says_how_many_ranks_wrote_together_and_a_wrong_number_is_damage() -> None:
    table = ShardTable({"x": of((8, 2), (4,), ("S0",))}, {}, together=2)
    fields = table.to_json()
    assert fields["together"] == 2
    assert ShardTable.from_json(fields) == table
    assert "together" not in ShardTable(table.tensors).to_json()
    for wrong in (0, -1, 5, 10**18, "2", True, 1.5, None):
        with pytest.raises(DamagedError, match="shard table"):
            ShardTable.from_json({**fields, "together": wrong})
