"""The descriptions of ranks: each distinct one is sent once, and the main rank has all of them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt.formats.layout import Layout
from ckpt.formats.native.shard_table import ShardedState, ShardSpec, ShardTable
from ckpt.formats.tensors import PartState, Shard
from ckpt.save import rank_description
from ckpt.save.rank_description import TIED, RankDescription, SplitDetails, join_details
from ckpt.save.rank_differences import unite_parts


def details(stage: int, rank: int) -> dict[str, Any]:
    names = [f"layers.{stage}.weight", f"layers.{stage}.bias"]
    whole = {"class": "M", "values": "v", "how": "whole", "sums": {}, "pieces": {}}
    spread = {"class": "M", "values": "w", "how": "spread", "tensors": {}}
    return {
        "parts": {
            "norm": {**whole, "tensors": {"mean": ["float32", [2], f"sum-{rank}"], "base": ["", [], None]}},
            "model": {**spread, "sums": {names[1]: "same"}, "pieces": {names[0]: f"piece-{rank}"}},
        },
        "tables": {"model": {"written": "in pieces", "tensors": {name: [] for name in names}}},
        "layouts": {"model": {names[0]: {"ranks": [stage]}}},
        "kept": {"model": names},
        "trees": {"model": dict.fromkeys(names, 1)},
    }


def test_one_rank_of_each_kind_sends_its_description_and_the_main_rank_has_all() -> None:
    everything = [details(stage=rank // 4, rank=rank) for rank in range(8)]
    split = [SplitDetails.of(each) for each in everything]
    digests = [each.digest for each in split]
    speakers = [digests.index(digest) for digest in dict.fromkeys(digests)]
    assert speakers == [0, 4]
    answers = [each.answer(speaks=rank in speakers, attended=True) for rank, each in enumerate(split)]
    assert ["frame" in answer for answer in answers] == [rank in (0, 4) for rank in range(8)]
    assert join_details(json.loads(json.dumps(answers))) == [{**each, "attended": True} for each in everything]


def test_a_description_that_differs_in_anything_but_checksums_is_sent() -> None:
    other = details(0, 1)
    other["parts"]["norm"]["tensors"]["mean"][1] = [3]
    assert SplitDetails.of(other).digest != SplitDetails.of(details(0, 1)).digest
    assert SplitDetails.of(details(0, 1)).digest == SplitDetails.of(details(0, 2)).digest


def test_a_rank_describes_plain_tensors_apart_from_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    class Piece(torch.Tensor):
        """Stands for a shard on a mesh."""

    everywhere, mesh = Layout.replicated(4), Layout((2, 2), (0, 1, 2, 3), ("R", "S0"))
    monkeypatch.setattr(rank_description, "is_sharded", lambda tensor: isinstance(tensor, Piece))
    monkeypatch.setattr(rank_description, "own_layout", lambda tensor: mesh)
    tensors = {"plain": torch.ones(2), **{name: torch.ones(2).as_subclass(Piece) for name in ("w", "sure")}}
    specs = {"plain": ShardSpec(torch.float32, (2,), everywhere)}
    specs |= {name: ShardSpec(torch.float32, (4,), mesh) for name in ("w", "sure")}
    spread = ShardedState("M", {"v": 1}, ShardTable(specs), tensors)
    norm = PartState("N", {"n": 1}, {name: Shard(torch.ones(3), (3,), (0,)) for name in ("mean", "known", "alias")})
    of_main = PartState("X", {}, {})
    guarantee = SimpleNamespace(of_main=False, equal={"known"}, is_uncertain=lambda name: name != "known")
    sums = {("model", "plain"): "p", ("model", "w"): "s", ("norm", "mean"): "m", ("norm", "base"): "b"}
    captured: Any = SimpleNamespace(
        rank=3, parts={"norm": norm, "main": of_main}, sharded={"model": spread}, gathered={}, divisible={"norm"},
        guarantees={"norm": guarantee, "model": guarantee, "main": SimpleNamespace(of_main=True)},
        fingerprints=lambda: sums, tables_digest="t", tables={"model": {}}, announced={"b", "a"}, trusted=True,
        is_uncertain=lambda key: lambda name: name != "sure",
        replicas={"norm": SimpleNamespace(stored=["mean"])}, shards={"model": {"w": 1}, "norm": {"extra": 1}},
    )  # fmt: skip
    described = RankDescription(captured)
    assert described.parts.keys() == {"norm", "model"}
    assert described.parts["norm"]["how"] == "whole"
    assert described.parts["norm"]["tensors"] == {
        "mean": ["float32", [3], "m"], "known": ["float32", [3], None], "alias": ["float32", [3], TIED],
        "base": ["", [], "b"],
    }  # fmt: skip
    assert (described.parts["norm"]["sums"], described.parts["norm"]["pieces"]) == ({}, {})
    model = described.parts["model"]
    assert (model["how"], model["tensors"]) == ("spread", {})
    assert (model["sums"], model["pieces"]) == ({"plain": "p"}, {"w": "s"})
    told = described.details
    assert told["layouts"].keys() == {"model"}
    assert told["layouts"]["model"].keys() == {"w"}
    assert told["trees"] == {"norm": {"n": 1}}
    assert (told["equal"], told["announced"], told["trusted"]) == ({"norm": ["known"]}, ["a", "b"], True)
    assert told["kept"] == {"norm": ["mean", "extra"], "model": ["w"]}
    outline = described.outline
    assert len(outline["pieces"]) == 1
    sums["model", "w"] = "other"
    changed = RankDescription(captured).outline
    assert (changed["state"], changed["pieces"].keys()) == (outline["state"], outline["pieces"].keys())
    assert changed != outline
    captured.rank = 2  # holds the other half
    assert RankDescription(captured).outline["pieces"].keys() != outline["pieces"].keys()
    sums["model", "plain"] = "q"
    assert RankDescription(captured).outline["state"] != outline["state"]


def shards(tensors: dict[str, Layout]) -> dict[str, Any]:
    """What a rank says of a model of which it holds shards of these tensors."""
    table = ShardTable({name: ShardSpec(torch.float32, (4, 4), layout) for name, layout in tensors.items()})
    part = {"class": "M", "how": "spread", "tensors": {}, "sums": {}, "pieces": {}}
    tree = {name: {"$tensor": name} for name in tensors}
    return {
        "parts": {"model": part}, "tables": {"model": table.to_json()}, "layouts": {}, "trees": {"model": tree},
        "announced": [], "equal": {},
    }  # fmt: skip


def test_a_tensor_of_which_a_rank_of_its_mesh_holds_no_shard_is_not_taken_as_whole() -> None:
    first, second = Layout((2,), (0, 1), ("S0",)), Layout.of_one(1)
    whole = unite_parts([shards({"a": first}), shards({"a": first, "b": second})])
    assert set(whole["model"].table.tensors) == {"a", "b"}
    assert unite_parts([shards({"a": first}), shards({"b": second})]) == {}


def test_a_tensor_that_is_cut_in_another_way_is_no_copy() -> None:
    rows, columns = Layout((2,), (0, 1), ("S0",)), Layout((2,), (2, 3), ("S1",))
    other_rows, own = Layout((2,), (2, 3), ("S0",)), Layout.of_one(3)

    def others(second: Layout) -> dict[int, list[str]]:
        ranks = [{"a": rows}, {"a": rows}, {"a": second}, {"a": second, "b": own}]
        return unite_parts([shards(tensors) for tensors in ranks])["model"].others

    assert others(other_rows) == {}
    assert others(columns) == {2: ["a"], 3: ["a"]}


def test_a_copy_of_which_one_shard_differs_is_another_one() -> None:
    rows, replica = Layout((2,), (0, 1), ("S0",)), Layout((2,), (2, 3), ("S0",))

    def others(checksum: str) -> dict[int, list[str]]:
        ranks = [shards({"a": rows}), shards({"a": rows}), shards({"a": replica}), shards({"a": replica, "b": own})]
        for described, value in zip(ranks, ("1", "2", "1", checksum), strict=True):
            described["parts"]["model"]["pieces"] = {"a": value}
        return unite_parts(ranks)["model"].others

    own = Layout.of_one(3)
    assert others("2") == {}
    assert others("9") == {2: ["a"], 3: ["a"]}
