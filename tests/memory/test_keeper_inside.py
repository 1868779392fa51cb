"""The keeper's decisions, with a clock that the test moves: nothing here starts a process."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import LockedError
from ckpt.memory import held_memory, keeper, keeper_process
from ckpt.memory.held_memory import list_memory, memory_of
from ckpt.memory.keeper import ASKED, LOCK, LOG, HeldFiles, Keeper, Taken
from ckpt.memory.keeper_process import KeeperError, KeeperProcess, last_log_line, living_keeper
from ckpt.memory.place import ALIVE, RUN, MemoryPlace
from ckpt.memory.slot_storage import replica_storage
from ckpt.util.threads import start_time
from tests.memory.deserted import FILES, create_place, snapshot


class Clock:
    """Time that passes only while somebody sleeps; `events` happen when their moment has come."""

    def __init__(self) -> None:
        self.now, self.events = 1000.0, list[tuple[float, Callable[[], object]]]()
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert len(self.slept) < 5000, "it does not end"
        self.slept.append(seconds)
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()

    def at(self, seconds: float, event: Callable[[], object]) -> None:
        self.events.append((1000.0 + seconds, event))

    strftime = staticmethod(time.strftime)
    gmtime = staticmethod(time.gmtime)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(folder))
    monkeypatch.delenv("CKPT_MEMORY_LINGER", raising=False)
    return folder


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock, numbers = Clock(), (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers, limit = [signal.getsignal(number) for number in numbers], resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(keeper, "time", clock)
    yield clock
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.fixture
def place(memory: Path, tmp_path: Path) -> Iterator[MemoryPlace]:
    place = create_place(tmp_path / "root")
    yield place
    place.remove()


def kept(place: MemoryPlace, linger: float = 100.0) -> Keeper:
    return Keeper(str(place.path), linger)


class TestRun:
    def test_a_deserted_folder_is_removed_when_its_time_is_over(self, place: MemoryPlace, clock: Clock) -> None:
        found = kept(place, 100.0)
        clock.at(50, place.release)
        found.run()
        assert not place.path.exists()
        assert clock.now == pytest.approx(1150.0, abs=1)

    def test_whoever_comes_back_begins_the_time_anew(self, place: MemoryPlace, clock: Clock) -> None:
        found = kept(place, 100.0)
        clock.at(10, place.release)
        clock.at(90, place.hold)
        clock.at(95, place.release)
        found.run()
        assert clock.now == pytest.approx(1195.0, abs=1)

    def test_it_ends_with_its_folder_and_does_not_take_another_for_it(self, place: MemoryPlace, clock: Clock) -> None:
        found = kept(place)
        aside = place.path.with_name("aside")
        clock.at(5, lambda: place.path.rename(aside))
        clock.at(5, lambda: place.path.mkdir(0o700))
        found.run()
        assert clock.now == pytest.approx(1005.0, abs=1)
        assert place.path.is_dir()
        place.path.rmdir()
        aside.rename(place.path)

    def test_a_folder_without_facts_is_removed_as_soon_as_nobody_lives(self, place: MemoryPlace, clock: Clock) -> None:
        found = kept(place)
        (place.path / RUN).unlink()
        clock.at(5, place.release)
        found.run()
        assert not place.path.exists()
        assert clock.now == pytest.approx(1005.0, abs=1)

    @pytest.mark.parametrize("facts", [True, False])
    def test_a_signal_ends_it_when_nobody_lives_and_what_is_only_there_is_left(
        self, place: MemoryPlace, clock: Clock, facts: bool
    ) -> None:
        found = kept(place)
        if not facts:
            (place.path / RUN).unlink()
        clock.at(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        clock.at(10, place.release)
        found.run()
        assert place.path.exists() == facts
        assert clock.now == pytest.approx(1010.0, abs=1)

    def test_a_signal_removes_memory_that_would_end_with_it(self, place: MemoryPlace, clock: Clock) -> None:
        found = kept(place)
        found._files.descriptors["token"] = os.open(os.devnull, os.O_RDONLY)
        os.kill(os.getpid(), signal.SIGTERM)
        place.release()
        found.run()
        assert not place.path.exists()
        os.close(found._files.descriptors.pop("token"))

    def test_the_others_on_the_host_learn_once_a_minute_that_the_run_lives(
        self, place: MemoryPlace, clock: Clock
    ) -> None:
        found, alive = kept(place), place.path / ALIVE
        os.utime(alive, (0, 0))
        found._touch()
        clock.now += 60.0
        found._touch()
        assert alive.stat().st_mtime == 0
        clock.now += 0.5
        found._touch()
        assert (alive.stat().st_mtime, alive.stat().st_atime) == (1060.5, 1060.5)
        clock.now += 60.0
        found._touch()
        assert alive.stat().st_mtime == 1060.5

    def test_somebody_who_comes_as_it_is_removed_keeps_it(self, place: MemoryPlace, clock: Clock) -> None:
        found = kept(place)
        assert not found._finish()  # the place is held
        assert place.is_there
        place.release()
        assert found._finish()
        assert not place.path.exists()

    def test_the_signals_of_a_terminal_are_ignored(self, place: MemoryPlace, clock: Clock) -> None:
        found = kept(place)
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert not found._hurry


class TestFiles:
    def test_there_is_one_keeper_and_its_lock_says_who(self, place: MemoryPlace, clock: Clock) -> None:
        (place.path / LOCK).write_text("somebody with a very long number, who was killed long ago")
        assert living_keeper(place) is None
        found = kept(place)
        assert (place.path / LOCK).read_text() == found.identity == f"{os.getpid()} {start_time(os.getpid())}"
        with pytest.raises(Taken, match=f"^{found.identity}$"):
            kept(place)
        assert living_keeper(place) == KeeperProcess(os.getpid(), found.identity.split()[1])

    def test_only_a_file_of_the_folder_alone_is_opened(self, place: MemoryPlace, clock: Clock, tmp_path: Path) -> None:
        found, before = kept(place), len(os.listdir("/proc/self/fd"))
        (tmp_path / "theirs").write_text("theirs")
        os.link(tmp_path / "theirs", place.path / "linked")
        os.mkfifo(place.path / "pipe")
        (place.path / "symbolic").symlink_to(tmp_path / "theirs")
        for name in ("linked", "pipe", "symbolic", "absent"):
            with pytest.raises(OSError, match=r"a link or not a regular file|No such file|Too many levels"):
                found._open(name, os.O_RDONLY)
        os.close(found._open(RUN, os.O_RDONLY))
        assert len(os.listdir("/proc/self/fd")) == before

    def test_a_line_of_the_log_says_who_and_when(self, place: MemoryPlace, clock: Clock) -> None:
        found = kept(place)
        assert last_log_line(place) == ""
        found.log("one")
        assert {(place.path / name).stat().st_mode & 0o777 for name in (LOCK, LOG)} == {0o600}
        found.log("two")
        lines = (place.path / LOG).read_text().splitlines()
        assert [line.partition(" ")[2] for line in lines] == [f"keeper {os.getpid()}: {n}" for n in ("one", "two")]
        assert last_log_line(place) == lines[1]
        place.remove()
        found.log("three")  # the folder is gone

    @pytest.mark.parametrize("fails", [True, False])
    def test_what_ends_it_is_in_its_log(
        self, place: MemoryPlace, clock: Clock, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
        fails: bool,
    ) -> None:  # fmt: skip
        def run(_: Keeper) -> None:
            if fails:
                raise ZeroDivisionError("by zero")

        monkeypatch.chdir("/")
        umask = os.umask(0o077)
        monkeypatch.setattr("os.fork", lambda: 0)
        monkeypatch.setattr(Keeper, "run", run)
        monkeypatch.setattr(keeper, "_close_standard_streams", lambda: None)
        monkeypatch.setattr("sys.argv", ["keeper", str(place.path), "1.0"])
        try:
            if fails:
                with pytest.raises(ZeroDivisionError):
                    keeper.main()
                assert last_log_line(place).endswith("ended by ZeroDivisionError: by zero")
            else:
                keeper.main()
                assert last_log_line(place) == ""
                keeper.main()  # the lock of the first is held as long as that one lives
        finally:
            os.umask(umask)
        said = capfd.readouterr().out.splitlines()
        assert set(said) == {f"ready {os.getpid()} {start_time(os.getpid())}"}


class TestHeldFiles:
    @pytest.fixture
    def held(self, tmp_path: Path, clock: Clock) -> Iterator[HeldFiles]:
        (tmp_path / "held").mkdir()
        files = HeldFiles(str(tmp_path / "held"))
        yield files
        for descriptor in files.descriptors.values():
            os.close(descriptor)

    def test_memory_is_held_as_long_as_it_has_a_name(self, held: HeldFiles, clock: Clock, tmp_path: Path) -> None:
        folder, memory = tmp_path / "held", os.memfd_create("ckpt")
        os.write(memory, b"bytes")
        assert not held.tend()
        (folder / f"token{ASKED}").symlink_to(f"/proc/self/fd/{memory}")
        assert held.tend()
        assert held.tend()  # asked again, it is held once
        descriptors = dict(held.descriptors)
        assert list(descriptors) == ["token"]
        assert (folder / "token").read_bytes() == b"bytes"
        assert os.readlink(folder / "token") == f"/proc/{os.getpid()}/fd/{descriptors['token']}"
        clock.now += 10
        assert held.tend()
        assert held.descriptors == descriptors  # asked for still
        os.link(folder / "token", tmp_path / "named", follow_symlinks=False)
        (folder / f"token{ASKED}").unlink()
        os.close(memory)
        for _ in range(3):
            clock.now += 10
            assert not held.tend()
        assert held.descriptors == descriptors
        (tmp_path / "named").unlink()
        assert not held.tend()
        clock.now += 0.5
        held.tend()
        assert held.descriptors == descriptors  # somebody may just be opening it
        clock.now += 0.1
        held.tend()
        assert held.descriptors == {}
        assert list(folder.iterdir()) == []
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptors["token"])

    def test_a_name_that_comes_back_begins_the_time_anew(self, held: HeldFiles, clock: Clock, tmp_path: Path) -> None:
        folder, memory = tmp_path / "held", os.memfd_create("ckpt")
        (folder / f"token{ASKED}").symlink_to(f"/proc/self/fd/{memory}")
        held.tend()
        os.close(memory)
        (folder / f"token{ASKED}").unlink()
        held.tend()
        clock.now += 0.4
        os.link(folder / "token", tmp_path / "named", follow_symlinks=False)
        held.tend()
        (tmp_path / "named").unlink()
        held.tend()
        clock.now += 0.4
        held.tend()
        assert list(held.descriptors) == ["token"]

    def test_what_is_no_memory_of_ours_is_not_held(self, held: HeldFiles, tmp_path: Path) -> None:
        folder, before = tmp_path / "held", len(os.listdir("/proc/self/fd"))
        (tmp_path / "file").write_text("mine")
        (folder / f"file{ASKED}").symlink_to(tmp_path / "file")
        (folder / f"gone{ASKED}").symlink_to("/proc/self/fd/99999")
        assert held.tend()
        assert held.descriptors == {}
        assert list(folder.iterdir()) == []
        assert len(os.listdir("/proc/self/fd")) == before
        folder.rmdir()
        assert not held.tend()

    def test_it_may_hold_as_many_files_as_the_system_lets_it(self, held: HeldFiles) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
        HeldFiles("/nowhere")
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)

    def test_who_has_asked_for_one_file_asks_for_more(self, place: MemoryPlace, clock: Clock) -> None:
        found = kept(place)
        answers = [True, True, False]
        place.release()
        found._files.tend = lambda: answers.pop(0) if answers else False  # type: ignore[method-assign]
        clock.at(1, place.remove)
        found.run()
        assert clock.slept[:4] == [0.01, 0.01, 0.25, 0.25]


class TestFound:
    """The keeper and the memory of a run, as others on the host find them."""

    def test_what_is_written_in_a_lock_nobody_holds_or_is_no_keeper_is_none(
        self, place: MemoryPlace, tmp_path: Path
    ) -> None:
        path = place.path / LOCK
        assert living_keeper(place) is None
        path.write_text("12 34")
        assert living_keeper(place) is None
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for text, found in (
                ("12 34", KeeperProcess(12, "34")), ("12", None), ("x 34", None), ("", None), ("1 2 3", None),
            ):  # fmt: skip
                path.write_text(text)
                assert living_keeper(place) == found

    def test_a_process_is_waited_for_until_the_time_is_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        this = KeeperProcess(os.getpid(), start_time(os.getpid()) or "")
        began = time.monotonic()
        assert not this.wait(0.05)
        assert time.monotonic() - began >= 0.05
        assert KeeperProcess(os.getpid(), "1").wait(0.0)

    @pytest.mark.parametrize("value", ["off", "OFF", "on", ""])
    def test_it_is_off_where_the_user_says_so(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("CKPT_MEMORY_KEEPER", value)
        assert keeper_process.is_turned_off() == (value.lower() == "off")

    def test_none_is_started_without_an_interpreter(
        self, place: MemoryPlace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("CKPT_MEMORY_KEEPER", "on")
        monkeypatch.setattr("sys.executable", "")
        with pytest.raises(KeeperError, match=r"sys\.executable is empty"):
            keeper_process.require_keeper(place)
        assert keeper_process.start_keeper(place) is None
        assert len(caplog.records) == 1

    def test_the_keeper_that_lives_is_recorded(self, place: MemoryPlace, clock: Clock, monkeypatch: Any) -> None:
        monkeypatch.setenv("CKPT_MEMORY_KEEPER", "on")
        found = kept(place)
        assert keeper_process.start_keeper(place) == living_keeper(place)
        again = MemoryPlace.open(place.path)
        assert again is not None
        assert again.facts["keeper"] == {"process": os.getpid(), "started": found.identity.split()[1]}

    def test_what_runs_hold_is_listed_with_their_snapshots_and_processes(
        self, place: MemoryPlace, tmp_path: Path, clock: Clock
    ) -> None:
        snapshot(place, "step-1", sequence=1)
        replica_storage(place).write("step-1/file", [b"12345"])
        older = create_place(tmp_path / "older")
        older.record(created="2001-01-01T00:00:00Z")
        older.release()
        here, there = list_memory()
        assert (here.place.path, there.place.path) == (place.path, older.path)
        assert (here.processes, there.processes) == ((os.getpid(),), ())
        assert (here.is_deserted, there.is_deserted) == (False, True)
        assert here.root == str(tmp_path / "root")
        assert [found.name for found in here.snapshots] == ["step-1"]
        files = [path for path in place.slots.rglob("*") if path.is_file()]
        assert here.size == sum(path.stat().st_size for path in files) + 5
        assert here.size > sum(map(len, FILES.values()))
        shown = here.to_json()
        assert (shown["path"], shown["deserted"]) == (str(place.path), False)
        assert (shown["keeper"], shown["processes"]) == (None, [os.getpid()])
        assert [found["name"] for found in shown["snapshots"]] == ["step-1"]
        assert 0 <= shown["idle_seconds"] < 600
        for name in (str(tmp_path / "root"), str(place.path)):
            assert [found.place.path for found in memory_of(name)] == [place.path]
        assert memory_of(str(tmp_path / "elsewhere")) == []
        with pytest.raises(LockedError, match=rf"a run still uses .* \(process {os.getpid()}\)"):
            here.clear()
        assert place.is_there
        there.clear()
        assert not older.path.exists()

    def test_a_keeper_that_does_not_end_is_named(
        self, place: MemoryPlace, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept(place)
        place.release()
        monkeypatch.setattr(held_memory, "_PATIENCE", 0.05)
        (here,) = list_memory()
        assert here.keeper is not None
        assert here.to_json()["keeper"] == os.getpid()
        with pytest.raises(LockedError, match=f"the keeper process {os.getpid()} of .* did not end"):
            here.clear()
        assert not place.path.exists()
