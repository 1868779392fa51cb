"""The folder of a run in memory: found by its own run alone, and removed when nobody lives there."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt.memory import place as places
from ckpt.memory.place import ALIVE, RUN, SLOTS, MemoryPlace, OpenDescriptors, PlaceError, remove_expired
from ckpt.util.threads import boot_id

ROOT = "/runs/x"
NOBODY = 65534


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(folder))
    monkeypatch.delenv("CKPT_MEMORY_LINGER", raising=False)
    return folder


def create(root: str = ROOT, **facts: Any) -> MemoryPlace:
    return MemoryPlace.create(root, root_shown=root, **facts)


def change_facts(place: MemoryPlace, **facts: object) -> None:
    (place.path / RUN).write_text(json.dumps({**place.facts, **facts}))


def set_age(place: MemoryPlace, seconds: float) -> None:
    then = time.monotonic() - seconds
    os.utime(place.path / ALIVE, (then, then))


class TestCreate:
    def test_it_is_readable_for_its_user_alone(self) -> None:
        place = create()
        paths = [place.path, *place.path.iterdir()]
        assert {path.name for path in paths[1:]} == {RUN, ALIVE, SLOTS}
        modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in paths}
        assert modes == {place.path.name: 0o700, RUN: 0o600, ALIVE: 0o600, SLOTS: 0o700}

    def test_its_name_is_random(self, memory: Path) -> None:
        names = {create().path.name, create().path.name}
        assert len(names) == 2
        assert names == set(os.listdir(memory))

    def test_its_facts_name_the_run_without_its_identity(self) -> None:
        place = create("s3://bucket/x\ntoken-of-the-root")
        text = (place.path / RUN).read_text()
        assert "token-of-the-root" not in text.replace(json.dumps(place.facts["root"]), "")
        facts = json.loads(text)
        assert facts["uid"] == os.getuid()
        assert facts["boot"] == boot_id()

    def test_a_directory_that_takes_no_folder_is_named(self, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CKPT_MEMORY_DIR", str(memory / "absent"))
        with pytest.raises(PlaceError, match=r"could not create a folder in .*absent: No such file or directory\."):
            create()

    def test_a_folder_that_could_not_be_filled_is_removed_and_nobody_lives_there(
        self, memory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(path: Path, facts: object) -> None:
            assert not MemoryPlace.list_places()  # without its facts nobody finds it
            raise OSError("no space left")

        monkeypatch.setattr(places, "write_facts", full)
        before = set(places._held._descriptors)
        with pytest.raises(OSError, match="no space left"):
            create()
        assert list(memory.iterdir()) == []
        assert places._held._descriptors == before

    def test_more_facts_are_recorded(self) -> None:
        place = create()
        place.record(keeper={"pid": 7, "started": "99"})
        assert MemoryPlace.open(place.path) == place
        assert place.facts["keeper"] == {"pid": 7, "started": "99"}


class TestFind:
    def test_a_restarted_run_finds_its_folder(self) -> None:
        create("/runs/y")
        place = create()
        found = MemoryPlace.find(ROOT)
        assert found is not None
        assert (found.path, found.facts) == (place.path, place.facts)
        assert found.slots == place.path / SLOTS

    def test_there_is_none_for_another_root(self) -> None:
        create()
        assert MemoryPlace.find("/runs/y") is None

    @pytest.mark.parametrize(
        "other",
        [
            {"boot": "another"},
            {"uid": 12345},
            {"format": 2},
            {"versions": {"ckpt": "0.0.1", "python": "3.12", "torch": "2"}},
        ],
    )
    def test_after_a_reboot_or_with_other_code_it_is_as_if_it_had_never_been(self, other: dict[str, object]) -> None:
        place = create()
        change_facts(place, **other)
        assert MemoryPlace.find(ROOT) is None

    def test_what_others_could_have_made_is_neither_read_nor_removed(
        self, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        elsewhere = tmp_path / "elsewhere"
        create().path.rename(elsewhere)
        (memory / f"ckpt-{'a' * 32}").symlink_to(elsewhere)
        open_to_all = create()
        open_to_all.path.chmod(0o755)
        (memory / f"ckpt-{'b' * 32}").write_text("a file")
        (memory / "ckpt-short").mkdir(mode=0o700)
        monkeypatch.setenv("CKPT_MEMORY_LINGER", "0.001")
        open_to_all.release()
        time.sleep(0.01)
        assert MemoryPlace.find(ROOT) is None
        assert MemoryPlace.list_places() == []
        assert len(list(memory.iterdir())) == 4
        assert (elsewhere / RUN).exists()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
    def test_what_another_user_has_made_is_neither_read_nor_removed(
        self, memory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever made it can say in it whatever would be believed: the right root, boot and user."""
        place = create()
        place.release()
        for path in (place.path, *place.path.iterdir()):
            os.chown(path, NOBODY, NOBODY)
        monkeypatch.setenv("CKPT_MEMORY_LINGER", "0.001")
        time.sleep(0.01)
        assert MemoryPlace.find(ROOT) is None
        assert not place.remove_if_deserted()
        place.remove()
        assert (place.path / RUN).exists()

    def test_facts_behind_a_link_are_not_read(self, tmp_path: Path) -> None:
        place = create()
        (place.path / RUN).rename(tmp_path / RUN)
        (place.path / RUN).symlink_to(tmp_path / RUN)
        assert MemoryPlace.find(ROOT) is None

    def test_facts_of_another_user_or_of_any_length_are_not_read(self) -> None:
        place = create()
        text = (place.path / RUN).read_text()
        (place.path / RUN).write_text(text + " " * (places._MOST_FACTS - len(text)))
        assert MemoryPlace.open(place.path) is not None
        (place.path / RUN).write_text(text + " " * (places._MOST_FACTS - len(text) + 1))
        assert MemoryPlace.open(place.path) is None
        (place.path / RUN).write_text(text)
        if os.geteuid() == 0:  # only root can give a file to another user
            os.chown(place.path / RUN, NOBODY, NOBODY)
            assert MemoryPlace.open(place.path) is None

    def test_the_one_that_was_used_last_is_found(self) -> None:
        first, second = create(), create()
        set_age(second, 10)
        assert MemoryPlace.find(ROOT) == first
        second.note_life()
        set_age(first, 10)
        assert MemoryPlace.find(ROOT) == second
        assert 0 <= second.idle_seconds < 10
        assert first.idle_seconds >= 10

    @pytest.mark.parametrize("text", ["", "{", "[]", "null"])
    def test_facts_that_are_damaged_are_none(self, text: str) -> None:
        place = create()
        (place.path / RUN).write_text(text)
        assert MemoryPlace.find(ROOT) is None


