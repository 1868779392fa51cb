"""What a notebook shows: checkpoints, lists of them, what was restored, verified, compared and pruned; the manager."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.data.progress import Progress
from ckpt.load.load_state import Restored
from ckpt.root.verify import Verified
from ckpt.tools.diff import Diff, Difference
from ckpt.tools.prune import Pruned
from ckpt.util.console import format_size


class Cells(HTMLParser):
    """The texts of all cells, and the names of all tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def cells(shown: Any) -> list[str]:
    return Cells(shown._repr_html_()).texts


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with ckpt.StateManager(tmp_path / "run", model=nn.Linear(2, 2)) as manager:
        manager.progress.step = 7
        manager.save_state("a", metrics={"loss": 0.5})
        manager.save_state("b")
    return tmp_path / "run"


def test_a_list_of_checkpoints_is_a_table(root: Path) -> None:
    found = ckpt.list_checkpoints(root)
    assert [checkpoint.name for checkpoint in found] == ["b", "a"]
    texts = cells(found)
    assert texts[0] == "2 checkpoints"
    assert texts[1:7] == ["name", "step", "size", "saved", "metrics", "state"]
    assert {"a", "b", "7", "loss 0.5", "committed"} <= set(texts)


def test_a_checkpoint_that_is_not_committed_says_why(root: Path) -> None:
    for name in ("manifest.json", "manifest.copy.json"):
        (root / "b" / name).unlink()
    assert any("manifest" in text for text in cells(ckpt.list_checkpoints(root)[-1]))


def test_what_was_restored_is_what_is_printed(root: Path) -> None:
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        restored = manager.load_state("a")
        assert cells(restored)[:3] == [
            f"resumed from {root}/a: step 7, epoch 0, batch 0",
            "restored",
            "model, rng, progress",
        ]
        manager.values["best"] = 0.25
        assert {f"StateManager of {root}", "model", "{'best': 0.25}", "7"} <= set(cells(manager))


def test_what_was_verified_is_a_dict_and_a_table(root: Path) -> None:
    (root / "a" / "model.safetensors").write_bytes(b"")
    found = ckpt.verify(root)
    (problem,) = found["a"]
    assert found == {"a": [problem], "b": []}
    assert {**found} == json.loads(json.dumps(found))
    assert cells(found) == ["verified", "name", "problems", "b", "none: every byte is intact", "a", problem]


def test_what_differs_is_a_table(root: Path) -> None:
    other = nn.Linear(2, 2)
    ckpt.load_model(root / "a", other)
    with torch.no_grad():
        other.bias[0] += 1
    title, *texts = cells(ckpt.diff(root / "a", other))
    assert title == f"{root}/a and Linear: 1 difference"
    assert texts[:6] == ["name", "first", "second", "elements", "at most by", "relative"]
    assert texts[6:11] == ["model.bias", "float32 [2]", "float32 [2]", "1", "1"]
    values = Diff(first="a", second="b", differences=(Difference(name="epoch", first="1", second="2"),))
    assert cells(values)[7:] == ["epoch", "1", "2"]
    assert cells(ckpt.diff(root / "a", root / "b")) == [f"{root}/a and {root}/b: no difference"]


def test_what_was_pruned_is_a_table(root: Path) -> None:
    found = ckpt.prune(root, keep=ckpt.Keep(last=1))
    size = format_size(found.removed["a"])
    assert cells(found) == [str(root), "name", "size", "why", "remove", "a", size, "keep", "b"]
    left = Pruned(url="r", swept={"x": 5}, kept=("c",), damaged={"c": "cut"}, spared={"y": "is being read"})
    assert cells(left)[4:] == [
        "sweep", "x", "5 bytes", "left by an interrupted save", "leave", "y", "is being read",
        "keep", "c", "damaged, and not counted: cut",
    ]  # fmt: skip


def test_whatever_a_file_says_is_text_and_no_markup(root: Path) -> None:
    hostile = "<script>alert(1)</script><img src=x>\x1b[31m"
    restored = Restored(name="a", url=hostile, run="", progress=Progress(), skipped={hostile: hostile})
    listed = ckpt.list_checkpoints(root)
    listed[0] = replace(listed[0], name=hostile, url=hostile)
    difference = Difference(name=hostile, first=hostile, second=hostile)
    told: list[Any] = [
        restored,
        listed,
        listed[0],
        Verified({hostile: [hostile]}),
        Diff(first=hostile, second=hostile, differences=(difference,)),
        Pruned(url=hostile, removed={hostile: 1}, damaged={hostile: hostile}, spared={hostile: hostile}),
    ]
    for html in (each._repr_html_() for each in told):
        assert Cells(html).tags <= {"div", "b", "table", "tr", "td", "th"}
        assert "\x1b" not in html
