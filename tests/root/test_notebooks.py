"""What a notebook shows of checkpoints, lists of them, what was restored, and the manager."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ckpt
from ckpt.data.progress import Progress
from ckpt.load.load_state import Restored


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
            f"resumed from {root}/a: step 7, epoch 0, batch 0, 0 samples",
            "restored",
            "model, rng, progress",
        ]
        manager.values["best"] = 0.25
        assert {f"StateManager of {root}", "model", "{'best': 0.25}", "7"} <= set(cells(manager))


def test_whatever_a_file_says_is_text_and_no_markup(root: Path) -> None:
    hostile = "<script>alert(1)</script><img src=x>\x1b[31m"
    restored = Restored(name="a", url=hostile, run="", progress=Progress(), skipped={hostile: hostile})
    listed = ckpt.list_checkpoints(root)
    listed[0] = replace(listed[0], name=hostile, url=hostile)
    for html in (restored._repr_html_(), listed._repr_html_(), listed[0]._repr_html_()):
        assert Cells(html).tags <= {"div", "b", "table", "tr", "td", "th"}
        assert "\x1b" not in html
