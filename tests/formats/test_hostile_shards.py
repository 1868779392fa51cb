"""Sharded checkpoints whose tables, or files, do not say of every element of a tensor where it is."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import DamagedError, UnsupportedError
from ckpt.formats.layout import Box, Layout, check_covered, count_shards, find_fault, layout_from_json
from ckpt.formats.native.manifest import FILE_NAME, FileRecord, Manifest
from ckpt.formats.native.shard_table import ShardSpec, ShardTable, refuse_overlapping
from ckpt.formats.native.tensor_file import plan_file
from ckpt.formats.tensors import Shard
from tests.helpers.forgery import alter_header, alter_json, reseal, write_manifest

ROWS = 6
LAYOUT = {"mesh": [2], "ranks": [0, 1], "placements": ["S0"]}
Change = Callable[[Any], Any]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint as two ranks save it, each a half of the rows."""
    torch.manual_seed(0)
    model = nn.Linear(4, ROWS)
    with ckpt.StateManager(tmp_path, model=model) as manager:
        manager.save_state("a")
    folder = tmp_path / "a"
    (folder / "model").mkdir()
    for rank in (0, 1):
        (folder / f"model/0000{rank}.safetensors").write_bytes(_half(model, rank))
    rows = {name: ["float32", list(value.shape), 0, 0] for name, value in model.state_dict().items()}
    document = json.loads((folder / "state.json").read_bytes())
    document["parts"]["model"]["spread"] = {"layouts": [LAYOUT], "tensors": rows, "aliases": {}}
    (folder / "state.json").write_text(json.dumps(document))
    (folder / "rank-00001.json").write_bytes((folder / "rank-00000.json").read_bytes())
    (folder / "model.safetensors").unlink()
    manifest = Manifest.from_bytes((folder / FILE_NAME).read_bytes(), "manifest")
    names = ("state.json", *(f"{start}0000{rank}{end}" for rank in (0, 1) for start, end in _RANK_FILES))
    files = tuple(FileRecord(name=name, path=name, size=0, blocks=()) for name in names)
    write_manifest(folder, replace(manifest, files=files, world_size=2).to_bytes())
    reseal(folder)
    return folder


_RANK_FILES = (("rank-", ".json"), ("model/", ".safetensors"))


def _half(model: nn.Module, rank: int) -> bytes:
    first, count = rank * ROWS // 2, ROWS // 2
    halves = {
        name: Shard(value[first : first + count].clone(), tuple(value.shape), (first, *[0] * (value.dim() - 1)))
        for name, value in model.state_dict().items()
    }
    return b"".join(plan_file("model", halves).pieces())


def _table(change: Change) -> Change:
    return lambda document: change(document["parts"]["model"]["spread"])


def _layout(**fields: Any) -> Change:
    return _table(lambda table: table["layouts"][0].update(fields))


def _row(name: str, index: int, value: Any) -> Change:
    return _table(lambda table: table["tensors"][name].__setitem__(index, value))


def test_a_checkpoint_like_these_that_is_right_is_loaded(sharded: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved, model = nn.Linear(4, ROWS), nn.Linear(4, ROWS)
    with ckpt.StateManager(sharded.parent, model=model) as manager:
        manager.load_state("a")
    assert torch.equal(model.weight, saved.weight)
    assert ckpt.verify(sharded) == {"a": []}
    ckpt.merge(sharded, tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_layout(ranks=[0, 0]), "lists 2 ranks, 1 of them distinct"),
        (_layout(ranks=[0, 2]), "contains rank 2, but there were only 2"),
        (_layout(ranks=[0, -1]), "size or offset"),
        (_layout(ranks=[0, True]), "size or offset"),
        (_layout(ranks=[0]), "a mesh of 2 lists 1 ranks"),
        (_layout(mesh=[3]), "a mesh of 3 lists 2 ranks"),
        (_layout(mesh=[1]), "a mesh of 1 lists 2 ranks"),
        (_layout(mesh=[], ranks=[], placements=[]), "a mesh of"),
        (_layout(mesh=[0], ranks=[]), "a mesh of 0 lists"),
        (_layout(placements=[]), "are not valid placements"),
        (_layout(placements=["S0", "R"]), "are not valid placements"),
        (_layout(placements=["P"]), "are not valid placements"),
        (_layout(placements=[0]), "TypeError"),
        (_layout(placements=["S2"]), "it has no dimension"),
        (_layout(placements=["S0/999999999"]), "stands over 1 pieces of dimension 0"),
        (_layout(placements=["S0/0"]), "stands over 1 pieces of dimension 0"),
        (_layout(mesh="2"), "size or offset"),
        (_table(lambda table: table.update(layouts=[])), "KeyError"),
        (_table(lambda table: table.update(tensors=[])), "AttributeError"),
        (_table(lambda table: table.pop("aliases")), "KeyError"),
        (_table(lambda table: table.update(aliases={"x": ["weight"]})), "an alias is not a string"),
        (_row("weight", 0, "quint4x2"), "not a dtype that ckpt stores"),
        (_row("weight", 1, [ROWS, -4]), "size or offset"),
        (_row("weight", 1, [1 << 62, 1 << 62]), "a tensor can't have the shape"),
        (_row("weight", 2, -1), "KeyError"),
        (_row("weight", 2, 1), "KeyError"),
        (_row("weight", 3, 1), "the table asks for copy 1 of a tensor with 1"),
        (_row("weight", 3, -2), "the table asks for copy -2 of a tensor with 1"),
        (_row("weight", 3, 0.0), "the table asks for copy"),
    ],
)
def test_a_table_with_a_hole_is_refused_before_anything_is_changed(sharded: Path, change: Change, why: str) -> None:
    alter_json(sharded / "state.json", change)
    _refused(sharded, f"the shard table of a part is not a valid shard table: .*{why}")


