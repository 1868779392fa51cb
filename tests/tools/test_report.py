"""`ckpt report`: a page about a run."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.tools.report.page import sparkline
from tests.cli.test_main import leave_uncommitted, truncate
from tests.helpers.processes import Script


def save(root: Path, losses: list[float]) -> None:
    with ckpt.StateManager(root, model=nn.Linear(3, 3), save_every=1) as manager:
        manager.resume()
        for loss in losses:
            manager.step(metrics={"loss": loss})


def report(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def markdown(*arguments: object) -> str:
    return report(*arguments, "--format", "md").output


def test_a_page_tells_of_checkpoints_metrics_and_time(tmp_path: Path) -> None:
    save(tmp_path, [4.0, float("nan"), 1.0])
    truncate(tmp_path / "step-00000001" / "model.safetensors")
    leave_uncommitted(tmp_path, "step-00000009")
    text = markdown(tmp_path)
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
    assert re.search(r"(?m)^Damaged: step-00000001 can't be used .*; a restart begins at step-00000003.$", text)


def test_on_a_terminal_it_says_what_matters_and_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    for name, losses in (("a", [4.0, 2.0]), ("b", [1.0])):
        save(tmp_path / name, losses)
    said = report(tmp_path / "a").output.splitlines()
    assert said[0] == "Healthy: finished, at step 2; all 2 checkpoints are complete, by the sizes of files."
    assert said[1].startswith("goodput ")
    assert said[4].split()[3:8] == ["scratch", "0", "to", "2", "0"]
    assert said[7].split() == ["loss", "█▁", "4", "2", "2", "4", "2", "at", "step", "2"]
    both = report(tmp_path / "a", tmp_path / "b").output
    assert re.search(r"(?m)^loss +2; best 2 at step 2 +1; best 1 at step 1$", both)
    page = report(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "page.html").output
    assert page == f"{tmp_path}/page.html\n"
    html = (tmp_path / "page.html").read_text()
    assert "part1" in html
    assert html.count("<svg") == 1
    told = json.loads(report(tmp_path / "b", "--json").output)
    assert [(one["healthy"], one["attempts"][0]["ended"]) for one in told] == [(True, "finished")]
    assert report(tmp_path / "a", f"{tmp_path}/a/", "--format", "md").output == markdown(tmp_path / "a")
    assert report(*[tmp_path / "a"] * 7).exit_code == 1


def test_a_run_that_went_back_is_seen_and_its_curve_is_that_of_the_last_time(tmp_path: Path) -> None:
    save(tmp_path, [5.0, 4.0, 3.0])
    shutil.rmtree(tmp_path / "step-00000003")
    save(tmp_path, [1.0])
    text = markdown(tmp_path)
    assert re.search(r"(?m)^\| 1 \| .* \| scratch \| 0 to 3 \| .* \| finished \| 1 step \|$", text)
    assert re.search(r"(?m)^\| 2 \| .* \| step-00000002 \| 2 to 3 \| .* \| finished \| none \|$", text)
    assert "| loss | █▆▁ | 5 | 1 | 1 | 5 | 1 at step 3 |" in text


def test_it_goes_to_a_file(tmp_path: Path) -> None:
    save(tmp_path / "run", [1.0])
    assert report(tmp_path / "run", "-o", tmp_path / "page.md").output == f"{tmp_path}/page.md\n"
    assert (tmp_path / "page.md").read_text().startswith(f"# {tmp_path}/run\n\nHealthy: ")


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
    assert "| gain | ▁█▅ | 1 | 2 | 1 | 3 | - |" in markdown(tmp_path)
    assert "| 3 at step 2 |" in markdown(tmp_path, "--best", "gain=max")
    result = report(tmp_path, "--best", "loss=min")
    assert (result.exit_code, "no checkpoint has a metric loss. They have: gain." in result.output) == (1, True)
    for wrong in ("gain", "gain=best", "=max"):
        assert report(tmp_path, "--best", wrong).exit_code == 2


TRAINING = """
import os, signal, sys
import ckpt
from torch import nn
root, until, ending = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with ckpt.StateManager(root, model=nn.Linear(2, 2), save_every=4) as manager:
    for _ in manager.epochs(1):
        for _ in manager.batches(range(20)):
            manager.step(metrics={"loss": 1 / (1 + manager.progress.step)})
            if manager.progress.step == until:
                manager.wait()
                if ending == "raises":
                    raise RuntimeError("first line\\nno <memory>")
                os.kill(os.getpid(), getattr(signal, ending))
"""


@pytest.mark.slow
def test_each_end_of_a_real_process_is_named(tmp_path: Path) -> None:
    root = tmp_path / "run"
    codes = []
    for until, ending in ((6, "SIGKILL"), (6, "SIGTERM"), (10, "raises"), (0, "none")):
        with Script("-c", TRAINING, root, str(until), ending, log=tmp_path / "log") as script:
            codes.append(script.wait(120))
        if ending == "SIGKILL":
            assert report(root).output.startswith("Killed after step ")
        if ending == "raises":
            assert report(root).output.startswith(
                "Failed after step 10: RuntimeError: first line no <memory>; a restart begins at step-00000008, 2 steps"
            )
    assert codes[0] == -signal.SIGKILL
    assert codes[3] == 0
    (told,) = json.loads(report(root, "--json").output)
    attempts = [(one["from"], one["first"], one["ended"]) for one in told["attempts"]]
    assert attempts == [
        (None, 0, "killed"),
        ("step-00000004", 4, "stopped by SIGTERM"),
        ("step-00000007", 7, "failed: RuntimeError: first line no <memory>"),
        ("step-00000008", 8, "finished"),
    ]
    assert [one["lost_steps"] for one in told["attempts"]][1:] == [0, 2, 0]
    assert told["healthy"]
    assert told["metrics"]["loss"]["step"] == 20
    assert (0 < told["goodput"]["share"] < 1, told["goodput"]["attempts"]) == (True, 4)
