"""How ranks meet in memory, case by case: which folder is theirs, what makes it theirs, and when it is removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.errors import StorageError
from ckpt.memory import meeting as meetings
from ckpt.memory.keeper_process import KeeperError
from ckpt.memory.meeting import Meeting
from ckpt.memory.place import MemoryPlace, PlaceError, identity_of, read_token, write_token
from ckpt.memory.slot_storage import hold_memory, is_held, replica_storage, slot_storage
from ckpt.ranks.consensus import SingleProcess
from ckpt.ranks.hosts import ONE_SHARED_ROOT, Hosts
from ckpt.storage import MemoryStorage

TWO = Hosts((0, 1), ("a", "b"))


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """No keeper is started: who asked for one is noted."""
    asked: list[tuple[str, Path]] = []
    monkeypatch.setattr(meetings, "start_keeper", lambda place: asked.append(("start", place.path)))
    monkeypatch.setattr(meetings, "require_keeper", lambda place: asked.append(("require", place.path)))
    monkeypatch.setattr(meetings, "living_keeper", lambda place: None)
    return asked


pytestmark = pytest.mark.usefixtures("memory", "keepers")


@pytest.fixture
def root() -> Iterator[MemoryStorage]:
    storage = MemoryStorage("meeting")
    yield storage
    storage.delete([entry.key for entry in storage.list()])


def met(root: Any, rank: int = 0, **of_meeting: Any) -> Meeting:
    ranks = SingleProcess()
    ranks.rank = rank
    found = Meeting(ranks, root)
    for name, value in of_meeting.items():
        assert hasattr(found, name)
        setattr(found, name, value)
    return found


def others_say(monkeypatch: pytest.MonkeyPatch, *said: Any) -> None:
    """In each exchange in turn, what the ranks before this one and after it say."""
    left = [*said]

    def together(ranks: Any, call: str, mine: Any, decide: Any) -> Any:
        before, after = left.pop(0) if left else ([], [])
        return decide([*before, mine.get(), *after])

    monkeypatch.setattr(meetings, "decide_together", together)


def place_of(root: Any, token: str) -> MemoryPlace:
    place = MemoryPlace.create(identity_of(root, token), root_shown="x")
    place.release()
    return place


class TestFinding:
    def test_a_folder_is_found_by_the_token_of_the_root_and_looked_for_once(self, root: MemoryStorage) -> None:
        nothing = met(root)
        nothing.find()
        assert (nothing.place, nothing.complete, nothing.hosts) == (None, False, ONE_SHARED_ROOT)
        place = place_of(root, write_token(root))
        nothing.find()
        assert nothing.place is None
        found = met(root)
        found.find()
        assert (found.place, found.complete) == (place, True)
        assert not place.is_deserted()
        write_token(root)  # the root was made anew
        other = met(root)
        other.find()
        assert other.place is None

    def test_what_a_keeper_that_has_ended_held_is_removed(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for held, keeper, there in ((False, None, True), (True, object(), True), (True, None, False)):
            monkeypatch.setattr(meetings, "living_keeper", lambda place, keeper=keeper: keeper)
            place = place_of(root, write_token(root))
            if held:
                hold_memory(place)
            found = met(root)
            found.find()
            assert (found.place is not None, place.path.exists()) == (there, there)
            found.remove()

    def test_what_went_wrong_is_said_once_by_the_main_rank(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fails(self: MemoryPlace) -> None:
            raise PlaceError("somebody is there.")

        place_of(root, write_token(root))
        monkeypatch.setattr(MemoryPlace, "hold", fails)
        found = met(root)
        found.find()
        assert (found.place, found.complete) == (None, False)
        assert caplog.messages == ["this run can't use the snapshots in memory: somebody is there."]

    def test_ranks_that_see_other_memory_are_on_other_hosts(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(meetings, "host_identity", lambda: "here")
        monkeypatch.setattr(meetings, "host_name", lambda: "a")
        nothing = {"path": None, "problem": ""}
        for other, hosts in ((["here", "a"], ONE_SHARED_ROOT), (["there", "a"], Hosts((0, 1), ("a", "a")))):
            others_say(monkeypatch, ([], [other]), ([], [nothing]), ([], [nothing]))
            found = met(root)
            found.find()
            assert found.hosts == hosts

    def test_the_ranks_of_a_host_enter_the_folder_of_its_first(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place, other = place_of(root, write_token(root)), place_of(root, "other")
        says, nothing = {"path": str(place.path), "problem": ""}, {"path": None, "problem": ""}
        theirs = {"path": str(other.path), "problem": ""}
        for hosts, announced, found, complete in (
            (ONE_SHARED_ROOT, [says, nothing], place, True), (ONE_SHARED_ROOT, [nothing, theirs], None, False),
            (Hosts((0, 1, 1), ("a", "b", "b")), [says, theirs], other, True),
            (Hosts((0, 1, 1), ("a", "b", "b")), [says, nothing], None, False),
        ):  # fmt: skip
            views: Any = announced
            others_say(monkeypatch, (announced, []), (announced, []))
            entering = met(root, rank=2, hosts=hosts)
            assert entering._enter(lambda: None) == ""
            assert entering.place == found
            assert entering.complete == (complete and all(view["path"] for view in views))
            entering.leave()

    def test_the_problem_of_any_rank_is_that_of_all(self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
        failed = {"path": None, "problem": "no memory."}
        others_say(monkeypatch, ([], [failed]), ([], [failed]))
        entering = met(root)
        assert entering._enter(lambda: place_of(root, "x")) == "no memory."
        assert (entering.complete, entering.place is not None) == (False, True)
        entering.remove()


class TestMaking:
    def test_a_folder_is_made_with_a_keeper_and_a_token(
        self, root: MemoryStorage, keepers: list[tuple[str, Path]]
    ) -> None:
        made = met(root)
        assert not made.complete
        assert made.make() == ""
        place = made.place
        assert place is not None
        assert keepers == [("start", place.path)]
        assert (made.complete, place.is_deserted()) == (True, False)
        token = read_token(root)
        assert made._identity == identity_of(root, token)
        assert made.make() == ""  # again, where another host had none
        assert (made.place, len(keepers), read_token(root)) == (place, 1, token)
        made.settle()
        assert keepers[1:] == [("start", place.path)]
        made.end()
        assert (read_token(root), place.path.exists()) == ("", False)

    def test_where_the_tmpfs_is_too_small_a_keeper_must_hold_the_memory(
        self, root: MemoryStorage, memory: Path, keepers: list[tuple[str, Path]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = met(root)
        assert made.make([0]) == ""
        assert made.place is not None
        assert keepers == [("require", made.place.path)]
        assert is_held(made.place)
        made.remove()
        assert met(root).make([1]) == ""
        assert keepers[1][0] == "start"

        def fails(place: MemoryPlace) -> None:
            raise KeeperError("no interpreter.")

        before = set(memory.iterdir())
        monkeypatch.setattr(meetings, "require_keeper", fails)
        failing = met(root)
        problem = f"{memory} is too small, and ckpt could not start a keeper process: no interpreter."
        assert failing.make([0]) == problem
        assert (failing.place, failing.complete, set(memory.iterdir())) == (None, False, before)

    def test_a_new_folder_is_removed_where_another_host_has_none_and_an_old_one_is_kept(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failed = {"path": None, "problem": "no memory."}
        for had in (True, False):
            place = place_of(root, "old") if had else None
            others_say(monkeypatch, ([], []), ([], [failed]), ([], [failed]))
            made = met(root, hosts=TWO, place=place)
            assert made.make() == "no memory."
            assert made.place == place
            made.remove()

    def test_a_rank_that_is_not_first_settles_nothing(self, root: MemoryStorage, keepers: list[Any]) -> None:
        met(root).settle()
        met(root, rank=1, place=place_of(root, "x")).settle()
        assert keepers == []


class TestLeaving:
    def test_what_is_not_continued_from_is_removed_after_its_token(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = place_of(root, token := write_token(root))
        there: list[tuple[str, bool]] = []
        own = Meeting.remove

        def remove(self: Meeting) -> None:
            there.append((read_token(root), place.path.exists()))
            own(self)

        monkeypatch.setattr(Meeting, "remove", remove)
        left = met(root, place=place, complete=True, _token=token, _taken=7)
        left.forget()
        assert there == [("", True)]
        assert (left.place, left.complete, left._token, left._taken) == (None, False, "", 0)
        assert not place.path.exists()
        write_token(root)
        left.forget()  # another run's by now
        assert read_token(root) != ""

    def test_a_rank_that_is_not_first_only_leaves(self, root: MemoryStorage) -> None:
        place = place_of(root, "x")
        place.hold()
        left = met(root, rank=1, place=place)
        left.remove()
        assert (left.place, place.path.exists(), place.is_deserted()) == (None, True, True)

    def test_a_folder_that_is_left_for_a_restart_is_found_again(self, root: MemoryStorage) -> None:
        place = place_of(root, write_token(root))
        found = met(root)
        found.find()
        found.leave()
        assert (found.place, found.complete, place.is_deserted()) == (None, False, True)
        found.find()
        assert found.place == place
        found.leave()

    def test_a_run_that_needs_no_restart_removes_its_token(self, root: MemoryStorage) -> None:
        class Away(MemoryStorage):
            def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
                raise StorageError("away.")

        for rank, token, gone in ((0, "t", True), (1, "t", False), (0, "", False)):
            write_token(root, "t")
            place = place_of(root, "t")
            ended = met(root, rank=rank, _token=token, place=place, _is_found=True)
            ended.end()
            assert (read_token(root) == "", ended._is_found, place.path.exists()) == (gone, False, rank == 1)
        met(Away("away"), _token="t").end()

    def test_a_token_that_is_gone_or_anothers_is_written_again(self, root: MemoryStorage) -> None:
        for token, there, after in (("t", "", "t"), ("t", "u", "t"), ("t", "t", "t"), ("", "u", "u"), ("", "", "")):
            root.delete([".memory"])
            if there:
                write_token(root, there)
            version = root.version(".memory")
            met(root, _token=token).renew_token()
            assert read_token(root) == after
            assert (root.version(".memory") == version) == (there == after)


def test_the_room_counts_what_snapshots_and_copies_take_already(
    root: MemoryStorage, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, int, bool]] = []

    def measure(folder: Path, used: int, *, held: bool = False) -> Any:
        asked.append((folder, used, held))
        return {}

    monkeypatch.setattr("ckpt.memory.room.measure", measure)
    measured = met(root)
    measured.measure_room()
    place = place_of(root, "x")
    slot_storage(place).write("a/model", [b"123"])
    replica_storage(place).write("b/model", [b"45"])
    measured.place = place
    measured.measure_room()
    hold_memory(place)
    monkeypatch.setattr(meetings, "slot_storage", lambda place: SimpleNamespace(list=lambda: fails(), unused=lambda: 0))

    def fails() -> Any:
        raise StorageError("removed meanwhile")

    measured.measure_room()
    assert asked == [(memory, 0, True), (place.path, 5, False), (place.path, 5, True)]
    place.remove()
    with pytest.raises(PlaceError, match="was removed"):
        measured.measure_room()


def test_a_run_that_lives_in_its_folder_is_known_to(root: MemoryStorage) -> None:
    met(root).note_life()
    noted: list[int] = []
    met(root, place=SimpleNamespace(note_life=lambda: noted.append(1))).note_life()
    assert noted == [1]
