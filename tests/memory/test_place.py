"""The folder of a run in memory: found by its own run alone, and removed when nobody lives there."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt.memory import place as places
from ckpt.memory.place import ALIVE, RUN, SLOTS, MemoryPlace, PlaceError, remove_expired
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

    def test_the_newest_of_two_is_found(self) -> None:
        old, new = create(), create()
        change_facts(old, created="2020-01-01T00:00:00.000+00:00")
        found = MemoryPlace.find(ROOT)
        assert found is not None
        assert found.path == new.path

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

    def test_a_folder_whose_maker_was_killed_before_it_had_facts_is_removed_too(self, memory: Path) -> None:
        half = memory / f"ckpt-{'c' * 32}"
        half.mkdir(mode=0o700)
        os.utime(half, (0, 0))
        assert remove_expired() == [half]
