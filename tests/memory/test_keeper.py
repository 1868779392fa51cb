"""The keeper process: one for a place, outlives the run, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.errors import AbsentError
from ckpt.memory import keeper, keeper_process, place
from ckpt.memory.keeper_process import KeeperError, KeeperProcess, living_keeper, require_keeper, start_keeper
from ckpt.memory.place import MemoryPlace, identity_of, read_token
from ckpt.memory.slot_storage import slot_storage
from ckpt.storage import LocalStorage
from tests.helpers.byte_checkpoints import keys
from tests.memory.deserted import FILES, create_place, kill, no_keeper_left, snapshot, start_run, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(folder))
    monkeypatch.setenv("CKPT_MEMORY_KEEPER", "on")
    monkeypatch.delenv("CKPT_MEMORY_LINGER", raising=False)
    with no_keeper_left(folder):
        yield folder


def started(place: MemoryPlace) -> KeeperProcess:
    found = start_keeper(place)
    assert found is not None
    return found


def test_the_names_are_those_of_a_place() -> None:
    assert (keeper.RUN, keeper.ALIVE) == (place.RUN, place.ALIVE)


class TestStart:
    def test_it_is_a_process_of_a_few_megabytes_in_a_session_of_its_own(self, tmp_path: Path) -> None:
        found = started(create_place(tmp_path / "root"))
        assert os.getsid(found.process) not in (os.getsid(0), found.process)  # nor can it get a terminal
        status = Path(f"/proc/{found.process}/status").read_text()
        own = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
        assert own < 12_000  # kB; a process with torch has hundreds of thousands
        streams = {os.readlink(f"/proc/{found.process}/fd/{stream}") for stream in (0, 1, 2)}
        assert streams == {os.devnull}
        assert os.readlink(f"/proc/{found.process}/cwd") == "/"

    def test_it_is_recorded_in_the_facts(self, tmp_path: Path) -> None:
        place = create_place(tmp_path / "root")
        found = started(place)
        again = MemoryPlace.open(place.path)
        assert again is not None
        assert again.facts["keeper"] == {"process": found.process, "started": found.started}

    def test_it_does_not_have_the_key_that_the_run_signs_with(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CKPT_SIGN_KEY", "secret")
        found = started(create_place(tmp_path / "root"))
        assert b"CKPT_SIGN_KEY" not in Path(f"/proc/{found.process}/environ").read_bytes()

    def test_another_process_that_has_its_number_later_is_not_taken_for_it(self) -> None:
        assert not KeeperProcess(os.getpid(), "1").is_alive

    @pytest.mark.parametrize("name", [keeper.LOCK, keeper.ALIVE])
    def test_a_file_that_has_another_name_elsewhere_is_neither_locked_nor_written(
        self, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        place = create_place(tmp_path / "root")
        (tmp_path / "elsewhere").write_text("somebody's")
        (place.path / name).unlink(missing_ok=True)
        os.link(tmp_path / "elsewhere", place.path / name)
        assert start_keeper(place) is None
        assert (tmp_path / "elsewhere").read_text() == "somebody's"
        assert f"{name} is a link or not a regular file" in caplog.text

    def test_its_files_are_for_this_user_alone(self, tmp_path: Path) -> None:
        place = create_place(tmp_path / "root")
        started(place)
        modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in place.path.iterdir() if not path.is_dir()}
        assert keeper.LOCK in modes
        assert set(modes.values()) == {0o600}

    def test_who_starts_it_again_finds_the_one_that_lives(self, tmp_path: Path) -> None:
        place = create_place(tmp_path / "root")
        first = started(place)
        assert started(place) == first == living_keeper(place)

    def test_of_many_that_start_at_once_one_lives(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        place = create_place(tmp_path / "root")
        (place.path / keeper.LOCK).write_text("123456789 12345678901234567890")  # of one that was killed
        monkeypatch.setattr(keeper_process, "living_keeper", lambda _: None)
        found: list[KeeperProcess] = []
        starters = [threading.Thread(target=lambda: found.append(started(place))) for _ in range(4)]
        for starter in starters:
            starter.start()
        for starter in starters:
            starter.join()
        assert len(found) == 4
        assert set(found) == {living_keeper(place)}

    def test_after_one_was_killed_another_is_started(self, tmp_path: Path) -> None:
        place = create_place(tmp_path / "root")
        first = started(place)
        os.kill(first.process, signal.SIGKILL)
        assert first.wait(10.0)
        assert living_keeper(place) is None
        second = started(place)
        assert second != first
        assert second.is_alive

    def test_where_none_can_be_started_that_is_one_warning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        place = create_place(tmp_path / "root")
        for executable in ("", "/nowhere/python", "/bin/false"):
            caplog.clear()
            monkeypatch.setattr(sys, "executable", executable)
            assert start_keeper(place) is None
            assert [record.message for record in caplog.records if "not start a keeper" in record.message] == [
                record.message for record in caplog.records
            ]
            assert len(caplog.records) == 1

    def test_where_it_is_off_none_is_started_and_nothing_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("CKPT_MEMORY_KEEPER", "off")
        place = create_place(tmp_path / "root")
        assert start_keeper(place) is None
        assert caplog.records == []
        with pytest.raises(KeeperError, match="CKPT_MEMORY_KEEPER=off"):
            require_keeper(place)

    def test_a_folder_that_is_gone_gets_none(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        place = create_place(tmp_path / "root")
        place.remove()
        assert start_keeper(place) is None
        assert "could not start a keeper process" in caplog.text

    def test_its_imports_are_those_of_the_standard_library(self) -> None:
        code = f"""