class TestWhoLives:
    def test_its_maker_does(self) -> None:
        place = create()
        assert not place.is_deserted()
        place.release()
        assert place.is_deserted()

    def test_so_does_each_of_several(self) -> None:
        place = create()
        other = MemoryPlace.open(place.path)
        assert other is not None
        other.hold()
        place.release()
        assert not place.is_deserted()
        other.release()
        assert other.is_deserted()

    def test_who_holds_it_twice_lets_go_at_once_and_was_seen_when_it_came(self) -> None:
        place = create()
        place.hold()
        place.release()
        assert place.is_deserted()
        set_age(place, 100)
        place.note_life()  # does not live there
        assert place.idle_seconds >= 100
        place.hold()
        assert place.idle_seconds < 100
        place.release()
        place.release()

    @pytest.mark.parametrize("anew", [True, False])
    def test_one_that_was_removed_in_between_is_not_entered_though_it_be_made_anew(
        self, monkeypatch: pytest.MonkeyPatch, anew: bool
    ) -> None:
        place, own = create(), places._lock_shared
        place.release()
        before = set(places._held._descriptors)

        def locked_late(descriptor: int, folder: Path) -> None:
            own(descriptor, folder)
            (folder / ALIVE).unlink()
            if anew:
                (folder / ALIVE).touch()

        monkeypatch.setattr(places, "_lock_shared", locked_late)
        with pytest.raises(PlaceError, match="another process has just removed"):
            place.hold()
        assert places._held._descriptors == before
        assert place.is_deserted()

    def test_no_child_is_forked_while_the_lock_by_which_it_lives_is_opened_or_closed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place, opens, closes, free = create(), places._open_alive, OpenDescriptors.close, list[bool]()

        def ask() -> None:
            free.append(places._held.guard.acquire(blocking=False))

        def asking() -> bool:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            return False

        place.release()
        monkeypatch.setattr(places, "_open_alive", lambda folder: asking() or opens(folder))
        monkeypatch.setattr(OpenDescriptors, "close", lambda self, descriptor: asking() or closes(self, descriptor))
        place.hold()
        place.release()
        monkeypatch.setattr(places, "note_life", lambda descriptor: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            place.hold()
        assert free == [False] * 4

    def test_it_is_this_runs_as_long_as_it_was_made_by_it(self) -> None:
        place = create()
        assert place.is_there
        change_facts(place, created="2020-01-01T00:00:00.000+00:00")
        assert not place.is_there

    def test_one_who_looks_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        place, slept = create(), list[float]()
        place.release()
        looks = places._all_alone(place.path)
        looks.__enter__()

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 2:
                looks.__exit__(None, None, None)

        monkeypatch.setattr(time, "sleep", sleep)
        place.hold()
        assert slept == [places._PAUSE] * 2

    def test_to_look_disturbs_nobody(self) -> None:
        place = create()
        place.release()
        assert place.is_deserted()
        place.hold()
        assert not place.is_deserted()

    @pytest.mark.slow
    def test_a_killed_process_does_not(self) -> None:
        code = (
            "import os, signal; from ckpt.memory.place import MemoryPlace as M;"
            f"M.create({ROOT!r}, root_shown='x'); os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = subprocess.run([sys.executable, "-c", code], timeout=170, check=False)
        assert done.returncode == -9
        place = MemoryPlace.find(ROOT)
        assert place is not None
        assert place.is_deserted()

    def test_a_folder_that_is_gone_is_not_entered(self) -> None:
        place = create()
        place.release()
        other = MemoryPlace.open(place.path)
        assert other is not None
        place.remove()
        assert not other.is_there
        with pytest.raises(PlaceError, match=r"could not open .*: No such file"):
            other.hold()

    def test_a_folder_that_is_being_removed_is_not_entered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(places, "_PATIENCE", 0.05)
        place = create()
        place.release()
        with places._all_alone(place.path), pytest.raises(PlaceError, match="another process is removing"):
            place.hold()


class TestRemoval:
    def test_nothing_is_left(self, memory: Path) -> None:
        place = create()
        (place.slots / "step-1").mkdir()
        (place.slots / "step-1" / "model").write_bytes(b"x")
        place.remove()
        assert list(memory.iterdir()) == []
        place.remove()
        assert place.idle_seconds == 0
        other = create()
        (other.path / RUN).unlink()
        other.remove()
        assert list(memory.iterdir()) == []

    def test_one_that_has_nothing_by_which_anybody_lives_there_is_removed_unless_that_is_no_file(
        self, memory: Path
    ) -> None:
        for make, gone in ((lambda path: None, True), (lambda path: path.symlink_to("nowhere"), False)):
            place = create()
            place.release()
            (place.path / ALIVE).unlink()
            make(place.path / ALIVE)
            assert place.is_deserted() is gone
            assert place.remove_if_deserted() is gone
            assert (place.path in memory.iterdir()) != gone
            assert not gone or not place.remove_if_deserted()

    def test_what_a_link_leads_to_is_left(self, tmp_path: Path, memory: Path) -> None:
        (tmp_path / "mine").write_text("mine")
        place = create()
        (place.slots / "link").symlink_to(tmp_path)
        place.remove()
        assert list(memory.iterdir()) == []
        assert (tmp_path / "mine").read_text() == "mine"

    def test_a_folder_in_which_somebody_lives_is_kept(self) -> None:
        place = create()
        assert not place.remove_if_deserted()
        assert place.is_there
        place.release()
        assert place.remove_if_deserted()
        assert not place.is_there

    def test_find_removes_those_that_have_been_deserted_for_long(self, memory: Path) -> None:
        places_ = [create(f"/runs/{number}") for number in range(3)]
        for old in places_[:2]:
            set_age(old, 3700)
        for left in places_[1:]:
            left.release()
        assert MemoryPlace.find(ROOT) is None
        assert set(memory.iterdir()) == {places_[0].path, places_[2].path}

    def test_a_clock_that_was_set_forward_makes_nothing_expire(self, monkeypatch: pytest.MonkeyPatch) -> None:
        place = create()
        place.release()
        forward = time.time() + 2 * 3600
        monkeypatch.setattr(time, "time", lambda: forward)
        assert remove_expired() == []
        assert MemoryPlace.find(ROOT) == place
        assert place.idle_seconds < 3600

    def test_a_clock_that_was_set_back_keeps_nothing_for_longer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        place = create()
        place.release()
        set_age(place, 3700)
        back = time.time() - 2 * 3600
        monkeypatch.setattr(time, "time", lambda: back)
        assert remove_expired() == [place.path]

    def test_what_an_earlier_boot_has_left_is_removed(self) -> None:
        place = create()
        change_facts(place, boot="another")
        assert remove_expired() == []
        place.release()
        assert remove_expired() == [place.path]

    def test_the_time_can_be_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        place = create()
        place.release()
        set_age(place, 20)
        assert remove_expired() == []
        monkeypatch.setenv("CKPT_MEMORY_LINGER", "10")
        assert remove_expired() == [place.path]

    def test_a_directory_that_is_gone_has_no_folders(self, memory: Path) -> None:
        memory.rmdir()
        assert (remove_expired(), MemoryPlace.list_places()) == ([], [])

    def test_a_folder_whose_maker_was_killed_before_it_had_facts_is_removed_too(self, memory: Path) -> None:
        half = memory / f"ckpt-{'c' * 32}"
        half.mkdir(mode=0o700)
        os.utime(half, (0, 0))
        (half / ALIVE).touch()
        os.utime(half, (0, 0))
        whole = create()
        whole.release()
        (whole.path / ALIVE).unlink()
        os.utime(whole.path, (0, 0))
        assert set(remove_expired()) == {half, whole.path}
        assert list(memory.iterdir()) == []
