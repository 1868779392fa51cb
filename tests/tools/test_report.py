"""`ckpt report`: a page about a run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.formats.native.manifest import Manifest
from ckpt.tools.report.page import sparkline
from tests.cli.test_main import leave_uncommitted, truncate


def save(root: Path, losses: list[float]) -> None:
    with ckpt.StateManager(root, model=nn.Linear(3, 3), save_every=1) as manager:
        manager.resume()
        for loss in losses:
            manager.step(metrics={"loss": loss})


def report(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_a_page_tells_of_checkpoints_metrics_and_time(tmp_path: Path) -> None:
    save(tmp_path, [4.0, float("nan"), 1.0])
    truncate(tmp_path / "step-00000001" / "model.safetensors")
    leave_uncommitted(tmp_path, "step-00000009")
    text = report(tmp_path).output
    for line in (
        rf"# {re.escape(str(tmp_path))}",
        r"\| checkpoints \| 3, \d+\.\d kB, \d+\.\d kB without what is shared \|",
        r"\| training waited \| \d+\.\d\d s for these, at most \d+\.\d\d s for one \|",
        r"\| loss \| █ ▁ \| 4 \| 1 \| 1 \| 4 \| 1 at step 3 \|",
        r"\| step-00000003 \| complete \| 3 \| .* \| \d+\.\d\d s \| \d+\.\d\d s \| 1 \| 1 \|",
        r"\| step-00000001 \| damaged \| 1 \| .* \|",
        r"\| step-00000001 \| damaged \| model\.safetensors is .* \|",
        r"\| step-00000009 \| uncommitted \| step-00000009 was never committed.*",
        r"- loss is not finite at step 2",
    ):
        assert re.search(rf"(?m)^{line}$", text), line
    assert "came after" not in text


def test_a_run_that_went_back_is_seen(tmp_path: Path) -> None:
    with ckpt.StateManager(tmp_path, model=nn.Linear(3, 3)) as manager:
        for name, step in (("a", 5), ("b", 2)):
            manager.progress.step = step
            manager.save_state(name, wait=True)
    assert "- b came after a: the steps between were trained twice\n" in report(tmp_path).output


def test_it_goes_to_a_file(tmp_path: Path) -> None:
    save(tmp_path / "run", [1.0])
    assert report(tmp_path / "run", "-o", tmp_path / "page.md").output == f"{tmp_path}/page.md\n"
    assert (tmp_path / "page.md").read_text().startswith(f"# {tmp_path}/run\n\n|")


def test_where_there_is_nothing_it_says_so(tmp_path: Path) -> None:
    result = report(tmp_path)
    assert result.exit_code == 1
    assert "there are no checkpoints in" in result.output


@pytest.mark.parametrize(
    ("values", "curve"),
    [([1.0], "▁"), ([1.0, 2.0], "▁█"), ([float("nan")], ""), ([float("inf"), 0.0, 7.0, 3.5], " ▁█▅")],
)
def test_curves_are_drawn_in_characters(values: list[float], curve: str) -> None:
    assert sparkline(values) == curve


def test_a_long_curve_is_thinned_out_and_keeps_its_ends() -> None:
    curve = sparkline([float(value) for value in range(1000)])
    assert len(curve) <= 61
    assert (curve[0], curve[-1]) == ("▁", "█")


def test_the_best_of_a_metric_is_what_the_user_says(tmp_path: Path) -> None:
    with ckpt.StateManager(tmp_path, model=nn.Linear(3, 3), save_every=1) as manager:
        manager.resume()
        for value in (1.0, 3.0, 2.0):
            manager.step(metrics={"gain": value})
    assert "| gain | ▁█▅ | 1 | 2 | 1 | 3 | - |" in report(tmp_path).output
    assert "| 3 at step 2 |" in report(tmp_path, "--best", "gain=max").output
    result = report(tmp_path, "--best", "loss=min")
    assert (result.exit_code, "no checkpoint has a metric loss. They have: gain." in result.output) == (1, True)
    for wrong in ("gain", "gain=best", "=max"):
        assert report(tmp_path, "--best", wrong).exit_code == 2


def test_what_old_manifests_do_not_say_is_concluded_from_the_parent(tmp_path: Path) -> None:
    save(tmp_path, [1.0, 1.0])
    with ckpt.StateManager(tmp_path, model=nn.Linear(3, 3)) as manager:
        manager.load_state("step-00000001")
        manager.save_state("again", wait=True)
    path = tmp_path / "again" / "manifest.json"
    path.write_bytes(replace(Manifest.from_bytes(path.read_bytes(), "it"), resumed={}).to_bytes())
    assert "- restart 1: from step-00000001 (step 1) (as its parent says), saved again" in report(tmp_path).output
