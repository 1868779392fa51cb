"""Snapshots in memory beside other runs of the same root: those that live, that came between, or that only look."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.errors import ConfigError
from ckpt.memory import place as place_module
from ckpt.memory.place import MemoryPlace
from ckpt.memory.slots import SlotWriter
from ckpt.root.write_link_commit import Attempt
from tests.helpers.processes import Script
from tests.memory.test_resume import DiedError, Training, snapshots, straight

__all__ = ["straight"]

pytestmark = pytest.mark.usefixtures("memory")


class TestARunThatLives:
    @pytest.fixture
    def living(self, tmp_path: Path) -> Any:
        training = Training(tmp_path / "root", memory=3)
        with training.manager as manager:
            manager.resume()
            while manager.progress.step < 17:
                training.one_step()
            yield training

    @pytest.mark.parametrize("every", [3, None])
    @pytest.mark.parametrize("at", [17, 20])
    def test_a_second_run_is_refused_and_leaves_its_snapshots(
        self, tmp_path: Path, memory: Path, living: Training, at: int, every: int | None
    ) -> None:
        while living.manager.progress.step < at:  # the newest is in memory, or in the root
            living.one_step()
        there = snapshots(memory)
        with pytest.raises(ckpt.LockedError):
            Training(tmp_path / "root", memory=every).to(25)
        assert snapshots(memory) == there
        living.one_step()
        assert (tmp_path / "root" / ".memory").exists()

    def test_a_second_run_that_went_back_leaves_them_too(self, tmp_path: Path, memory: Path, living: Training) -> None:
        other = Training(tmp_path / "root")
        with other.manager as manager:
            manager.load_state("step-00000010")
            for _ in range(4):
                other.one_step()
            assert manager.progress.step == 14
        assert snapshots(memory) == ["step-00000012", "step-00000015"]
        living.one_step()
        assert snapshots(memory) == ["step-00000015", "step-00000018"]

    @pytest.mark.parametrize("name", [None, "step-00000010"])
    def test_whoever_only_loads_leaves_its_snapshots(
        self, tmp_path: Path, memory: Path, living: Training, name: str | None
    ) -> None:
        with Training(tmp_path / "root").manager as manager:
            manager.load_state(name)
        assert snapshots(memory) == ["step-00000012", "step-00000015"]
        assert (tmp_path / "root" / ".memory").exists()

    def test_without_the_option_too(self, tmp_path: Path, memory: Path, living: Training) -> None:
        with Training(tmp_path / "root", memory=None).manager as manager:
            manager.load_state()
        assert (tmp_path / "root" / ".memory").exists()
        assert snapshots(memory) == ["step-00000012", "step-00000015"]


class TestARunThatDied:
    @pytest.mark.parametrize("name", [None, "step-00000010"])
    def test_whoever_only_loads_leaves_its_snapshots(self, tmp_path: Path, straight: str, name: str | None) -> None:
        Training(tmp_path / "root").to(17)
        with Training(tmp_path / "root").manager as manager:
            manager.load_state(name)
        again = Training(tmp_path / "root")
        assert again.to(25) == straight
        assert again.restored.step == 15

    def test_a_resume_that_trains_nothing_leaves_them_too(self, tmp_path: Path) -> None:
        Training(tmp_path / "root").to(17)
        with Training(tmp_path / "root").manager as manager:
            manager.resume()
        again = Training(tmp_path / "root")
        again.to(18)
        assert again.restored.step == 15

    def test_close_while_an_exception_is_under_way_leaves_them(self, tmp_path: Path, memory: Path) -> None:
        training = Training(tmp_path / "root")

        def train() -> None:
            try:
                training.manager.resume()
                while training.manager.progress.step < 7:
                    training.one_step()
                raise DiedError
            finally:
                training.manager.close()

        with pytest.raises(DiedError):
            train()
        assert snapshots(memory) == ["step-00000003", "step-00000006"]

    def test_close_once_more_leaves_them(self, tmp_path: Path, memory: Path) -> None:
        training = Training(tmp_path / "root")
        training.to(7)
        training.manager.close()
        assert snapshots(memory) == ["step-00000003", "step-00000006"]

    def test_close_once_more_leaves_those_of_the_next_run(self, tmp_path: Path, memory: Path) -> None:
        first = Training(tmp_path / "root")
        first.to(7, die=False)
        Training(tmp_path / "root").to(7)
        first.manager.close()
        assert snapshots(memory) == ["step-00000003", "step-00000006"]
        assert (tmp_path / "root" / ".memory").exists()

    def test_a_manager_that_was_closed_takes_no_more_of_them(self, tmp_path: Path, memory: Path) -> None:
        training = Training(tmp_path / "root")
        training.to(7)
        with pytest.raises(ConfigError, match="closed"):
            training.one_step()

    def test_a_run_without_the_option_says_that_it_leaves_them(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        Training(tmp_path / "root").to(17)
        for _ in range(2):
            Training(tmp_path / "root", memory=None).to(18)
        assert caplog.text.count("This run has no memory=") == 1

    @pytest.mark.slow
    def test_a_forked_child_that_outlives_it_is_in_nobodys_way(self, tmp_path: Path, straight: str) -> None:
        program = f"""if True:
            import os, signal
            from pathlib import Path
            from tests.memory.test_resume import Training
            training = Training(Path({str(tmp_path / "root")!r}))
            training.manager.resume()
            while training.manager.progress.step < 17:
                training.one_step()
            if not os.fork():
                os.close(1)
                os.read(0, 1)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        """
        with Script("-c", program, log=tmp_path / "log") as killed:
            assert killed.wait() == -signal.SIGKILL, killed.log.read_text()
            again = Training(tmp_path / "root")
            assert again.to(25) == straight
            assert again.restored.step == 15
            assert again.manager.session.memory is not None
            assert again.manager.session.memory.statistics.taken == 3  # steps 18, 21 and 24


class TestAnAbandonedFuture:
    """A run leaves snapshots with high numbers; another continues from the root without them; then comes a third."""

    @pytest.fixture(autouse=True)
    def first(self, tmp_path: Path, memory: Path) -> None:
        Training(tmp_path / "root", memory=1).to(19)
        assert snapshots(memory) == ["step-00000018", "step-00000019"]

    def third(self, root: Path) -> None:
        training = Training(root, memory=1)
        training.to(21)
        assert (training.restored.from_memory, training.restored.step) == (False, 20)

    def test_of_a_run_without_the_option(self, tmp_path: Path) -> None:
        Training(tmp_path / "root", memory=None).to(20)
        self.third(tmp_path / "root")

    def test_of_a_run_without_the_option_that_saves_before_it_resumes(self, tmp_path: Path) -> None:
        training = Training(tmp_path / "root", memory=None)
        with training.manager as manager:
            manager.load_state("step-00000010")
            while manager.progress.step < 20:
                training.one_step()
        self.third(tmp_path / "root")

    def test_of_a_run_on_another_host(self, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "other").mkdir()
        monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path / "other"))
        Training(tmp_path / "root", memory=6).to(20)
        monkeypatch.setenv("CKPT_MEMORY_DIR", str(memory))
        self.third(tmp_path / "root")

    def test_of_a_run_where_the_tier_was_off(
        self, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path / "missing"))
        Training(tmp_path / "root").to(20)
        monkeypatch.setenv("CKPT_MEMORY_DIR", str(memory))
        self.third(tmp_path / "root")

    def test_of_a_run_with_another_version(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(place_module, "code_versions", lambda: {"ckpt": "another"})
            Training(tmp_path / "root", memory=6).to(20)
        self.third(tmp_path / "root")

    def test_of_a_run_that_went_back(self, tmp_path: Path) -> None:
        training = Training(tmp_path / "root", save_every=4)
        try:
            with training.manager as manager:
                manager.load_state("step-00000010")
                while manager.progress.step < 12:
                    training.one_step()
                raise DiedError
        except DiedError:
            pass
        again = Training(tmp_path / "root")
        again.to(13)
        assert again.restored.step == 12


def test_a_snapshot_that_is_written_late_is_older_than_the_checkpoint_after_it(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes it gets its turn only when the next checkpoint of the root is committed."""
    training, begins, own = Training(tmp_path / "root", save_every=4), threading.Event(), SlotWriter.begin

    def begin(writer: SlotWriter, *given: Any) -> Attempt:
        assert begins.wait(60)
        return own(writer, *given)

    monkeypatch.setattr(SlotWriter, "begin", begin)
    with suppress(DiedError), training.manager as manager:
        manager.resume()
        for _ in range(4):
            manager.step()
        manager.wait()
        begins.set()
        assert manager.session.memory is not None
        manager.session.memory.wait()
        raise DiedError
    assert snapshots(memory) == ["step-00000003"]
    again = Training(tmp_path / "root")
    again.to(5)
    assert again.restored.step == 4


