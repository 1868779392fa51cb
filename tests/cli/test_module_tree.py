"""`ckpt show` shows modules as a tree, whatever a file claims."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.cli.show import Module, tree_lines
from ckpt.formats.native.header import Outline

WEIGHT = Outline("float32", (4, 2))


def lines(names: list[str], depth: int = 9) -> list[str]:
    return [line.rstrip() for line in tree_lines("model", dict.fromkeys(names, WEIGHT), depth)][1:]


def test_numbered_modules_that_are_equal_are_one_line_with_all_their_parameters() -> None:
    found = lines([f"h.{layer}.{name}" for layer in range(12) for name in ("a.weight", "b.weight")])
    assert [line.split() for line in found] == [
        ["h", "192", "768", "bytes", "float32"],
        ["0-11", "(12", "equal)", "192", "768", "bytes", "float32"],
        ["a", "96", "384", "bytes", "float32"],
        ["weight", "96", "384", "bytes", "float32", "[4,", "2]"],
        ["b", "96", "384", "bytes", "float32"],
        ["weight", "96", "384", "bytes", "float32", "[4,", "2]"],
    ]


def test_what_is_not_equal_or_not_next_is_not_folded() -> None:
    names = ["0.w", "1.w", "2.other", "4.w", "5.w"]
    assert [name for name, _ in Module.of(dict.fromkeys(names, WEIGHT)).folded()] == ["0-1", "2", "4-5"]


def test_tied_tensors_count_once() -> None:
    tensors = {"embed.weight": WEIGHT, "head.weight": Outline("float32", (4, 2), tied=True)}
    found = [line.split() for line in tree_lines("model", tensors, 2)][1:]
    assert [row[1] for row in found] == ["8", "8", "0", "0"]
    assert found[-1][2] == "tied"


def test_names_that_no_module_has_do_no_harm() -> None:
    deep = ".".join(["x"] * 100_000)
    assert len(lines([deep, "." * 1000, "9" * 5000 + ".w", "²." + "w", ""], depth=100)) > 60


def test_the_command_shows_it_to_a_depth(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)))
    with ckpt.StateManager(tmp_path, model=model) as manager:
        manager.save_state("a", wait=True)
    shown = {
        depth: CliRunner().invoke(main, ["show", str(tmp_path), "--depth", str(depth)]).output for depth in (0, 1, 2)
    }
    assert "(3 equal)" not in shown[0]
    assert "0-2  (3 equal)" in shown[1]
    assert len(shown[0].splitlines()) < len(shown[1].splitlines()) < len(shown[2].splitlines())
