"""Tensors in pieces: whatever ranks wrote them and whatever part is asked for, each element is its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
import torch

from ckpt.formats.checks import dense_strides
from ckpt.formats.layout import Box, Fault, Layout
from ckpt.formats.native.shard_table import ShardedTensors, ShardSpec, ShardTable, build_table, written_by
from ckpt.formats.native.tensor_file import TensorFile, plan_file
from ckpt.formats.pieces import Piece, PiecedTensor, Region
from ckpt.formats.tensors import Shard, narrowed
from tests.helpers.file_in_memory import FileInMemory

SHAPE = (7, 10)
WHOLE = torch.arange(70, dtype=torch.float32).reshape(SHAPE)
LAYOUTS = [
    Layout((3,), (0, 1, 2), ("S0",)),
    Layout((4,), (0, 1, 2, 3), ("S1",)),
    Layout((2, 2), (0, 1, 2, 3), ("S0", "S1")),
    Layout((2, 3), (5, 4, 3, 2, 1, 0), ("R", "S0")),
    Layout((2, 2), (0, 1, 2, 3), ("R", "R")),
]


def piece_of(layout: Layout, rank: int) -> torch.Tensor:
    return narrowed(WHOLE, layout.box(SHAPE, rank).ranges).contiguous()


def files(table: ShardTable, layout: Layout) -> dict[int, list[TensorFile]]:
    """What every rank writes of the tensor `weight`."""
    found = {}
    for rank in layout.ranks:
        mine = written_by(table, {"weight": WHOLE}, rank)
        pieces = {name: Shard(piece_of(layout, rank), shard.shape, shard.offsets) for name, shard in mine.items()}
        data = b"".join(plan_file("model.safetensors", pieces).pieces())
        found[rank] = [TensorFile.open(FileInMemory(data), f"rank {rank}", len(data))] if pieces else []
    return found


def reader(table: ShardTable, found: Mapping[int, list[TensorFile]], rank: int) -> tuple[ShardedTensors, list[int]]:
    opened: list[int] = []

    def open_files(of: int) -> list[TensorFile]:
        opened.append(of)
        return found[of]

    return ShardedTensors(table, open_files, rank), opened


@pytest.mark.parametrize("then", LAYOUTS)
@pytest.mark.parametrize("now", LAYOUTS)
def test_a_tensor_that_was_spread_in_one_way_is_read_in_another(then: Layout, now: Layout) -> None:
    table = ShardTable({"weight": ShardSpec(torch.float32, SHAPE, then)})
    written = files(table, then)
    for rank in now.ranks:
        box = now.box(SHAPE, rank)
        target = torch.full(box.sizes, -1.0)
        reader(table, written, rank)[0].fill("weight", target, box)
        assert torch.equal(target, piece_of(now, rank))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.copies > 1])
def test_a_rank_that_has_every_copy_reads_its_own(layout: Layout) -> None:
    """Where hosts have roots of their own, each writes all that it holds, and reads no other host's files."""
    table = ShardTable({"weight": ShardSpec(torch.float32, SHAPE, layout)}).with_every_copy()
    written = files(table, layout)
    for rank in layout.ranks:
        tensors, opened = reader(table, written, rank)
        box = layout.box(SHAPE, rank)
        target = torch.full(box.sizes, -1.0)
        tensors.fill("weight", target, box)
        assert torch.equal(target, piece_of(layout, rank))
        assert opened == [rank]


def test_tensors_in_one_memory_that_are_not_the_same_are_kept_apart() -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    tensors = {"whole": whole, "again": whole, "rows": whole[:2], "column": whole[:, 0], "other": whole.view(3, 4)}
    table = build_table(tensors, 2)
    assert table.aliases == {"again": "whole"}
    assert {name: spec.shape for name, spec in table.tensors.items()} == {
        "whole": (4, 3),
        "rows": (2, 3),
        "column": (4,),
        "other": (3, 4),
    }


def pieced(boxes: list[Box], shape: tuple[int, ...] = SHAPE) -> PiecedTensor:
    """A tensor of which these boxes were saved, one after the other in a file."""
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    parts = [narrowed(whole, box.ranges).contiguous() for box in boxes]
    data = b"".join(part.numpy().tobytes() for part in parts)
    starts = [0, *itertools.accumulate(part.nbytes for part in parts)]
    regions = [
        Region(FileInMemory(data), "file", torch.float32, start, box.sizes, dense_strides(box.sizes))
        for start, box in zip(starts, boxes, strict=False)
    ]
    return PiecedTensor(torch.float32, shape, tuple(map(Piece, boxes, regions)))


@pytest.mark.parametrize("missing", range(6))
def test_every_hole_between_pieces_is_found(missing: int) -> None:
    boxes = [
        Box((row, column), (3 if row == 0 else 4, 4 if column < 8 else 2)) for row in (0, 3) for column in (0, 4, 8)
    ]
    assert pieced(boxes).fault() is None
    assert pieced([box for box in boxes if box is not boxes[missing]]).fault() == Fault("lacks", boxes[missing])


@pytest.mark.parametrize("limit", [1, 3, 10, 25, 69, 70, 1000])
def test_slabs_of_a_tensor_are_all_of_it_in_order(limit: int) -> None:
    tensor = pieced([Box((0, 0), (7, 6)), Box((0, 6), (7, 4))])
    slabs = [tensor.read(box) for box in tensor.boxes(limit)]
    assert all(slab.numel() <= limit for slab in slabs)
    assert torch.equal(torch.cat([slab.flatten() for slab in slabs]), WHOLE.flatten())
