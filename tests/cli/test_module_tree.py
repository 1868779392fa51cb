"""`ckpt show` has one line for the tensors of equal numbered modules, whatever a file claims."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.cli.show import layer_lines
from ckpt.formats.native.header import Outline

WEIGHT = Outline("float32", (4, 2))


def test_tensors_of_numbered_modules_are_one_line_with_all_their_elements() -> None:
    tensors = {f"h.{layer}.{name}.weight": WEIGHT for layer in range(12) for name in "ab"}
    tensors["h.12.a.weight"] = Outline("float32", (2,))
    assert [line.split() for line in layer_lines("model", tensors)][1:] == [
        ["h.*.a.weight", "12", "96", "384", "bytes", "float32", "[4,", "2]"],
        ["h.*.b.weight", "12", "96", "384", "bytes", "float32", "[4,", "2]"],
        ["h.*.a.weight", "1", "2", "8", "bytes", "float32", "[2]"],
    ]


def test_tied_tensors_count_once() -> None:
    tensors = {"embed.weight": WEIGHT, "head.weight": Outline("float32", (4, 2), tied=True)}
    assert [line.split()[2] for line in layer_lines("model", tensors)][1:] == ["8", "0"]


def test_names_that_no_module_has_do_no_harm() -> None:
    names = [".".join(["x"] * 100_000), "." * 1000, "9" * 5000 + ".w", "².w", ""]
    assert len(list(layer_lines("model", dict.fromkeys(names, WEIGHT)))) == 6


def test_the_command_shows_layers_or_every_tensor(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)))
    with ckpt.StateManager(tmp_path, model=model) as manager:
        manager.save_state("a", wait=True)
    shown = CliRunner().invoke(main, ["show", str(tmp_path)]).output
    listed = CliRunner().invoke(main, ["show", str(tmp_path), "--tensors"]).output
    assert "*.*.weight" in shown
    assert "2.1.bias" not in shown
    assert "2.1.bias" in listed
