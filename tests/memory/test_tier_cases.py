"""The memory tier case by case, beside parts that only note what they are told: when it works, and what it leaves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.errors import FullError, LockedError, RanksError, StorageError
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME
from ckpt.memory import tier as tiers
from ckpt.memory.place import TOKEN, MemoryPlace, PlaceError, read_step, write_step, write_token
from ckpt.memory.tier import MemoryTier, warn_of_unsaved
from ckpt.ranks.consensus import SingleProcess
from ckpt.ranks.hosts import Hosts
from ckpt.save.root_writer import RootWriter
from ckpt.storage import MemoryStorage
from tests.helpers.byte_checkpoints import save


class Noted:
    """Notes the names of the methods that are called. Some of them raise, or return something."""

    def __init__(self, calls: list[str], **given: Any) -> None:
        self.__dict__.update(given)
        self._calls = calls
        self._given: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*given: Any, **named: Any) -> Any:
            self._calls.append(name)
            self._given[name] = given, named
            answer = self.__dict__.get(f"on_{name}")
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


class Parts:
    """A tier, and what its parts were told."""

    def __init__(self, rank: int = 0, every: int = 2, **of_tier: Any) -> None:
        self.calls: list[str] = []
        self.ranks = SingleProcess()
        self.ranks.rank = rank
        self.storage = MemoryStorage(f"tier-cases-{id(self)}")
        self.root: Any = Noted(self.calls, storage=self.storage, lineage=SimpleNamespace(run="run"))
        self.meeting: Any = Noted(self.calls, hosts=Hosts(), place=None, complete=True, owns_place=True)
        self.replicas: Any = Noted(self.calls, count=0, is_off=False, on_restore=False)
        self.saver: Any = Noted(self.calls, root=self.root, has_saved=False)
        of: Any = self.saver, self.meeting, self.replicas
        self.tier = MemoryTier(every, self.ranks, *of)
        for name, value in of_tier.items():
            assert hasattr(self.tier, name)
            setattr(self.tier, name, value)

    def slots(self, **given: Any) -> Noted:
        found = self.tier._slots = Noted(self.calls, **{"busy": False, "size": 7, **given})  # type: ignore[assignment]
        return found


@pytest.fixture
def place(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryPlace]:
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path))
    place = MemoryPlace.create("root", root_shown="root")
    yield place
    place.remove()


def test_when_a_snapshot_is_due_and_when_memory_is_made_ready_for_it() -> None:
    for step, more, due, prepares in (
        (0, {}, False, False), (1, {}, False, True), (2, {}, True, False), (3, {}, False, True), (4, {}, True, False),
        (2, {"_taken_at": 2}, False, False), (4, {"_taken_at": 2}, True, False), (3, {"_taken_at": 2}, False, False),
        (2, {"is_off": True}, False, False), (1, {"is_off": True}, False, False),
        (4, {"_resume_at": 5}, False, True), (6, {"_resume_at": 5}, True, False), (6, {"_resume_at": 6}, True, False),
        (1, {"_is_prepared": True}, False, False), (1, {"continues": True}, False, False),
    ):  # fmt: skip
        tier = Parts(**more).tier
        assert (tier.is_due(step), tier.is_to_prepare(step)) == (due, prepares), (step, more)
    assert Parts(every=1).tier.is_due(1)


def test_what_a_load_leaves_in_memory_is_not_for_a_later_resume() -> None:
    for settled, passed_over, calls in (
        (False, None, []), (False, ["m"], []), (True, ["m"], []), (True, [], []),
        (True, None, ["wait", "close", "forget"]),
    ):  # fmt: skip
        parts = Parts(_is_settled=settled, _taken_at=4, _held_at=4, _damaged={"n"})
        parts.slots()
        parts.tier.loaded(passed_over)
        assert (parts.calls, parts.tier.continues) == (calls, passed_over is not None)
        assert parts.tier._damaged == {"n", *(passed_over or ())}
        assert (parts.tier._taken_at, parts.tier._held_at) == (None, None if calls else 4)


def test_a_root_that_is_locked_has_the_token_of_this_run_or_none() -> None:
    for settled, continues, calls, stays in (
        (False, False, [], False), (False, True, [], True), (True, False, ["renew_token"], True),
        (True, True, ["renew_token"], True),
    ):  # fmt: skip
        parts = Parts(_is_settled=settled, continues=continues)
        write_token(parts.storage)
        parts.tier.root_is_held()
        assert (parts.calls, parts.storage.version(TOKEN) is not None) == (calls, stays)


def test_what_was_there_before_is_kept_or_removed_once() -> None:
    for continues, settled, off, calls in (
        (True, False, False, ["find", "settle"]), (False, False, False, ["find", "forget"]),
        (True, True, False, []), (True, False, True, ["find"]),
    ):  # fmt: skip
        parts = Parts(continues=continues, _is_settled=settled, is_off=off)
        parts.tier.settle()
        assert parts.calls == calls
        assert parts.tier._is_settled == (settled or not off)
        parts.tier.settle()
        assert parts.calls == calls * (2 if off else 1)


def test_the_first_step_after_snapshots_were_left_takes_the_root() -> None:
    for settled, continues, off, calls in (
        (False, False, False, ["find", "hold", "find", "forget"]), (True, False, False, []), (False, True, False, []),
        (False, False, True, []),
    ):  # fmt: skip
        parts = Parts(_is_settled=settled, continues=continues, is_off=off)
        parts.tier.stepped(3)
        assert parts.calls == calls
        assert not calls or parts.root._given["hold"] == (("step() (memory)",), {"resumed": False})
        assert parts.tier._has_trained


def test_the_step_is_recorded_by_the_main_rank_of_a_run_that_has_the_root(place: MemoryPlace) -> None:
    for rank, settled, there, recorded in (
        (0, True, True, 3), (1, True, True, None), (0, False, True, None), (0, True, False, None),
    ):  # fmt: skip
        (place.path / "step").unlink(missing_ok=True)
        parts = Parts(rank, _is_settled=settled, continues=True)
        parts.meeting.place = place if there else None
        parts.tier.stepped(3)
        assert read_step(place) == recorded
    parts.meeting.place = SimpleNamespace(path=place.path / "gone")
    parts.tier._is_settled = True
    parts.tier.stepped(4)


def test_a_tier_that_cannot_be_used_is_off_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    for rank in (0, 1):
        for error in (PlaceError("no folder."), OSError("no memory.")):
            caplog.clear()
            parts = Parts(rank)
            parts.meeting.on_find = error
            assert parts.tier.find() is None
            assert parts.tier.is_off
            assert caplog.messages == [f"snapshots in memory are off: {error}"][: 1 - rank]
    parts = Parts()
    parts.root.on_hold = LockedError("held.")
    assert not parts.tier._take_root()
    assert (parts.tier.is_off, parts.tier._is_settled, parts.calls) == (True, False, ["hold"])
    for name, call in (("find", "_meet"), ("hold", "_take_root")):
        parts = Parts()
        setattr(parts.meeting if name == "find" else parts.root, f"on_{name}", RanksError("rank 1 is gone."))
        with pytest.raises(RanksError):
            getattr(parts.tier, call)()
        assert not parts.tier.is_off


def test_what_a_killed_run_has_left_is_found_with_the_step_that_it_had_reached(
    place: MemoryPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "decide_together", lambda ranks, call, mine, decide: decide([mine.get()]))
    write_step(place, 41)
    for rank, there, received in ((0, True, True), (1, True, False), (0, False, False)):
        parts = Parts(rank)
        parts.slots()
        parts.replicas.on_restore = received
        parts.meeting.place = place if there else None
        found = parts.tier.find()
        assert (found is not None) == there
        assert parts.calls == ["wait", "find", "restore"]
        assert parts.tier.crashed_at == (41 if there and rank == 0 else None)
        assert parts.tier._has_received is received


@pytest.mark.parametrize(
    ("keep", "of_tier", "calls"),
    [
        (False, {"_is_settled": True, "_has_trained": True}, ["wait", "close", "end"]),
        (False, {"_is_settled": True}, ["wait", "close", "leave"]),
        (False, {"_is_settled": True, "saved": True}, ["wait", "close", "end"]),
        (False, {"_has_trained": True}, ["wait", "close", "leave"]),
        (False, {"_has_trained": True, "_has_received": True}, ["wait", "close", "remove", "leave"]),
        (True, {"_is_settled": True, "_has_trained": True}, ["abandon", "close", "wait", "close", "leave"]),
        (True, {"_is_settled": True, "_has_trained": True, "_has_received": True},
         ["abandon", "close", "wait", "close", "leave"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_tier_leaves_when_it_ends(
    keep: bool, of_tier: dict[str, Any], calls: list[str], rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    saved = of_tier.get("saved", False)
    parts = Parts(rank, **{name: value for name, value in of_tier.items() if name != "saved"}, _held_at=6)
    parts.saver.has_saved = saved
    parts.slots()
    with caplog.at_level(logging.INFO, "ckpt"):
        parts.tier.close(keep=keep)
    assert parts.calls == calls
    assert (parts.tier._is_settled, parts.tier.continues, parts.tier._slots) == (False, False, None)
    assert ("the run has ended" in caplog.text) == ("end" in calls and rank == 0)
    assert "memory: " not in caplog.text
    parts.tier.statistics.taken = 3
    with caplog.at_level(logging.INFO, "ckpt"):
        parts.tier.close(keep=True)
    assert ("memory: 3 snapshots" in caplog.text) == (rank == 0)


def test_a_snapshot_with_which_a_run_ends_is_compared_with_its_newest_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Away(MemoryStorage):
        def list(self, prefix: str = "") -> Any:
            raise StorageError("away.")

    storage = MemoryStorage("unsaved")
    root: Any = SimpleNamespace(storage=storage, lineage=SimpleNamespace(run="run"))
    warn_of_unsaved(root, 0)
    assert caplog.messages == []
    warn_of_unsaved(root, 5)
    assert "the snapshot of step 5 from memory, but memory://unsaved has no checkpoint. Call" in caplog.text
    for name, step in (("a", 1200), ("b", 300)):
        manifest = replace(save(storage, name), progress={"step": step})
        for path in (FILE_NAME, COPY_NAME):
            storage.write(f"{name}/{path}", [manifest.to_bytes()])
    for taken_at, told in ((1199, False), (1200, False), (1201, True)):
        caplog.clear()
        warn_of_unsaved(root, taken_at)
        assert ("the newest checkpoint in memory://unsaved has step 1,200." in caplog.text) == told
    caplog.clear()
    warn_of_unsaved(SimpleNamespace(storage=Away("away"), lineage=root.lineage), 9)  # type: ignore[arg-type]
    assert caplog.messages == []


def test_the_tier_gives_way_for_twice_as_long_every_time(caplog: pytest.LogCaptureFixture) -> None:
    for rank in (0, 1):
        caplog.clear()
        parts = Parts(rank, every=3, _error=StorageError("x"), _held_at=2)
        pauses = []
        for step in (10, 100, 1000):
            parts.slots()
            with caplog.at_level(logging.INFO, "ckpt"):
                parts.tier._give_way({"do": "give way", "why": "no room.", "free": False, "small": []}, step)
            pauses.append(parts.tier._resume_at - step)
            assert (parts.tier._error, parts.tier._slots, parts.tier._held_at) == (None, None, 2)
        assert pauses == [30, 60, 120]
        parts.tier._pause = 600
        parts.tier._give_way({"do": "give way", "why": "x", "free": False, "small": []}, 0)
        assert parts.tier._pause == tiers._LONGEST_PAUSE
        told = [(record.levelname, record.getMessage()) for record in caplog.records]
        if rank == 0:
            text = "snapshots in memory are off until step {}: no room. Training and the root are not affected."
            assert told == [("WARNING", text.format(40)), ("INFO", text.format(160)), ("INFO", text.format(1120))]
        else:
            assert told == []
        assert (parts.calls, parts.meeting.complete) == (["wait", "close"] * 3, False)


def test_the_folder_is_removed_where_its_memory_is_needed_or_it_is_not_this_runs_any_more() -> None:
    for free, place, removed in (
        (True, None, True), (False, None, False), (False, SimpleNamespace(is_there=True), False),
        (False, SimpleNamespace(is_there=False), True), (True, SimpleNamespace(is_there=True), True),
    ):  # fmt: skip
        parts = Parts(_held_at=2)
        parts.meeting.place = place
        parts.tier._give_way({"do": "give way", "why": "x", "free": free, "small": []}, 4)
        assert (parts.calls, parts.tier._held_at) == (["remove"] * removed, None if removed else 2)


def test_what_a_rank_sees_before_a_snapshot() -> None:
    def view(parts: Parts, size: int = 5) -> Any:
        files = [SimpleNamespace(size=size)]
        encoded = SimpleNamespace(encode=lambda: SimpleNamespace(files=files))
        return parts.tier._view(SimpleNamespace(capture=lambda: encoded))  # type: ignore[arg-type]

    parts = Parts()
    parts.meeting.on_measure_room = "room"
    assert {key: view(parts)[key] for key in ("busy", "error", "full", "size", "room")} == {
        "busy": False, "error": "", "full": False, "size": 5, "room": "room"
    }  # fmt: skip
    parts.meeting.owns_place = False
    assert view(parts)["room"] is None
    parts.slots(size=None)
    assert view(parts)["size"] == 5
    parts.slots(size=9)
    assert view(parts)["size"] == 9
    parts.slots(busy=True, on_check=StorageError("not asked while it is busy"))
    assert (view(parts)["busy"], view(parts)["error"]) == (True, "")
    for error, full in ((FullError("full."), True), (MemoryError(), True), (StorageError("bad."), False)):
        parts.slots(on_check=error)
        assert (view(parts)["error"], view(parts)["full"]) == (str(error) or "MemoryError", full)
        parts.tier._error = None
    parts = Parts()
    parts.meeting.on_measure_room = OSError("gone.")
    assert view(parts)["error"] == "gone."


def test_a_snapshot_is_taken_left_out_or_given_up_as_all_ranks_decide(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Asked(MemoryTier):
        def _agree(self, request: Any, least: int) -> Any:
            assert request.name == "a"
            asked.append(least)
            return {"do": verdict, "why": "because.", "free": False, "small": [0]}

    asked: list[int] = []
    clock = [0.0]

    def monotonic() -> float:
        clock.append(clock[-1] + 1)
        return clock[-1]

    monkeypatch.setattr("time.monotonic", monotonic)
    for verdict, complete, made, taken, skipped, is_tried_later in (
        ("save", True, "", 1, 0, False), ("skip", True, "", 0, 1, False), ("give way", True, "", 0, 0, True),
        ("save", False, "", 1, 0, False), ("save", False, "no folder", 0, 0, True),
        ("save", False, PlaceError("no folder"), 0, 0, True),
    ):  # fmt: skip
        caplog.clear()
        parts = Parts(_is_settled=True)
        parts.tier.__class__ = Asked
        parts.slots()
        parts.meeting.complete, parts.meeting.on_make = complete, made
        parts.tier.save(SimpleNamespace(name="a"), 2)  # type: ignore[arg-type]
        tier = parts.tier
        assert (tier.statistics.taken, tier.statistics.skipped, tier.statistics.waited) == (taken, skipped, 1)
        assert (tier._taken_at, tier._held_at) == (2, 2 if taken else None)
        calls = {"give way": ["wait", "close"], "skip": [], "save": ["prepare", "release_idle", "save", "note_life"]}
        gives_way = verdict == "give way" or bool(made)
        assert parts.calls == ["find", *["make"] * (not complete), *calls["give way" if gives_way else verdict],
                               *["remove"] * bool(made)]  # fmt: skip
        assert (tier._resume_at > 2) == is_tried_later
        assert caplog.text.count("Skipped a memory snapshot") == skipped
        tier._skip()
        assert caplog.text.count("Skipped a memory snapshot") <= 1
    assert set(asked) == {0}
    for verdict in ("save", "skip"):
        parts = Parts(_is_settled=True)
        parts.tier.__class__ = Asked
        parts.slots()
        parts.tier.prepare(SimpleNamespace(name="a"), 1)  # type: ignore[arg-type]
        assert (parts.calls == ["find", "prepare"]) == (verdict == "save")
        assert parts.tier._is_prepared
    assert asked[-1] == tiers._WORTH_PREPARING
    parts = Parts(is_off=True)
    parts.tier.save(SimpleNamespace(name="a"), 2)  # type: ignore[arg-type]
    assert (parts.calls, parts.tier._resume_at) == (["find"], 0)


def test_all_ranks_decide_together_and_memory_is_made_ready_where_any_has_much_to_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others: list[Any] = []
    verdicts: list[Any] = []

    def together(ranks: Any, call: str, mine: Any, decide: Any) -> Any:
        assert (ranks, call) == (parts.ranks, "step() (memory, a)")
        return decide([mine.get(), *others])

    def verdict_of(views: Any, hosts: Any, copies: bool) -> Any:
        verdicts.append(([view["size"] for view in views], hosts, copies))
        return "the verdict"

    monkeypatch.setattr(tiers, "decide_together", together)
    monkeypatch.setattr(tiers, "verdict_of", verdict_of)
    skip = {"do": "skip", "why": "", "free": False, "small": []}
    for size, other, least, skips in (
        (7, 7, 0, False), (7, 7, 7, False), (6, 7, 7, False), (7, 6, 7, False), (6, 6, 7, True),
    ):  # fmt: skip
        for count, off in ((0, False), (1, False), (1, True), (0, True)):
            verdicts.clear()
            parts = Parts()
            parts.slots(size=size)
            parts.replicas.count, parts.replicas.is_off = count, off
            others[:] = [{"size": other}]
            found = parts.tier._agree(SimpleNamespace(name="a"), least)  # type: ignore[arg-type]
            assert found == (skip if skips else "the verdict")
            assert verdicts == ([] if skips else [([size, other], parts.meeting.hosts, count == 1 and not off)])


def test_snapshots_are_written_into_the_folder_for_the_run_of_the_root(
    place: MemoryPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "SlotSaver", lambda *given, **named: SimpleNamespace(given=given, named=named))
    parts = Parts(_damaged={"m"})
    parts.meeting.place = place
    parts.saver.root = main = RootWriter(parts.storage, parts.ranks)
    parts.saver.snapshots = object()
    slots: Any = parts.tier._open_slots()
    writer, snapshots = slots.given
    assert (writer.storage.url, writer.ranks, writer.hosts) == (str(place.slots), parts.ranks, parts.meeting.hosts)
    assert (writer.main, writer.numbering, writer.seal) == (main, main.numbering, main.seal)
    assert writer.lineage.has_resumed
    assert writer.damaged is parts.tier._damaged
    assert (snapshots, slots.named) == (parts.saver.snapshots, {"read_back": False, "channel": "memory"})
    assert slots.compared is parts.tier.compared
    slots.after_commit("a")
    assert parts.replicas._given["exchange"] == (("a", place), {})
    assert parts.tier._open_slots() is slots
    request: Any = SimpleNamespace()
    noted = parts.slots()
    parts.tier._begin(request)
    assert noted._given["save"] == ((request,), {"wait": False})


def test_what_goes_wrong_in_a_snapshot_waits_for_the_next() -> None:
    parts = Parts()
    parts.slots(on_save=ValueError("x"), on_wait=KeyError("y"))
    parts.tier._begin(SimpleNamespace())  # type: ignore[arg-type]
    assert (type(parts.tier._error), parts.tier.statistics.taken, parts.tier._held_at) == (ValueError, 0, None)
    parts.tier.wait()
    assert type(parts.tier._error) is KeyError
    parts.slots(on_close=StorageError("z"))
    parts.tier._close_slots()
    assert (parts.tier._slots, parts.tier.busy) == (None, False)
    parts.slots(busy=True)
    assert parts.tier.busy