class TestWhatIsFoundButCannotBeUsed:
    def test_a_full_tmpfs_does_not_hide_the_snapshots(
        self, tmp_path: Path, straight: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Training(tmp_path / "root").to(17)

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patched:
            patched.setattr(place_module, "write_facts", full)
            again = Training(tmp_path / "root")
            assert again.to(18) != straight
        assert again.restored.step == 15

    def test_a_folder_that_cannot_be_entered_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        Training(tmp_path / "root").to(17)
        (place,) = MemoryPlace.list_places()
        (place.path / "alive").unlink()
        again = Training(tmp_path / "root")
        again.to(18)
        assert again.restored.step == 10
        assert str(place.path) in caplog.text


def test_a_manifest_of_the_root_that_is_damaged_does_not_make_strays(tmp_path: Path, straight: str) -> None:
    Training(tmp_path / "root").to(24)
    for name in ("manifest.json", "manifest.copy.json"):
        (tmp_path / "root" / "step-00000020" / name).write_text("{")
    again = Training(tmp_path / "root")
    assert again.to(25) == straight
    assert (again.restored.from_memory, again.restored.step) == (True, 24)


@pytest.mark.slow
def test_a_forked_child_that_outlives_the_run_does_not_live_there() -> None:
    reader, writer = os.pipe()
    program = """if True:
        import os, sys, time
        from ckpt.memory.place import MemoryPlace
        MemoryPlace.create("root", root_shown="root")
        child = os.fork()
        if not child:
            os.close(1)
            os.read(0, 1)
            os._exit(0)
        print(child, flush=True)
        os._exit(0)
    """
    run = subprocess.run([sys.executable, "-c", program], stdin=reader, stdout=subprocess.PIPE, check=True, timeout=60)
    os.close(reader)
    try:
        os.kill(int(run.stdout), 0)
        (place,) = MemoryPlace.list_places()
        assert place.is_deserted()
    finally:
        os.close(writer)


def test_a_root_that_was_removed_under_a_run_and_made_anew_still_knows_its_snapshots(tmp_path: Path) -> None:
    training = Training(tmp_path / "root")
    training.manager.resume()
    for step in range(1, 25):
        if step == 12:
            shutil.rmtree(tmp_path / "root")
        training.one_step()
    training.manager.__exit__(DiedError, DiedError(), None)
    again = Training(tmp_path / "root")
    again.to(25)
    assert (again.restored.from_memory, again.restored.step) == (True, 24)


def test_a_step_whose_save_is_left_out_is_taken_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path / "root", save_every=6, saving=ckpt.SaveOptions(when_busy="skip"))
    monkeypatch.setattr(training.manager.session.saver, "is_busy_anywhere", lambda name: True)
    training.to(7)
    again = Training(tmp_path / "root")
    again.to(8)
    assert (again.restored.from_memory, again.restored.step) == (True, 6)