@pytest.mark.parametrize(
    "change",
    [_row("weight", 0, "int32"), _row("weight", 1, [ROWS - 1, 4]), _row("weight", 1, [ROWS, 8])],
)
def test_a_table_that_does_not_go_with_the_files_is_refused(sharded: Path, change: Change) -> None:
    alter_json(sharded / "state.json", change)
    with ckpt.StateManager(sharded.parent, model=nn.Linear(4, ROWS)) as manager, pytest.raises(ckpt.CkptError):
        manager.load_state("a")
    with pytest.raises(DamagedError, match="do not match its shard table: weight"):
        ckpt.merge(sharded, sharded.parent / "out.safetensors")


def _cast(header: dict[str, Any]) -> None:
    header["weight"]["dtype"] = "I32"


def _reshaped(header: dict[str, Any]) -> None:
    header["weight"]["shape"] = [2, 6]


def _moved(header: dict[str, Any]) -> None:
    offsets = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    offsets["weight"]["saved_offsets"] = [0, 0]
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(offsets)


def _of_another(header: dict[str, Any]) -> None:
    ours = json.loads(header["__metadata__"]["ckpt"])
    ours["shapes"]["weight"] = [2 * ROWS, 4]
    header["__metadata__"]["ckpt"] = json.dumps(ours)


def _renamed(header: dict[str, Any]) -> None:
    header["other"] = header.pop("weight")


@pytest.mark.parametrize("change", [_cast, _reshaped, _moved, _of_another, _renamed])
def test_a_piece_of_another_dtype_shape_or_place_is_refused(sharded: Path, change: Change) -> None:
    alter_header(sharded / "model" / "00001.safetensors", change, sharded)
    _refused(sharded, "does not match the checkpoint's shard table|but no file of that rank has it")


def _refused(folder: Path, why: str) -> None:
    """Neither loaded, whole or in part, nor merged; and nothing is changed by the try."""
    model = nn.Linear(4, ROWS)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with ckpt.StateManager(folder.parent, model=model) as manager:
        for strict in (True, False):
            with pytest.raises(DamagedError, match=why):
                manager.load_state("a", strict=strict)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(DamagedError):
        ckpt.merge(folder, folder.parent / "out.safetensors")
    assert not (folder.parent / "out.safetensors").exists()


def test_a_table_of_more_shards_than_files_have_room_for_is_not_gone_through(sharded: Path) -> None:
    ranks = 20_000
    layout = {"mesh": [ranks], "ranks": list(range(ranks)), "placements": ["S0"]}
    table = {
        "layouts": [layout],
        "tensors": {f"t{n}": ["float32", [ranks + n], 0, 0] for n in range(10_000)},
        "aliases": {},
    }
    manifest = Manifest.from_bytes((sharded / FILE_NAME).read_bytes(), "manifest")
    with pytest.raises(DamagedError, match="more shards than the checkpoint's files can hold"):
        ShardTable.from_json(table, replace(manifest, world_size=ranks))


MESHES = [(1,), (2,), (3,), (2, 2), (3, 2), (2, 3), (2, 2, 2)]


