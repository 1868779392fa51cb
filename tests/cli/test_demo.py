"""`ckpt demo`: real training, a real SIGKILL, and the verdict it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

import ckpt
from ckpt.cli import demo
from ckpt.errors import CkptError, ConfigError, LockedError
from ckpt.root.catalog import list_checkpoints
from ckpt.storage import LocalStorage

STEPS = 48


def run_demo(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt", "demo", "--root", str(root), "--steps", str(STEPS)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "runs" / "demo"


@pytest.fixture(scope="module")
def done(root: Path) -> subprocess.CompletedProcess[str]:
    return run_demo(root)


@pytest.mark.slow
def test_a_killed_and_resumed_run_ends_bit_identical(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"BIT-IDENTICAL: weights, optimizer, generators and all {STEPS} losses." in done.stdout
    assert "step-00000030 was cut off; the new process resumed from step-00000024." in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_the_demo_shows_the_checkpoint_that_was_cut_off(done: subprocess.CompletedProcess[str]) -> None:
    assert re.search(r"^step-00000030 .* uncommitted: was never committed$", done.stdout, re.MULTILINE)
    assert re.search(r"kB  \.model\.safetensors\.\w+\.ckpt-tmp$", done.stdout, re.MULTILINE)
    assert re.search(r"bytes  \.optimizer\.safetensors\.\w+\.ckpt-tmp$", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_the_demo_shows_both_losses_side_by_side(done: subprocess.CompletedProcess[str]) -> None:
    rows = re.findall(r"^ +(\d+) +(\d+\.\d{8}) +(\d+\.\d{8})", done.stdout, re.MULTILINE)
    assert [int(step) for step, _, _ in rows] == [1, 6, 12, 18, 24, 30, 36, 42, 48]
    assert all(straight == resumed for _, straight, resumed in rows)
    assert re.search(r"^ +24 .*<- resumed from here$", done.stdout, re.MULTILINE)
    assert re.search(r"^ +30 .*<- killed while saving this$", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_the_demo_is_plain_in_a_pipe(done: subprocess.CompletedProcess[str]) -> None:
    assert "\x1b" not in done.stdout


@pytest.mark.slow
def test_the_bytes_of_both_last_checkpoints_are_the_same(root: Path, done: subprocess.CompletedProcess[str]) -> None:
    straight, resumed = (list_checkpoints(root / name)[0] for name in (demo.STRAIGHT, demo.INTERRUPTED))
    assert straight.manifest is not None
    assert resumed.manifest is not None
    assert straight.manifest.files == resumed.manifest.files
    assert straight.manifest.step == STEPS


@pytest.mark.slow
def test_a_difference_is_loud(
    root: Path, done: subprocess.CompletedProcess[str], capsys: pytest.CaptureFixture[str]
) -> None:
    same = demo.Run({step: 1.0 / step for step in range(1, STEPS + 1)})
    other = demo.Run(same.losses | {STEPS: 0.0})
    assert not demo.show_report(demo.Plan(str(root), STEPS), same, same, other)
    assert "NOT IDENTICAL" in capsys.readouterr().out


@pytest.mark.slow
def test_a_flipped_bit_in_the_weights_is_a_difference(
    root: Path, done: subprocess.CompletedProcess[str], capsys: pytest.CaptureFixture[str]
) -> None:
    weights = root / demo.INTERRUPTED / f"step-{STEPS:08d}-end" / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    try:
        assert not demo.show_last(demo.Plan(str(root), STEPS))
    finally:
        weights.write_bytes(kept)
    assert re.search(r"model\.safetensors .* DIFFERENT", capsys.readouterr().out)


def test_the_demo_replaces_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / demo.MARKER).touch()
    (tmp_path / "mine.txt").write_text("stays")
    (tmp_path / demo.STRAIGHT / "old").mkdir(parents=True)
    demo._check_root(str(tmp_path))
    demo._clear(demo.Plan(str(tmp_path), STEPS))
    assert sorted(path.name for path in tmp_path.iterdir()) == [demo.MARKER, "mine.txt"]


@pytest.mark.slow
def test_the_demo_touches_no_directory_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / demo.STRAIGHT).mkdir()
    refused = run_demo(tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"ckpt: {tmp_path} is not empty and not from an earlier demo.")
    assert (tmp_path / demo.STRAIGHT).is_dir()


def test_the_demo_follows_no_link_when_it_clears(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = tmp_path / "demo"
    root.mkdir()
    (root / demo.STRAIGHT).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="cannot be removed"):
        demo._clear(demo.Plan(str(root), STEPS))
    assert elsewhere.is_dir()


def test_the_demo_refuses_a_url() -> None:
    with pytest.raises(ConfigError, match="plain directory"):
        demo.run("memory://demo", STEPS)


def test_two_demos_do_not_run_in_one_place(tmp_path: Path) -> None:
    with LocalStorage(tmp_path).lock(demo.MARKER), pytest.raises(LockedError):
        demo.run(str(tmp_path), STEPS)


def test_a_training_that_fails_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CkptError, match="ended with status 1, not 0"):
        demo.expect(demo.Run(said="out of luck", status=1), 0)
    assert capsys.readouterr().err == "out of luck\n"


def test_a_loss_that_differs_is_red_among_green_ones(capsys: pytest.CaptureFixture[str]) -> None:
    same = {step: 1.0 / step for step in range(1, STEPS + 1)}
    with click.Context(click.Command("demo"), color=True):
        demo._show_losses(demo.Plan("root", STEPS), same, same | {STEPS: 0.0}, 24)
    _, *equal, last = capsys.readouterr().out.strip().splitlines()
    assert all("\x1b[32m" in line and "\x1b[31m" not in line for line in equal)
    assert "\x1b[31m" in last


def test_both_last_checkpoints_are_shown_file_by_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = demo.Plan(str(tmp_path), STEPS)
    assert (plan.save_every, plan.killed_at, plan.cut_off) == (6, 30, "step-00000030")
    for name in (demo.STRAIGHT, demo.INTERRUPTED):
        torch.manual_seed(0)
        with ckpt.StateManager(plan.folder(name), model=torch.nn.Linear(2, 2)) as manager:
            manager.save_state("last", wait=True)
    capsys.readouterr()
    assert demo.show_last(plan)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "The last checkpoint, last, in both runs:"
    assert [line.split()[0] for line in lines[3:]] == [
        "model.safetensors", "rank-00000.json", "state.json", "manifest.json",
    ]  # fmt: skip
    assert [("identical" in line, "DIFFERENT" in line) for line in lines[3:]] == [(True, False)] * 3 + [(False, False)]
    assert lines[3].endswith("weights, as any tool reads them")
    assert lines[-1].endswith("hashes; written last: the commit")
    (tmp_path / demo.STRAIGHT / "last" / "state.json").write_text("{}")
    assert not demo.show_last(plan)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "DIFFERENT" in line] == ["state.json"]
    straight, killed, resumed = (demo.Run(dict.fromkeys(range(*ends), 1.0)) for ends in ((1, 49), (1, 31), (25, 49)))
    assert not demo.show_report(plan, straight, killed, resumed)  # the losses are the same, and the bytes are not
    assert "step-00000030 was cut off; the new process resumed from step-00000024." in capsys.readouterr().out


def test_what_a_demo_says_at_its_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    demo._show_verdict(48, same=True)
    demo._show_verdict(48, same=False)
    demo._show_next(demo.Plan("a b", STEPS))
    demo._show_done("label", "text")
    monkeypatch.setenv("COLUMNS", "30")
    demo._show_quoted("Said:", "one two three four five six seven eight\nshort")
    assert capsys.readouterr().out == (
        "\nBIT-IDENTICAL: weights, optimizer, generators and all 48 losses.\n"
        "\nNOT IDENTICAL: the resumed run did not end as the straight one. A bug in ckpt!\n"
        "\nThe checkpoints of both runs are in a b. Look at them:\n\n"
        "  ckpt ls 'a b/interrupted'\n  ckpt verify 'a b/interrupted'\n"
        "label                text\n"
        "\nSaid:\n\n  one two three four five six\n                  seven eight\n  short\n"
    )
    assert demo.Run({25: 1.0, 26: 1.0}).began == 24
