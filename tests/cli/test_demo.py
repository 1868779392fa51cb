"""`ckpt demo`: real training, a real SIGKILL, and the verdict it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch
from click.testing import CliRunner, Result

import ckpt
from ckpt.cli import demo
from ckpt.cli.main import main
from ckpt.errors import CkptError, ConfigError, LockedError
from ckpt.root.catalog import list_checkpoints
from ckpt.storage import LocalStorage
from tests.helpers.processes import Script

STEPS = 24


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "runs" / "demo"


@pytest.fixture(scope="module")
def done(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Its trainings are processes that really die, but forked from one that has imported torch."""
    log, errors = (tmp_path_factory.mktemp("said") / name for name in ("log", "errors"))

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        with Script(*command[1:], log=log, errors=errors) as running:
            return subprocess.CompletedProcess(command, running.wait(), log.read_text(), errors.read_text())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "subprocess", SimpleNamespace(run=run))
        return CliRunner().invoke(main, ["demo", "--root", str(root), "--steps", str(STEPS)])


@pytest.mark.slow
def test_a_killed_and_resumed_run_ends_bit_identical(done: Result) -> None:
    assert done.exit_code == 0, done.output
    assert f"BIT-IDENTICAL: weights, optimizer, generators and all {STEPS} losses." in done.stdout
    assert "step-00000015 was interrupted; the new process resumed from step-00000012." in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_the_demo_shows_the_checkpoint_that_was_cut_off(done: Result) -> None:
    assert re.search(r"^step-00000015 .* uncommitted: was never committed$", done.stdout, re.MULTILINE)
    assert re.search(r"kB  \.model\.safetensors\.\w+\.ckpt-tmp$", done.stdout, re.MULTILINE)
    assert re.search(r"bytes  \.optimizer\.safetensors\.\w+\.ckpt-tmp$", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_the_demo_shows_both_losses_side_by_side(done: Result) -> None:
    rows = re.findall(r"^ +(\d+) +(\d+\.\d{8}) +(\d+\.\d{8})", done.stdout, re.MULTILINE)
    assert [int(step) for step, _, _ in rows] == [1, 3, 6, 9, 12, 15, 18, 21, 24]
    assert all(straight == resumed for _, straight, resumed in rows)
    assert re.search(r"^ +12 .*<- resumed from here$", done.stdout, re.MULTILINE)
    assert re.search(r"^ +15 .*<- killed while saving this$", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_the_demo_is_plain_in_a_pipe(done: Result) -> None:
    assert "\x1b" not in done.stdout


@pytest.mark.slow
def test_the_bytes_of_both_last_checkpoints_are_the_same(root: Path, done: Result) -> None:
    straight, resumed = (list_checkpoints(root / name)[0] for name in (demo.STRAIGHT, demo.INTERRUPTED))
    assert straight.manifest is not None
    assert resumed.manifest is not None
    first, second = (
        [replace(file, path=file.name) for file in one.files] for one in (straight.manifest, resumed.manifest)
    )
    assert first == second
    assert straight.manifest.step == STEPS


def test_a_difference_in_a_loss_or_in_a_file_is_loud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = demo.Demo(str(tmp_path), STEPS)
    for name in (demo.STRAIGHT, demo.INTERRUPTED):
        torch.manual_seed(0)
        with ckpt.StateManager(here.folder(name), model=torch.nn.Linear(2, 2)) as manager:
            manager.save_state("last", wait=True)
    losses = {step: 1.0 / step for step in range(1, STEPS + 1)}
    capsys.readouterr()
    assert here.compare(losses, losses, 12)
    said = capsys.readouterr().out
    assert said.count("identical") == 3
    assert "BIT-IDENTICAL" in said
    with click.Context(click.Command("demo"), color=True):
        assert not here.compare(losses, losses | {STEPS: 0.0}, 12)
    said = capsys.readouterr().out
    assert "NOT IDENTICAL" in said
    assert said.count("\x1b[31m") == 2  # the loss and the verdict
    (tmp_path / demo.STRAIGHT / "last" / "state.json").write_text("{}")
    assert not here.compare(losses, losses, 12)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "DIFFERENT" in line] == ["state.json"]


def test_the_demo_replaces_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / demo.MARKER).touch()
    (tmp_path / "mine.txt").write_text("stays")
    (tmp_path / demo.STRAIGHT / "old").mkdir(parents=True)
    demo.Demo(str(tmp_path), STEPS).check_root()
    demo.Demo(str(tmp_path), STEPS).clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == [demo.MARKER, "mine.txt"]


@pytest.mark.slow
def test_the_demo_touches_no_directory_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / demo.STRAIGHT).mkdir()
    command = [sys.executable, "-m", "ckpt", "demo", "--root", str(tmp_path), "--steps", str(STEPS)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"ckpt: {tmp_path} has files that are not from an earlier demo.")
    assert (tmp_path / demo.STRAIGHT).is_dir()


def test_the_demo_follows_no_link_when_it_clears(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = tmp_path / "demo"
    root.mkdir()
    (root / demo.STRAIGHT).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="can't remove"):
        demo.Demo(str(root), STEPS).clear()
    assert elsewhere.is_dir()


def test_the_demo_refuses_a_url() -> None:
    with pytest.raises(ConfigError, match="a folder on this machine"):
        demo.Demo("memory://demo", STEPS).run()


def test_two_demos_do_not_run_in_one_place(tmp_path: Path) -> None:
    with LocalStorage(tmp_path).lock(demo.MARKER), pytest.raises(LockedError):
        demo.Demo(str(tmp_path), STEPS).run()


@pytest.mark.slow
def test_a_training_that_fails_is_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CkptError, match="ended with status 2 instead of 0"):
        demo.Demo(str(tmp_path), STEPS)._train("x", "--no-such-option")
    assert "No such option" in capsys.readouterr().err
