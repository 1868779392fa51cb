"""`ckpt report`: a page about a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.tools.report.markdown import _sparkline
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
        r"\| checkpoints \| 3, \d+\.\d kB \|",
        r"\| training waited \| \d+\.\d\d s for these, at most \d+\.\d\d s for one \|",
        r"\| loss \| █ ▁ \| 4 \| 1 \| 1 \| 4 \| 1 at step 3 \|",
        r"\| step-00000003 \| 3 \| \S+ \| \d+\.\d kB \| [\d.]+ \w+ \| loss 1 \| \d+\.\d\d s \| \d+\.\d\d s \| yes \|",
        r"\| step-00000001 \| 1 \| .* \| no: model\.safetensors is .* \|",
        r"\| step-00000009 \| - \| .* \| no: step-00000009 was never committed.*",
    ):
        assert re.search(rf"(?m)^{line}$", text), line
    assert "Went back" not in text


def test_a_run_that_went_back_is_seen(tmp_path: Path) -> None:
    with ckpt.StateManager(tmp_path, model=nn.Linear(3, 3)) as manager:
        for name, step in (("a", 5), ("b", 2)):
            manager.progress.step = step
            manager.save_state(name, wait=True)
    assert report(tmp_path).output.endswith("## Went back\n\n- b came after a\n")


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
    assert _sparkline(values) == curve


def test_a_long_curve_is_thinned_out_and_keeps_its_ends() -> None:
    curve = _sparkline([float(value) for value in range(1000)])
    assert len(curve) <= 61
    assert (curve[0], curve[-1]) == ("▁", "█")
