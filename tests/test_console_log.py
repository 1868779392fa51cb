"""What ckpt says goes through its logger: heard by default, and switched off, routed or made verbose as any logger."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TRAINING = """
import torch, ckpt
with ckpt.StateManager("runs", model=torch.nn.Linear(2, 2), follow=False, save_every=1) as manager:
    manager.resume()
    manager.step()
"""
SAVED = r"saved .*runs/step-00000001: \d.* kB, training waited \d\.\d\d s, durable after \d\.\d\d s"


def said(folder: Path, before: str = "", after: str = "", **environment: str) -> list[str]:
    """The lines on standard error of a new process."""
    code = f"import logging, sys\n{before}\n{TRAINING}\n{after}"
    path = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", **environment},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout == ""
    return done.stderr.splitlines()


def matches(lines: list[str], *patterns: str) -> bool:
    return len(lines) == len(patterns) and all(map(re.fullmatch, patterns, lines))


def test_one_line_is_said_of_a_resume_and_of_a_save(tmp_path: Path) -> None:
    assert matches(said(tmp_path), "no checkpoint in .*runs: starting afresh", SAVED)
    assert matches(
        said(tmp_path)[:2], r"resumed from runs/step-00000001: step 1, .*", " +restored +model, rng, progress"
    )


def test_a_level_switches_them_off_and_leaves_warnings(tmp_path: Path) -> None:
    quiet = 'logging.getLogger("ckpt").setLevel("WARNING")'
    assert said(tmp_path, quiet, 'logging.getLogger("ckpt").warning("still heard")') == ["still heard"]


@pytest.mark.parametrize(("chosen", "lines"), [("warning", ["w"]), ("error", []), ("off", []), ("WARNING", ["w"])])
def test_so_does_the_environment(tmp_path: Path, chosen: str, lines: list[str]) -> None:
    assert said(tmp_path, after='logging.getLogger("ckpt").warning("w")', CKPT_LOG=chosen) == lines


def test_an_unknown_word_in_the_environment_is_named(tmp_path: Path) -> None:
    first, *rest = said(tmp_path, CKPT_LOG="quiet")
    assert first == "CKPT_LOG=quiet is not known: debug, info, warning, error or off."
    assert len(rest) == 2


def test_a_script_that_has_set_logging_up_gets_them_in_its_own_format_and_once(tmp_path: Path) -> None:
    lines = said(tmp_path, 'logging.basicConfig(format="%(levelname)s %(name)s %(message)s")')
    assert matches(lines, "INFO ckpt no checkpoint in .*", f"INFO ckpt {SAVED}")


def test_a_script_that_does_so_after_the_import_too(tmp_path: Path) -> None:
    lines = said(tmp_path, 'import ckpt\nlogging.basicConfig(format="! %(message)s", stream=sys.stderr)')
    assert matches(lines, "! no checkpoint in .*", f"! {SAVED}")


def test_a_log_file_gets_them_beside_the_console(tmp_path: Path) -> None:
    lines = said(tmp_path, 'logging.basicConfig(filename="log", format="%(message)s")')
    assert matches(lines, "no checkpoint in .*", SAVED)
    assert (tmp_path / "log").read_text().splitlines() == lines


def test_a_handler_of_rich_is_a_console(tmp_path: Path) -> None:
    lines = said(tmp_path, "from rich.logging import RichHandler\nlogging.basicConfig(handlers=[RichHandler()])\n"
                           "logging.root.handlers[0].console.file = open('rich', 'w')")  # fmt: skip
    assert lines == []
    assert "starting afresh" in " ".join((tmp_path / "rich").read_text().split())


def test_a_logger_that_passes_nothing_on_is_heard_all_the_same(tmp_path: Path) -> None:
    lines = said(tmp_path, 'logging.basicConfig()\nlogging.getLogger("ckpt").propagate = False')
    assert matches(lines, "no checkpoint in .*", SAVED)


def test_a_closed_standard_error_is_no_error_of_the_training(tmp_path: Path) -> None:
    assert said(tmp_path, "sys.stderr.close(); sys.stderr = None") == []
    assert (tmp_path / "runs" / "step-00000001" / "manifest.json").exists()