class TestCoverage:
    @pytest.mark.parametrize("mesh", MESHES, ids=str)
    def test_a_layout_that_is_accepted_has_every_element_once(self, mesh: tuple[int, ...]) -> None:
        for placements in itertools.product(("R", "S0", "S1", "S0/2", "S0/4"), repeat=len(mesh)):
            fields = {"mesh": list(mesh), "ranks": list(range(math.prod(mesh))), "placements": list(placements)}
            layout = layout_from_json(fields, math.prod(mesh))
            for shape in ((0, 4), (1, 1), (3, 4), (5, 1), (8, 4), (12, 1), (13, 1)):
                try:
                    check_covered(layout, shape)
                except ValueError:
                    assert any("/" in text for text in placements)  # as torch computes them, some strided ones overlap
                    continue
                boxes = list(layout.holders(shape, 0).values())
                counted = [point for box in boxes for point in _points(box)]
                assert sorted(counted) == list(itertools.product(*map(range, shape))), (mesh, placements, shape)
                assert count_shards(layout, shape) <= len(boxes)

    def test_the_layout_of_fsdp_over_tensor_parallelism_is_accepted(self) -> None:
        check_covered(Layout((4, 2), tuple(range(8)), ("S0/2", "S0")), (64, 3))
        check_covered(Layout((2, 2), tuple(range(4)), ("S0/2", "S0")), (3, 3))
        check_covered(Layout((2, 2), tuple(range(4)), ("S0/1", "R")), (3, 3))

    @pytest.mark.parametrize(
        ("boxes", "fault"),
        [
            ([], "lacks [0:4, 0:4]"),
            ([Box((0, 0), (4, 4))], ""),
            ([Box((0, 0), (2, 4)), Box((2, 0), (2, 4))], ""),
            ([Box((0, 0), (2, 4)), Box((2, 0), (2, 1)), Box((2, 1), (2, 3))], ""),
            ([Box((0, 0), (2, 4)), Box((2, 0), (2, 3))], "lacks [2:4, 3:4]"),
            ([Box((0, 0), (2, 4)), Box((3, 0), (1, 4))], "lacks [2:3, 0:4]"),
            ([Box((1, 0), (3, 4))], "lacks [0:1, 0:4]"),
            ([Box((0, 0), (3, 4)), Box((2, 0), (2, 4))], "has several pieces at [0:4, 0:4]"),
            ([Box((0, 0), (4, 4)), Box((1, 1), (1, 1))], "has several pieces at [0:4, 0:4]"),
            ([Box((0, 0), (5, 4))], "has a piece outside it, [0:5, 0:4]"),
            ([Box((0, 0), (4, 4)), Box((9, 0), (1, 4))], "has a piece outside it, [9:10, 0:4]"),
            ([Box((0,), (4,))], "has a piece outside it, [0:4]"),
            ([Box((0, 0), (4, 4)), Box((9, 9), (0, 4))], ""),
        ],
    )
    def test_what_is_missing_or_twice_is_named(self, boxes: list[Box], fault: str) -> None:
        assert str(find_fault(boxes, Box((0, 0), (4, 4))) or "") == fault

    def test_a_tensor_without_dimensions_or_elements_has_its_pieces_too(self) -> None:
        assert find_fault([Box((), ())], Box((), ())) is None
        assert find_fault([], Box((), ())) is not None
        assert find_fault([], Box((0, 0), (0, 4))) is None

    def test_many_boxes_that_interlock_are_not_gone_through_forever(self) -> None:
        spiral = [Box((n, n), (1, 4000 - 2 * n)) for n in range(2000)] + [Box((n + 1, n), (1, 1)) for n in range(1999)]
        assert find_fault(spiral, Box((0, 0), (4000, 4000))) is not None


def _points(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(start, start + size) for start, size in box.ranges)))


def test_a_save_refuses_shards_of_which_pytorch_does_not_say_where_they_are() -> None:
    uneven = Layout((3, 2), tuple(range(6)), ("S0/2", "S0"))
    even = {"even": ShardSpec(torch.float32, (12, 4), uneven)}
    refuse_overlapping(even)
    with pytest.raises(UnsupportedError, match=r"uneven: a tensor of shape \[13, 4\] is sharded as S0/2,S0") as raised:
        refuse_overlapping({**even, "uneven": ShardSpec(torch.float32, (13, 4), uneven)})
    assert len(raised.value.problems) == 1
