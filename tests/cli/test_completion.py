"""What a shell offers: the names of checkpoints in a root, on a disk or at a URL, and paths elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from torch import nn

import ckpt
from ckpt.cli.main import COMMANDS, main


def offered(*words: str) -> list[tuple[str, str]]:
    completion = ShellComplete(main, {}, "ckpt", "_CKPT_COMPLETE")
    return [(item.type, str(item.value)) for item in completion.get_completions(list(words[:-1]), words[-1])]


@pytest.fixture(params=["", "memory://"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    found = f"{request.param}runs/{tmp_path.name}"
    with ckpt.StateManager(found, model=nn.Linear(1, 1)) as manager:
        for step in (10, 20):
            manager.progress.step = step
            manager.save_state(f"step-{step}")
    (tmp_path / "runs" / "other").mkdir(parents=True, exist_ok=True)
    return found


def test_checkpoints_of_a_root_are_offered_the_newest_first(root: str) -> None:
    assert offered("show", f"{root}/") == [("plain", f"{root}/step-20"), ("plain", f"{root}/step-10")]
    assert offered("diff", f"{root}/step-10", f"{root}/step-2") == [("plain", f"{root}/step-20")]
    assert offered("verify", f"{root}/step-1") == [("plain", f"{root}/step-10")]


def test_elsewhere_the_shell_completes_paths(root: str) -> None:
    assert offered("ls", "run") == [("file", "run")]
    assert offered("ls", "runs/") == [("file", "runs/")]
    assert offered("ls", "nowhere/x") == [("file", "nowhere/x")]
    assert offered("ls", "s3:/typo/") == [("file", "s3:/typo/")]


def test_commands_and_options_are_offered() -> None:
    assert {value for _, value in offered("")} == COMMANDS.keys()
    assert ("plain", "--to") in offered("convert", "--t")
    assert ("plain", "lightning") in offered("convert", "a", "b", "--to", "l")
