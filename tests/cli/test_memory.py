"""`ckpt memory`: lists what is held in memory, and removes it where nobody lives."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ckpt.cli.main import main
from ckpt.memory import keeper
from ckpt.memory.keeper_process import living_keeper, start_keeper
from ckpt.memory.slot_storage import REPLICA
from tests.memory.deserted import create_place, kill, no_keeper_left, snapshot, start_run

Invoke = Callable[..., Result]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(folder))
    monkeypatch.setenv("CKPT_MEMORY_KEEPER", "on")
    with no_keeper_left(folder):
        yield folder


@pytest.fixture
def invoke() -> Invoke:
    return lambda *arguments: CliRunner().invoke(main, ["memory", *map(str, arguments)])


class TestLs:
    def test_an_empty_machine_holds_nothing(self, invoke: Invoke) -> None:
        assert invoke("ls").output == "Nothing is held in memory on this machine.\n"
        assert json.loads(invoke("ls", "--json").output) == []

    def test_a_run_that_lives_is_shown_with_its_processes(self, invoke: Invoke, tmp_path: Path) -> None:
        place = create_place(tmp_path / "root")
        snapshot(place, "step-1", sequence=1)
        header, row = invoke("ls").output.splitlines()
        assert header.split() == ["root", "step", "size", "age", "run", "keeper", "last", "said"]
        assert row.startswith(f"{tmp_path / 'root'} ")
        assert f"lives: process {os.getpid()}" in row
        assert row.split()[-2:] == ["none", "-"]

    @pytest.mark.slow
    def test_so_is_the_first_process_of_a_container(self, tmp_path: Path) -> None:
        script = f"""
from click.testing import CliRunner
from ckpt.cli.main import main
from tests.memory.deserted import create_place
place = create_place({str(tmp_path / "root")!r})
print(CliRunner().invoke(main, ["memory", "ls"]).output)
place.remove()
"""
        own = [
            "unshare",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
            *(["--map-root-user"] if os.geteuid() else []),
        ]
        if (
            shutil.which("unshare") is None
            or subprocess.run([*own, "true"], capture_output=True, check=False).returncode
        ):
            pytest.skip("no namespace of processes can be made here")
        done = subprocess.run(
            [*own, sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
        )
        assert "lives: process 1 " in done.stdout

    def test_json_has_all_of_it(self, invoke: Invoke, tmp_path: Path) -> None:
        place = create_place(tmp_path / "root")
        snapshot(place, "step-1", sequence=1)
        snapshot(place, "step-2", sequence=2)
        place.release()
        (place.path / keeper.LOG).write_text("the first line\nthe last line\n")
        [held] = json.loads(invoke("ls", "--json").output)
        assert [found["name"] for found in held["snapshots"]] == ["step-2", "step-1"]
        assert held["size"] > sum(found["size"] for found in held["snapshots"])
        known = {key: held[key] for key in ("path", "root", "deserted", "processes", "keeper", "log")}
        assert known == {
            "path": str(place.path), "root": str(tmp_path / "root"), "deserted": True, "processes": [],
            "keeper": None, "log": "the last line",
        }  # fmt: skip
        (place.path / REPLICA).mkdir()
        (place.path / REPLICA / "file").write_bytes(bytes(1000))  # of another host
        [with_replica] = json.loads(invoke("ls", "--json").output)
        assert with_replica["size"] == held["size"] + 1000

    def test_what_belongs_to_others_is_not_shown(self, invoke: Invoke, memory: Path) -> None:
        stranger = memory / f"ckpt-{'0' * 32}"
        stranger.mkdir(mode=0o755)
        assert invoke("ls").output.startswith("Nothing is held")
        stranger.rmdir()

    @pytest.mark.slow
    @pytest.mark.parametrize("held", [False, True])
    def test_a_killed_run_is_deserted_and_its_keeper_named(
        self, invoke: Invoke, tmp_path: Path, memory: Path, held: bool
    ) -> None:
        job, _, found = start_run(memory, tmp_path / "root", held=held)
        assert f"lives: process {job.pid}" in invoke("ls").output
        kill(job)
        shown = invoke("ls").output
        assert "deserted, " in shown
        assert f"process {found.process}" in shown


class TestClear:
    def test_what_is_deserted_is_removed(self, invoke: Invoke, tmp_path: Path, memory: Path) -> None:
        for name in ("a", "b"):
            place = create_place(tmp_path / name)
            snapshot(place, "step-1", sequence=1)
            place.release()
        done = invoke("clear", tmp_path / "a")
        assert done.exit_code == 0
        assert done.output.startswith("removed ")
        assert len(list(memory.iterdir())) == 1
        assert invoke("clear", tmp_path / "a").output == (
            f"Nothing is held in memory on this machine for {tmp_path / 'a'}.\n"
        )
        assert invoke("clear", "--all").exit_code == 0
        assert list(memory.iterdir()) == []

    def test_a_root_may_be_spelled_in_any_way_or_be_the_folder_in_memory(
        self, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "link").symlink_to(tmp_path)
        for spelled in ("root", "./root/", str(tmp_path / "link" / "root"), f"file://{tmp_path}/root", ""):
            place = create_place(tmp_path / "root")
            place.release()
            assert invoke("clear", spelled or place.path).output.startswith("removed ")

    def test_where_the_run_lives_it_is_refused_and_named(self, invoke: Invoke, tmp_path: Path) -> None:
        place = create_place(tmp_path / "root")
        create_place(tmp_path / "dead").release()
        for arguments in ([tmp_path / "root"], ["--all"]):
            done = invoke("clear", *arguments)
            assert done.exit_code == 1
            assert f"a run still uses the snapshots of {tmp_path}/root (process {os.getpid()})" in done.output
            assert place.is_there
        assert "dead" not in invoke("ls").output  # the others were removed

    @pytest.mark.parametrize("arguments", [[], ["root", "--all"]])
    def test_it_must_be_said_what_to_remove(self, invoke: Invoke, arguments: list[str]) -> None:
        done = invoke("clear", *arguments)
        assert done.exit_code == 2
        assert "name the ROOT" in done.output

    @pytest.mark.slow
    def test_the_keeper_ends_with_it(self, invoke: Invoke, tmp_path: Path, memory: Path) -> None:
        job, _, found = start_run(memory, tmp_path / "root", held=True)
        assert invoke("clear", "--all").exit_code == 1
        kill(job)
        assert invoke("clear", "--all").exit_code == 0
        assert not found.is_alive
        assert list(memory.iterdir()) == []

    @pytest.mark.slow
    def test_a_keeper_that_does_not_end_is_named(
        self, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckpt.memory.held_memory._PATIENCE", 0.1)
        place = create_place(tmp_path / "root")
        found = start_keeper(place)
        assert found is not None
        assert living_keeper(place) == found
        place.release()
        os.kill(found.process, signal.SIGSTOP)
        done = invoke("clear", "--all")
        os.kill(found.process, signal.SIGCONT)
        assert found.wait(10.0)
        assert f"process {found.process} of " in done.output
