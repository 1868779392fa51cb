"""A save that fails leaves its name usable, its root free, and no doubt about what was committed."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ckpt
from ckpt.storage import ANY, Buffer, open_storage
from tests.helpers.places import Folder, PassedOn, Place, intact


class Unsupported:
    def state_dict(self) -> dict[str, Any]:
        return {"value": self}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TestTheNameOfAFailedSave:
    @pytest.mark.also_on_s3
    def test_after_a_nan_under_keep_best_the_same_name_can_be_saved(self, root: Place) -> None:
        keep = ckpt.Keep(best=1, metric="loss")
        with ckpt.StateManager(root, model=nn.Linear(2, 2), keep=keep) as manager:
            manager.save_state("first", metrics={"loss": 2.0}, wait=True)
            with pytest.raises(ckpt.MetricError, match="NaN"):
                manager.save_state("step-00000100", metrics={"loss": float("nan")}, wait=True)
            assert not (root / "step-00000100").exists()
            manager.save_state("step-00000100", metrics={"loss": 1.0}, wait=True)
        assert ckpt.verify(root)["step-00000100"] == []

    def test_after_an_object_that_cannot_be_saved_the_same_name_can_be_saved(self, root: Place) -> None:
        state = Unsupported()
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
            manager.save_state("first", wait=True)
            manager.register(mine=state)
            with pytest.raises(ckpt.UnsupportedError):
                manager.save_state("latest", wait=True)
            state.state_dict = lambda: {"value": 1}  # type: ignore[method-assign]
            manager.save_state("latest", wait=True)
        assert ckpt.verify(root)["latest"] == []

    @pytest.mark.not_on_s3("an object store has no files where folders should be")
    def test_a_file_where_its_folder_belongs_stays(self, tmp_path: Path) -> None:
        root = Folder(tmp_path / "root")
        (root / "mine").write_bytes(b"notes of a user")
        (root / "held").write_bytes(b"")
        (root / "link").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").touch()
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager, open(root / "held") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            for name in ("mine", "held", "link"):
                with pytest.raises(ckpt.CkptError):
                    manager.save_state(name, wait=True)
        assert (root / "mine").read_bytes() == b"notes of a user"
        assert (root / "held").is_file()
        assert (root / "link").is_symlink()
        assert (tmp_path / "elsewhere").is_file()


class Flaky(PassedOn):
    """A storage that fails once, at the call that is set: before it does what it is asked to, or afterwards."""

    def __init__(self, root: Place | str) -> None:
        super().__init__(root)
        self.fails_to_sweep = False
        self.fails_after_writing = ""
        self.fails_to_read = ""

    def sweep(self, prefix: str = "", *, age: float | None = None) -> None:
        if self.fails_to_sweep and not prefix:
            self.fails_to_sweep = False
            raise ckpt.TransientError("the disk is slow today")
        super().sweep(prefix, age=age)

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        super().write(key, pieces, over=over)
        if self.fails_after_writing and key.endswith(self.fails_after_writing):
            self.fails_after_writing = ""
            raise ckpt.TransientError("the answer was lost")

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if self.fails_to_read and key.endswith(self.fails_to_read):
            self.fails_to_read = ""
            raise ckpt.TransientError("nobody answers")
        return super().read(key, start, stop)


class TestALockOfAFailedResume:
    def test_a_resume_that_fails_in_its_sweep_can_be_called_again(self, root: Place) -> None:
        storage = Flaky(root)
        with ckpt.StateManager(storage, model=nn.Linear(2, 2)) as manager:
            storage.fails_to_sweep = True
            with pytest.raises(ckpt.TransientError, match="slow today"):
                manager.resume()
            with ckpt.StateManager(root, model=nn.Linear(2, 2)) as another:
                another.resume()  # the root is free meanwhile
            assert manager.resume() is None
            manager.save_state("a", wait=True)
        assert ckpt.verify(root) == {"a": []}

    def test_a_resume_whose_mirror_is_taken_leaves_the_root_to_others(self, root: Place, tmp_path: Path) -> None:
        mirror = str(tmp_path / "mirror")
        with (
            open_storage(mirror).lock(".lock", note="another run."),
            ckpt.StateManager(root, model=nn.Linear(2, 2), mirror=mirror) as manager,
        ):
            with pytest.raises(ckpt.LockedError, match=r"another run writes to .*mirror"):
                manager.resume()
            with ckpt.StateManager(root, model=nn.Linear(2, 2)) as another:
                another.resume()


def fail_to_sync(folder: Path, times: int, monkeypatch: pytest.MonkeyPatch, beside: str = "manifest.json") -> list[str]:
    """Let fsync of a folder with a new manifest, say, fail so many times, as a disk that breaks does."""
    real, failed, new = os.fsync, list[str](), folder / beside
    old = new.read_bytes() if new.exists() else b""

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path == str(folder) and new.exists() and new.read_bytes() != old and len(failed) < times:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return failed


@pytest.mark.not_on_s3("an object store has no folders to sync")
class TestAFolderThatCannotBeSynced:
    def test_a_save_whose_commit_is_not_known_to_be_durable_says_exactly_that(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = tmp_path / "root"
        model = nn.Linear(2, 2)
        with ckpt.StateManager(root, model=model, keep=ckpt.Keep(last=1)) as manager:
            manager.save_state("first", wait=True)
            with monkeypatch.context() as patch:
                fail_to_sync(root / "latest", 99, patch)
                with pytest.raises(ckpt.NotDurableError, match=r"latest is committed and can be loaded, but may not"):
                    manager.save_state("latest", wait=True)
            assert {found.name for found in ckpt.list_checkpoints(root)} == {"latest", "first"}  # the older is kept
            assert ckpt.verify(root) == {"latest": [], "first": []}
            manager.save_state("latest", wait=True)  # and not a ConflictError for the rest of the process
            manager.save_state("more", wait=True)
        (kept,) = ckpt.list_checkpoints(root)
        assert kept.manifest is not None
        assert (kept.name, kept.manifest.sequence) == ("more", 4)

    def test_no_two_checkpoints_get_the_same_number(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root = tmp_path / "root"
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
            with monkeypatch.context() as patch:
                fail_to_sync(root / "a", 99, patch)
                with pytest.raises(ckpt.NotDurableError):
                    manager.save_state("a", wait=True)
            manager.save_state("b", wait=True)
        numbers = [found.manifest.sequence for found in ckpt.list_checkpoints(root) if found.manifest is not None]
        assert numbers == [2, 1]

    def test_the_older_checkpoint_of_the_name_keeps_its_files_until_the_new_one_is_durable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = tmp_path / "root"
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
            manager.save_state("latest", wait=True)
            before = {name: (root / "latest" / name).read_bytes() for name in os.listdir(root / "latest")}
            with monkeypatch.context() as patch:
                fail_to_sync(root / "latest", 99, patch)
                with pytest.raises(ckpt.NotDurableError):
                    manager.save_state("latest", wait=True)
            del before["manifest.json"], before["manifest.copy.json"]  # a crash may bring it back, with the others
            assert {name: (root / "latest" / name).read_bytes() for name in before} == before
            manager.save_state("latest", wait=True)
        assert len(os.listdir(root / "latest")) == len(before) + 2
        assert ckpt.verify(root) == {"latest": []}

    def test_a_folder_that_fails_to_be_synced_once_is_written_once_more(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = tmp_path / "root"
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
            failed = fail_to_sync(root / "a", 1, monkeypatch)
            manager.save_state("a", wait=True)
            assert failed
            manager.save_state("a", wait=True)
        assert ckpt.verify(root) == {"a": []}

    @pytest.mark.parametrize("file", ["model.safetensors", ".saving", "state.json"])
    def test_a_file_before_the_manifest_that_may_not_be_durable_makes_the_save_fail(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
    ) -> None:
        root = tmp_path / "root"
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
            manager.save_state("first", wait=True)
            with monkeypatch.context() as patch:
                fail_to_sync(root / "a", 99, patch, beside=file)
                with pytest.raises(
                    ckpt.StorageError, match=rf"wrote .*{file}.*, but could not sync the folder"
                ) as caught:
                    manager.save_state("a", wait=True)
            assert type(caught.value) is ckpt.StorageError
            assert not (root / "a").exists()
            manager.save_state("a", wait=True)
        assert ckpt.verify(root) == {"a": [], "first": []}

    def test_a_background_save_that_is_not_durable_is_raised_by_the_next_call(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = tmp_path / "root"
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
            with monkeypatch.context() as patch:
                fail_to_sync(root / "a", 99, patch)
                manager.save_state("a")
                with pytest.raises(ckpt.NotDurableError, match="a is committed"):
                    manager.wait()
            manager.save_state("a")
        assert ckpt.verify(root) == {"a": []}


class TestAnAnswerThatWasLost:
    @pytest.mark.also_on_s3
    def test_a_commit_that_took_effect_is_one_whatever_the_storage_said(
        self, root: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        storage = Flaky(root)
        with ckpt.StateManager(storage, model=nn.Linear(2, 2)) as manager:
            for _ in range(2):
                storage.fails_after_writing = "latest/manifest.json"
                with caplog.at_level(logging.WARNING, "ckpt"):
                    manager.save_state("latest", wait=True)
        assert "the answer was lost" in caplog.text
        assert ckpt.verify(root) == {"latest": []}

    @pytest.mark.also_on_s3
    def test_a_commit_of_which_nothing_can_be_known_is_looked_for_by_the_next_save(self, root: Place) -> None:
        storage = Flaky(root)
        with ckpt.StateManager(storage, model=nn.Linear(2, 2)) as manager:
            manager.save_state("first", wait=True)
            storage.fails_after_writing = storage.fails_to_read = "latest/manifest.json"
            with pytest.raises(ckpt.TransientError, match="the answer was lost"):
                manager.save_state("latest", wait=True)
            manager.save_state("other", wait=True)
            manager.save_state("latest", wait=True)
        manifests = [checkpoint.manifest for checkpoint in ckpt.list_checkpoints(root)]
        assert {found.name: found.sequence for found in manifests if found is not None} == {
            "latest": 4,
            "other": 3,
            "first": 1,
        }
        assert intact(root)


@pytest.mark.not_on_s3("a store of objects has no root to be removed; its lease is taken over instead")
class TestARootThatIsRemoved:
    def test_a_root_removed_under_a_manager_is_made_anew_and_locked_again_and_that_is_said(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        root = tmp_path / "root"
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
            manager.save_state("a", wait=True)
            shutil.rmtree(root)
            manager.save_state("b", wait=True)
            assert re.search(r"somebody removed .*root/\.lock, or .*These checkpoints are gone: a\.", caplog.text)
            with (
                ckpt.StateManager(root, model=nn.Linear(2, 2)) as another,
                pytest.raises(ckpt.LockedError, match="another run writes to"),
            ):
                another.resume()
        (kept,) = ckpt.list_checkpoints(root)
        assert kept.manifest is not None
        assert (kept.name, kept.manifest.sequence) == ("b", 2)
        assert ckpt.verify(root) == {"b": []}

    def test_a_lock_file_that_is_removed_is_made_again(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        root = tmp_path / "root"
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
            manager.save_state("a", wait=True)
            (root / ".lock").unlink()
            manager.save_state("b", wait=True)
            assert "These checkpoints are gone: none." in caplog.text
            assert (root / ".lock").exists()
        assert ckpt.verify(root) == {"a": [], "b": []}

    def test_a_root_that_another_run_has_taken_meanwhile_is_refused(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
            manager.save_state("a", wait=True)
            shutil.rmtree(root)
            with ckpt.StateManager(root, model=nn.Linear(2, 2)) as another:
                another.save_state("theirs", wait=True)
                with pytest.raises(ckpt.LockedError, match="another run writes to"):
                    manager.save_state("b", wait=True)
            with pytest.raises(ckpt.ConfigError, match=r"theirs is the newest.* that this run has not resumed from"):
                manager.save_state("b", wait=True)
        assert ckpt.verify(root) == {"theirs": []}

    def test_a_mirror_removed_under_a_manager_is_said_and_gets_the_next_copies(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        root, mirror = tmp_path / "root", tmp_path / "mirror"
        with ckpt.StateManager(root, model=nn.Linear(2, 2), mirror=mirror) as manager:
            manager.save_state("a", wait=True)
            assert manager.session.mirror is not None
            while manager.session.mirror._working:
                time.sleep(0.01)
            shutil.rmtree(mirror)
            manager.save_state("b", wait=True)
        assert f"somebody removed {tmp_path}/mirror/.lock" in caplog.text
        assert ckpt.verify(mirror) == {"b": []}

    def test_a_root_removed_during_a_background_save_is_told_by_the_next_call(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        storage = Gated(str(root))
        with ckpt.StateManager(storage, model=nn.Linear(2, 2)) as manager:
            manager.save_state("a", wait=True)
            storage.gate.clear()
            manager.save_state("b")
            assert storage.waits.wait(60)
            shutil.rmtree(root)
            storage.gate.set()
            with pytest.raises(ckpt.LockedError, match=r"somebody removed .*/\.lock"):
                manager.wait()
            assert not list(root.rglob("manifest.json"))
            manager.save_state("c", wait=True)
        assert ckpt.verify(root) == {"c": []}


class Gated(PassedOn):
    """A disk that writes manifests only while its gate is open."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.gate, self.waits = threading.Event(), threading.Event()
        self.gate.set()

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        if key.endswith("manifest.json") and not self.gate.is_set():
            self.waits.set()
            assert self.gate.wait(60)
        super().write(key, pieces, over=over)
