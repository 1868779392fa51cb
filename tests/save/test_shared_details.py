"""The descriptions of ranks: each distinct one is sent once, and the main rank has all of them."""

from __future__ import annotations

import json
from typing import Any

import torch

from ckpt.formats.layout import Layout
from ckpt.formats.native.shard_table import ShardSpec, ShardTable
from ckpt.ranks.consensus import first_of_each
from ckpt.save.rank_description import SplitDetails, join_details
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
    speakers = first_of_each([each.digest for each in split])
    assert speakers == [0, 4]
    answers = [each.answer(speaks=rank in speakers, attended=True) for rank, each in enumerate(split)]
    assert ["frame" in answer for answer in answers] == [rank in (0, 4) for rank in range(8)]
    assert join_details(json.loads(json.dumps(answers))) == [{**each, "attended": True} for each in everything]


def test_a_description_that_differs_in_anything_but_checksums_is_sent() -> None:
    other = details(0, 1)
    other["parts"]["norm"]["tensors"]["mean"][1] = [3]
    assert SplitDetails.of(other).digest != SplitDetails.of(details(0, 1)).digest
    assert SplitDetails.of(details(0, 1)).digest == SplitDetails.of(details(0, 2)).digest


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