import runpy, sys
sys.argv = ["keeper"]
try:
    runpy.run_path({keeper.__file__!r}, run_name="__main__")
except IndexError:
    pass
print([name for name in sys.modules if name.startswith("ckpt.") or name == "torch"])
"""
        done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


class TestEnd:
    def test_it_ends_with_the_folder(self, tmp_path: Path) -> None:
        place = create_place(tmp_path / "root")
        found = started(place)
        place.remove()
        assert found.wait(10.0)

    def test_it_lives_as_long_as_anybody_does(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CKPT_MEMORY_LINGER", "0.1")
        place = create_place(tmp_path / "root")
        found = started(place)
        assert not found.wait(1.5)
        assert place.is_there

    def test_it_removes_a_folder_in_which_nobody_has_lived_for_the_time(
        self, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CKPT_MEMORY_LINGER", "1.0")
        place = create_place(tmp_path / "root")
        found = started(place)
        snapshot(place, "step-1", sequence=1)
        place.release()
        began = time.monotonic()
        assert found.wait(30.0)
        assert time.monotonic() - began >= 1.0
        assert list(memory.iterdir()) == []

    def test_a_restart_in_time_begins_the_time_anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CKPT_MEMORY_LINGER", "2.0")
        place = create_place(tmp_path / "root")
        found = started(place)
        for _ in range(3):
            place.release()
            time.sleep(1.0)
            place.hold()
            time.sleep(0.6)
        assert found.is_alive
        assert place.is_there

    def test_a_removal_that_was_cut_off_is_finished(self, tmp_path: Path, memory: Path) -> None:
        place = create_place(tmp_path / "root")
        found = started(place)
        snapshot(place, "step-1", sequence=1)
        (place.path / "run.json").unlink()
        assert not found.wait(0.7)  # the process that removes it lives
        place.release()
        assert found.wait(10.0)
        assert list(memory.iterdir()) == []

    @pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
    def test_the_end_of_a_terminal_does_not_end_it(self, tmp_path: Path, number: signal.Signals) -> None:
        found = started(create_place(tmp_path / "root"))
        os.kill(found.process, number)
        assert not found.wait(0.7)

    def test_ended_by_a_signal_it_leaves_what_is_only_there_for_the_next_run(self, tmp_path: Path) -> None:
        place = create_place(tmp_path / "root")
        found = started(place)
        snapshot(place, "step-1", sequence=1)
        os.kill(found.process, signal.SIGTERM)
        assert not found.wait(0.7)  # the run lives: it may die yet
        place.release()
        assert found.wait(10.0)
        assert keys(slot_storage(place), "step-1")


class TestKilledRuns:
    def test_it_outlives_the_run_and_its_group(self, tmp_path: Path, memory: Path) -> None:
        job, place, found = start_run(memory, tmp_path / "root")
        kill(job)
        assert place.is_deserted()
        assert not found.wait(1.0)
        assert living_keeper(place) == found
        place.hold()  # a restart
        assert started(place) == found
        assert slot_storage(place).read("step-9/model.safetensors") == FILES["model.safetensors"]

    def test_memory_that_it_holds_outlives_the_run_and_not_the_keeper(self, tmp_path: Path, memory: Path) -> None:
        job, place, found = start_run(memory, tmp_path / "root", held=True)
        kill(job)
        storage = slot_storage(place)
        assert (place.slots / "step-9/model.safetensors").is_symlink()
        assert keys(storage) == {
            f"step-{step}/{name}" for step in (8, 9) for name in (*FILES, "manifest.json", "manifest.copy.json")
        }
        assert storage.read("step-9/model.safetensors") == FILES["model.safetensors"]
        os.kill(found.process, signal.SIGKILL)
        assert found.wait(10.0)
        with pytest.raises(AbsentError):
            storage.read("step-9/model.safetensors")

    def test_after_the_time_nothing_is_left(self, tmp_path: Path, memory: Path) -> None:
        job, _, found = start_run(memory, tmp_path / "root", held=True, linger=1.0)
        kill(job)
        assert found.wait(30.0)
        assert list(memory.iterdir()) == []

    def test_where_the_keeper_was_killed_too_the_next_run_finds_the_memory_and_later_ones_remove_it(
        self, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job, place, found = start_run(memory, tmp_path / "root")
        kill(job)
        os.kill(found.process, signal.SIGKILL)
        assert found.wait(10.0)
        root = LocalStorage(tmp_path / "root")
        again = MemoryPlace.find(identity_of(root, read_token(root)))
        assert again is not None
        assert again.path == place.path
        assert keys(slot_storage(again), "step-9")
        monkeypatch.setenv("CKPT_MEMORY_LINGER", "0.1")
        time.sleep(0.2)
        assert MemoryPlace.find("another root") is None
        wait_until(lambda: not list(memory.iterdir()), "it is removed")
