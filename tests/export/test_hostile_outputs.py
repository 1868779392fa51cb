"""Output is written beside where it will be, in a folder that others may write to: nothing of theirs is touched."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import ckpt
from ckpt.errors import LockedError
from ckpt.export.folders import atomic_folder, scratch_folder

TOKEN = "0" * 12
PLANTED = [".out.ckpt-tmp", ".out.old.ckpt-tmp", f".out.{TOKEN}.ckpt-tmp", f".out.old.{TOKEN}.ckpt-tmp"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with ckpt.StateManager(tmp_path / "run", model=nn.Linear(2, 2)) as manager:
        manager.save_state("saved")
    return tmp_path / "run"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    victim = tmp_path / "victim"
    (victim / "below").mkdir(parents=True)
    (victim / "below" / "file").write_bytes(b"mine")
    return victim


def save_model(run: Path, out: Path) -> None:
    with ckpt.StateManager(run, model=nn.Linear(2, 2)) as manager:
        manager.save_model(out)


def merge(run: Path, out: Path) -> None:
    ckpt.merge(run / "saved", out / "model.safetensors")


def convert(run: Path, out: Path) -> None:
    ckpt.convert(run / "saved", out, to="accelerate")


def pull(run: Path, out: Path) -> None:
    merge(run, run.parent / "plain")
    ckpt.pull(run.parent / "plain", out)


@pytest.mark.parametrize("write", [save_model, merge, convert, pull])
def test_links_at_the_names_of_temporary_folders_are_left_alone(
    tmp_path: Path, run: Path, victim: Path, write: Callable[[Path, Path], None]
) -> None:
    for name in PLANTED:
        (tmp_path / name).symlink_to(victim)
    write(run, tmp_path / "out")
    assert any((tmp_path / "out").iterdir())
    assert (victim / "below" / "file").read_bytes() == b"mine"
    assert [(tmp_path / name).readlink() for name in PLANTED] == [victim] * len(PLANTED)


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_what_is_no_folder_at_the_names_of_temporary_folders_is_left_alone(tmp_path: Path, kind: str) -> None:
    for name in PLANTED:
        os.mkfifo(tmp_path / name) if kind == "pipe" else (tmp_path / name).write_bytes(b"mine")
    with atomic_folder(tmp_path / "out", over=True) as new:
        (new / "file").write_bytes(b"ours")
    assert {path.name for path in tmp_path.iterdir()} == {"out", *PLANTED}


def test_what_a_link_in_a_leftover_leads_to_is_not_removed(tmp_path: Path, victim: Path) -> None:
    for name in PLANTED[2:]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "link").symlink_to(victim)
    (tmp_path / "out").mkdir()
    with atomic_folder(tmp_path / "out", over=True):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"out", "victim"}
    assert (victim / "below" / "file").read_bytes() == b"mine"


def test_the_temporary_folder_has_another_name_every_time(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "a" / "out") as first, atomic_folder(tmp_path / "b" / "out") as second:
        assert first.name != second.name


def test_two_at_work_on_one_folder_do_not_remove_each_others_files(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out") as first:
        (first / "file").write_bytes(b"ours")
        with pytest.raises(LockedError, match="another process is writing"), atomic_folder(tmp_path / "out"):
            pass
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_a_folder_that_appears_meanwhile_is_replaced(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out") as new:
        (new / "file").write_bytes(b"ours")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "other").write_bytes(b"theirs")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"file", "other"}
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_scratch_folders_of_others_are_not_removed(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "ckpt-push-link").symlink_to(victim)
    (tmp_path / "ckpt-push-left").mkdir()
    (tmp_path / "ckpt-push-held").mkdir()
    held = os.open(tmp_path / "ckpt-push-held", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with scratch_folder():
        pass
    os.close(held)
    assert {path.name for path in tmp_path.iterdir()} == {"victim", "ckpt-push-link", "ckpt-push-held"}
    assert (victim / "below" / "file").read_bytes() == b"mine"


def test_an_index_with_a_hole_of_a_terabyte_is_refused_before_it_is_read(tmp_path: Path, run: Path) -> None:
    merge(run, tmp_path / "model")
    with open(tmp_path / "model" / "model.safetensors.index.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ckpt.DamagedError, match=r"index\.json is damaged: it is larger than"):
        ckpt.merge(tmp_path / "model", tmp_path / "out" / "model.safetensors")
