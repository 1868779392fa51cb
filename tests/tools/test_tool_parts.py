"""The pieces of `diff`, `show`, `pull` and `prune`, each rule with its cases."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import ConfigError
from ckpt.formats.native.header import Outline
from ckpt.tools import diff, pull, show
from ckpt.tools.diff import Squares, TensorChange
from ckpt.tools.prune import Pruned, _refuse_nonsense
from ckpt.tools.show import PartSummary


def compared(first: list[float], second: list[float], *dtypes: torch.dtype) -> TensorChange:
    kinds = dtypes or (torch.float32, torch.float32)
    return diff._compare_slabs(torch.tensor(first, dtype=kinds[0]), torch.tensor(second, dtype=kinds[-1]))


class TestDiff:
    def test_elements_differ_by_their_bits_or_by_their_numbers_where_dtypes_do(self) -> None:
        inf, nan = math.inf, math.nan
        assert compared([1, 2], [1, 2]) == TensorChange(0, 0.0, Squares(0.0, 5.0))
        assert compared([1, 2], [1, 5]) == TensorChange(1, 3.0, Squares(9.0, 5.0))
        assert compared([0.0], [-0.0]).elements == 1  # other bits, the same number
        assert compared([0.0], [-0.0]).most == 0.0
        assert compared([1, 2], [1, 3], torch.float32, torch.float16) == TensorChange(1, 1.0, Squares(1.0, 5.0))
        assert compared([1, 2], [1, 2], torch.float32, torch.float16).elements == 0
        assert compared([inf, 1], [inf, 2]).most == 1.0
        assert compared([nan, 1], [nan, 3]).most == 2.0
        assert math.isnan(compared([nan], [1]).most)

    def test_values_are_compared_by_their_paths_and_tensors_are_not_among_them(self) -> None:
        value = {"a": {"b": [1, {"c": 2}], "empty": {}, "none": []}, "t": {"$tensor": "x"}, "d": None}
        assert diff._flatten(value) == {"a.b.0": 1, "a.b.1.c": 2, "a.empty": {}, "a.none": [], "d": None}
        assert diff._flatten(5) == {"": 5}
        assert diff._flatten({"$tensor": "x"}) == {}
        parts = {"parts": {"m": {"class": "C", "state": 1, "spread": 2}, "o": {"state": 3}}}
        both = {"m": {"class": "C", "state": 1}, "o": {"class": "", "state": 3}}
        assert diff._part_values(parts, None) == both
        assert diff._part_values(parts, "o") == {"o": both["o"]}
        assert diff._part_values({}, None) == {}
        assert [len(diff._short("x" * size)) for size in (40, 41, 100)] == [40, 40, 40]
        assert diff._short("x" * 41) == "x" * 37 + "..."

    def test_the_state_of_a_rank_is_compared_by_hashes(self) -> None:
        state: Any = {
            "rng": {"values": {"torch": 1, "numpy": 2}, "tensors": {"torch": "a", "other": "b"}},
            "x": {"values": 5},
        }
        found = diff._rank_hashes("rank-00000", {"state": state})
        assert found.keys() == {"rank-00000.rng.torch", "rank-00000.rng.numpy", "rank-00000.x"}
        assert all(len(digest) == 8 for digest in found.values())
        state["rng"]["tensors"] = {"torch": "c", "other": "b"}
        again = diff._rank_hashes("rank-00000", {"state": state})
        assert {key for key in found if found[key] != again[key]} == {"rank-00000.rng.torch"}

    def test_two_checkpoints_differ_in_these_tensors_and_values(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model: Any = nn.Linear(2, 2)
        model.register_buffer("empty", torch.zeros(0))
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        with ckpt.StateManager(tmp_path, model=model, optimizer=optimizer) as manager:
            manager.save_state("a", wait=True)
            nn.init.constant_(model.bias, 7.0)
            optimizer.param_groups[0]["lr"] = 0.25
            manager.save_state("b", wait=True)
        assert not ckpt.diff(tmp_path / "a", tmp_path / "a")
        found = ckpt.diff(tmp_path / "a", tmp_path / "b")
        assert found
        bias, rate = found.differences
        assert (bias.name, bias.elements, bias.first, bias.is_tensor) == ("model.bias", 2, "float32 [2]", True)
        assert rate.name.endswith("lr")
        assert (rate.first, rate.second, rate.elements, rate.is_tensor) == ("0.5", "0.25", None, False)
        assert [one.name for one in ckpt.diff(tmp_path / "a", tmp_path / "b", part="model").differences] == [
            "model.bias"
        ]
        assert ckpt.diff(tmp_path / "a", tmp_path / "b", part="optimizer").differences == (rate,)
        listed = found.to_json()["differences"]
        assert listed[0].keys() == {"name", "first", "second", "elements", "most", "relative"}
        odd = diff.Difference(name="x", first="", second="", most=math.nan, relative=math.inf)
        assert diff._json_fields(odd) == {
            "name": "x", "first": "", "second": "", "elements": None, "most": "nan", "relative": "inf",
        }  # fmt: skip


class TestShow:
    def test_elements_are_counted_once_and_dtypes_by_tensors(self) -> None:
        tensors = {"a": Outline("F32", (2, 3)), "b": Outline("F32", ()), "c": Outline("I64", (4,), tied=True)}
        part = PartSummary("model", "Linear", tensors, 100)
        assert part.elements == 7
        assert part.dtypes == {"F32": 2, "I64": 1}
        assert show._part_to_json(part, tensors=False) == {
            "class": "Linear", "tensors": 3, "elements": 7, "dtypes": {"F32": 2, "I64": 1}, "size": 100, "ranks": None,
        }  # fmt: skip
        assert show._part_to_json(part, tensors=True)["listed"]["a"] == {"dtype": "F32", "shape": [2, 3]}

    def test_parts_of_single_ranks_are_one_part(self) -> None:
        parts = [
            PartSummary("model", size=1), PartSummary("gradients-00000", "first", size=2),
            PartSummary("gradients-00001", size=3), PartSummary("gradients-00002", size=4), PartSummary("x-1", size=5),
        ]  # fmt: skip
        assert show._join_ranks(parts) == [
            PartSummary("model", size=1), PartSummary("gradients", "first", size=9, ranks=3),
            PartSummary("x-1", size=5),
        ]  # fmt: skip

    def test_a_table_of_shards_has_a_dtype_and_a_shape_for_each(self) -> None:
        table = {"tensors": {"a": ["F32", [2, 3], "more"], "b": ["I64", []]}, "aliases": {"c": "a"}}
        assert show._sharded_outlines(table) == {
            "a": Outline("F32", (2, 3)), "b": Outline("I64", ()), "c": Outline("F32", (2, 3), tied=True),
        }  # fmt: skip
        for row in ([5, [1]], ["F32", [-1]], ["F32", "x"]):
            with pytest.raises(ValueError, match="these tensors have no dtype or no shape: bad"):
                show._sharded_outlines({"tensors": {"bad": row, "a": ["F32", []]}, "aliases": {}})


class TestPull:
    def test_a_repository_is_told_from_a_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "user" / "here").mkdir(parents=True)
        known = {
            "hub://user/repo": True, "user/repo": True, "user/here": False, "/user/repo": False, "./user/repo": False,
            "s3://bucket/x": False, "zip::s3://x": False,
        }  # fmt: skip
        assert {where: pull._is_on_the_hub(where) for where in known} == known

    def test_a_revision_takes_the_place_of_the_one_in_the_name(self) -> None:
        names = {
            ("me/it", None): "me/it", ("hub://me/it", "v1"): "me/it@v1", ("me/it@old/sub", "a/b"): "me/it@a%2Fb/sub",
            ("me", "v1"): "me", ("me/it@old", ""): "me/it@old",
        }  # fmt: skip
        assert {given: pull._with_revision(*given) for given in names} == names

    def test_files_that_belong_to_no_checkpoint_are_the_others(self, tmp_path: Path) -> None:
        for path in ("a/manifest.json", "a/model.safetensors", "a/sub/x", "README.md", "b/notes"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text("1")
        assert set(pull._others(tmp_path).files) == {"a/sub/x", "README.md", "b/notes"}
        assert pull._others(tmp_path / "b").files == {}  # no checkpoint is there

    def test_a_file_is_streamed_in_windows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data, done = bytes(range(10)), list[float]()

        def read_into(start: int, target: Any) -> None:
            target[:] = data[start : start + len(target)]

        folder: Any = SimpleNamespace(opened=lambda path: SimpleNamespace(read_into=read_into), files={"x": 10, "y": 0})
        monkeypatch.setattr(pull, "WINDOW", 4)
        assert [bytes(piece) for piece in pull._stream(folder, "x", done.append)] == [data[:4], data[4:8], data[8:]]
        assert done == [4, 4, 2]
        assert list(pull._stream(folder, "y", done.append)) == []

    def test_options_of_the_hub_are_for_the_hub(self, tmp_path: Path) -> None:
        several: list[dict[str, Any]] = [{"revision": "x"}, {"token": "x"}]
        for options in several:
            with pytest.raises(ConfigError, match="revision= and token= are for the Hub"):
                ckpt.pull(tmp_path / "a", tmp_path / "b", **options)


def test_pruning_refuses_nonsense_and_counts_what_it_removed() -> None:
    for grace in (0, 0.0, 1, 5.5):
        _refuse_nonsense(None, grace)
    _refuse_nonsense(ckpt.Keep(last=1), 0)
    with pytest.raises(ConfigError, match=r"prune: keep=3 must be a ckpt\.Keep; grace=-1 must be a number of seconds"):
        _refuse_nonsense(3, -1)
    for wrong in (math.nan, "1", None):
        with pytest.raises(ConfigError, match="grace="):
            _refuse_nonsense(None, wrong)
    assert Pruned(url="x", removed={"a": 1, "b": 2}, swept={"c": 4}).size == 7
