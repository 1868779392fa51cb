"""Which checkpoint is taken, case by case: listings of memory, root and mirror, and what each rank says of one."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ckpt
from ckpt.errors import (
    DamagedError,
    LockedError,
    MissingError,
    TransientError,
    UntrustedError,
    VersionError,
)
from ckpt.formats.layout import Layout
from ckpt.formats.native import manifest as manifest_format
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, FileRecord, Manifest
from ckpt.load import select
from ckpt.load.select import (
    MEMORY,
    STRAY,
    Candidate,
    Inspection,
    Listed,
    MemoryTier,
    Replicas,
    Selection,
    choose,
    join_listings,
    list_memory,
    list_tiers,
    problem_on_hosts,
    storage_for_rank,
)
from ckpt.ranks.consensus import SingleProcess
from ckpt.ranks.hosts import Hosts
from ckpt.root.mirror import MirrorPatience
from ckpt.root.signing import Trust
from ckpt.storage import Entry, MemoryStorage, Storage
from tests.helpers.byte_checkpoints import FILES, MOMENT, attempt_at, begin_and_write, save
from tests.helpers.places import PassedOn

_numbers = itertools.count()


def new() -> MemoryStorage:
    return MemoryStorage(f"select-{next(_numbers)}")


@pytest.fixture
def root() -> MemoryStorage:
    return new()


class Away(PassedOn):
    """Answers nothing, or nothing about some keys."""

    away = ""

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._answer(key)
        return super().read(key, start, stop)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        self._answer(prefix)
        return super().list(prefix)

    def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
        self._answer(key)
        return super().lock(key, shared=shared, note=note)

    def _answer(self, key: str) -> None:
        if key.startswith(self.away):
            raise TransientError("no answer.")


def listed(tier: int, name: str, sequence: int, **more: Any) -> Listed:
    known = {"problem": None, "was_committed": True, "created": MOMENT, "step": sequence, "run": "run"}
    return {"tier": tier, "name": name, "sequence": sequence, "id": f"id-{name}", "parent": None, **known, **more}  # type: ignore[typeddict-item]


class TestListings:
    def test_the_newest_is_first_and_of_two_copies_the_lower_tiers(self, root: Storage) -> None:
        found = join_listings(
            root,
            None,
            [
                ([listed(0, "a", 1), listed(0, "b", 2), listed(1, "b", 2), listed(1, "c", 3)], False),
                ([listed(0, "b", 2), listed(0, "d", 3, created=MOMENT.replace("2026", "2025"))], True),
            ],
            foreign=False,
        )
        assert found["order"] == [(1, "c"), (0, "d"), (0, "b"), (1, "b"), (0, "a")]
        assert (found["passed_over"], found["lost"], found["root_step"], found["unseen"]) == ({}, [], 3, True)

    def test_what_cannot_be_used_is_named_and_what_was_committed_is_lost(self, root: Storage) -> None:
        damaged = {"problem": "it is damaged."}
        cut_off = {"problem": "it was never committed.", "was_committed": False}
        here = [
            listed(0, "a", 1), listed(0, "b", 0, **damaged), listed(0, "c", 0, **cut_off), listed(1, "d", 0, **damaged),
            listed(MEMORY, "e", 0, **damaged), listed(MEMORY, "f", 9),
        ]  # fmt: skip
        found = join_listings(root, None, [(here, False)], foreign=False)
        assert found["order"] == [(MEMORY, "f"), (0, "a")]
        assert found["passed_over"] == {
            "b": "it is damaged.", "c": "it was never committed.", "e in memory": "it is damaged."
        }  # fmt: skip
        assert (found["lost"], found["root_step"], found["unseen"]) == (["b", "d"], 1, False)
        other_host = [listed(0, "b", 2)]
        found = join_listings(root, None, [(here, False), (other_host, False)], foreign=False)
        assert (found["order"][1], "b" in found["passed_over"], found["lost"]) == ((0, "b"), False, ["d"])
        copies = [listed(0, "b", 2), listed(1, "b", 0, **damaged), listed(0, "c", 0, **damaged), listed(1, "c", 3)]
        found = join_listings(root, None, [(copies, False)], foreign=False)
        assert (found["order"], found["lost"]) == ([(1, "c"), (0, "b")], ["c"])  # what the root has is not lost
        alone = join_listings(root, None, [([listed(1, "d", 0, **damaged)], False)], foreign=False)
        assert (alone["order"], alone["passed_over"], alone["lost"]) == ([], {"d": "it is damaged."}, ["d"])
        assert alone["root_step"] is None

    def test_a_snapshot_in_memory_that_continues_from_what_somebody_removed_is_left(self, root: Storage) -> None:
        for stored, parent, stays in (
            ([], None, True),
            ([], "id-gone", False),
            ([listed(0, "a", 1)], "id-a", True),
            ([listed(0, "a", 1)], "id-gone", False),
            ([listed(0, "a", 1)], None, True),
            ([listed(0, "a", 1, parent="id-old")], "id-old", True),
            ([listed(0, "a", 1, parent="id-old")], None, False),
            ([listed(1, "a", 1)], "id-a", True),
            ([listed(0, "a", 1), listed(0, "b", 0, problem="damaged")], "id-gone", True),
            ([listed(0, "a", 1), listed(1, "b", 0, problem="damaged")], "id-gone", True),
            ([listed(0, "a", 1), listed(0, "b", 0, problem="x", was_committed=False)], "id-gone", False),
            ([listed(0, "a", 1), listed(MEMORY, "b", 0, problem="damaged")], "id-gone", False),
        ):
            found = join_listings(root, None, [([*stored, listed(MEMORY, "m", 9, parent=parent)], False)], foreign=True)
            assert ((MEMORY, "m") in found["order"]) == stays, (stored, parent)
            assert found["passed_over"].get("m in memory") == (None if stays else STRAY)

    def test_a_name_is_looked_for_alone(self, root: Storage) -> None:
        save(root, "a")
        found = join_listings(root, "a", [([listed(0, "a", 1), listed(1, "a", 1)], False)], foreign=False)
        assert (found["order"], found["passed_over"], found["root_step"]) == ([(0, "a"), (1, "a")], {}, None)
        found = join_listings(root, "a", [([listed(0, "a", 0, problem="x")], False)], foreign=False)
        assert found["order"] == [(0, "a")]
        with pytest.raises(MissingError):
            join_listings(root, "none", [([], False)], foreign=False)

    def test_tiers_are_listed_and_a_mirror_that_is_away_is_passed_over_if_the_root_has_something(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        mirror, seen = new(), list[Any]()
        away = Away(mirror.url)
        with pytest.raises(TransientError):
            list_tiers([root, away], None)
        begin_and_write(root, attempt_at(root, "cut"))
        with pytest.raises(TransientError):
            list_tiers([root, away], None)
        save(root, "a", sequence=3)
        found, unseen = list_tiers([root, away], None, on_listed=seen.append)
        assert ([(each["tier"], each["name"]) for each in found], unseen) == ([(0, "a"), (0, "cut")], False)
        assert "which may have newer checkpoints: no answer." in caplog.text
        assert [overview.storage for overview in seen] == [root]
        assert list_tiers([root, away], None, MirrorPatience())[1] is True
        save(mirror, "b", sequence=2)
        found, unseen = list_tiers([root, mirror], None, MirrorPatience())
        assert ([(each["tier"], each["name"]) for each in found], unseen) == ([(0, "a"), (0, "cut"), (1, "b")], False)
        first = found[0]
        assert (first["sequence"], first["created"], first["step"], first["problem"]) == (3, MOMENT, 0, None)
        assert (bool(first["id"]), first["parent"], first["was_committed"]) == (True, None, True)
        assert found[1]["problem"] is not None
        assert found[1]["was_committed"] is False
        assert [each["problem"] is None for each in list_tiers([root, mirror], "b")[0]] == [False, True]
        assert list_tiers([root, mirror], "")[0] == []

    def test_a_root_that_is_away_is_an_error_that_says_what_the_mirror_has(self, root: MemoryStorage) -> None:
        mirror, away = new(), Away(root.url)
        with pytest.raises(TransientError, match=r"^no answer\.$"):
            list_tiers([away], None)
        cases: list[tuple[list[Any], str]] = [
            ([away, mirror], "has no such checkpoint"),
            ([away, Away(mirror.url)], "ckpt can't read the mirror either: no answer"),
        ]
        for tiers, has in cases:
            with pytest.raises(TransientError, match=has):
                list_tiers(tiers, None)
        save(mirror, "b", sequence=1)
        save(mirror, "c", sequence=2)
        with pytest.raises(TransientError, match=r"has c, but the root may have a newer one.*Nothing was loaded"):
            list_tiers([away, mirror], None)

    def test_a_newer_version_is_an_error_unless_another_name_is_asked_for(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(root, "a")
        with monkeypatch.context() as patch:
            patch.setattr(manifest_format, "VERSION", 9)
            save(root, "newer", sequence=2)
        with pytest.raises(VersionError):
            list_tiers([root], None)
        assert list_tiers([root], "a")[0][0]["problem"] is None
        assert "Upgrade" in str(list_tiers([root], "newer")[0][0]["problem"])

    def test_memory_that_cannot_be_read_is_as_good_as_none(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(root, "a")
        begin_and_write(root, attempt_at(root, "cut"))
        assert [(each["tier"], each["name"]) for each in list_memory(root)] == [(MEMORY, "a")]
        assert list_memory(Away(root.url)) == []
        assert ": no answer." in caplog.text


class TestVerdicts:
    def test_one_of_all_ranks_is_decided_by_what_cannot_be_read_or_locked(self) -> None:
        damaged, away, gone = ("damaged", "altered"), ("unreached", "no answer"), ("vanished", "gone")
        busy, untrusted = ("busy", "locked"), ("untrusted", "unsigned")
        assert select._sorted([None, None]) == []
        assert select._sorted([None, damaged, gone, busy, away]) == [away, busy, gone, damaged]
        assert select._sorted([untrusted, None]) == [untrusted]
        assert select._sorted([untrusted, damaged])[0] == damaged

    def test_what_each_finding_is(self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
        def found(storage: Any = root, trust: Trust = Trust(), *, lists: bool = True) -> str:  # noqa: B008
            with ExitStack() as held:
                manifests: list[Manifest] = []
                verdict = select._inspect(storage, "a", held, manifests, trust, lists=lists)
                if verdict is None:
                    assert [manifest.name for manifest in manifests] == ["a"]
                    with pytest.raises(LockedError):
                        root.lock("a").__enter__()
                    return "fine"
                return verdict[0]

        assert found() == "vanished"
        save(root, "a")
        assert found() == "fine"
        assert found(trust=Trust(("ab" * 32,), required=True)) == "untrusted"
        away = Away(root.url)
        assert found(away) == "unreached"
        with root.lock("a"):
            assert found() == "busy"
        root.delete(["a/state.json"])
        assert (found(), found(lists=False)) == ("damaged", "fine")
        far = PassedOn(root.url)
        far.is_local = False
        assert found(far) == "damaged"
        monkeypatch.setattr(select, "MOST_LISTED", 1)  # of its two files
        assert (found(), found(far)) == ("damaged", "fine")
        root.write(f"a/{FILE_NAME}", [b"x"])
        root.write(f"a/{COPY_NAME}", [b"x"])
        assert found() == "damaged"

    def test_they_are_raised_as_what_they_are(self, root: MemoryStorage) -> None:
        class Ranks(SingleProcess):
            @contextmanager
            def working(self, *, job_wide: bool = False) -> Iterator[None]:
                alive.add(1)
                yield
                alive.clear()

        class Slow(PassedOn):
            def list(self, prefix: str = "") -> Iterator[Entry]:
                listed.append(bool(alive))  # may take long: the other ranks see that this one lives
                return super().list(prefix)

        alive, listed = set[int](), list[bool]()

        def inspect(storage: Any = root, trust: Trust | None = None) -> Inspection:
            inspection = Inspection(Ranks(), "load_state()", trust or Trust())
            with ExitStack() as held:
                inspection.complete(storage, "a", held)
            return inspection

        with pytest.raises(DamagedError):
            inspect()
        save(root, "a")
        assert not inspect(Slow(root.url)).vanished
        assert set(listed) == {True}
        with pytest.raises(UntrustedError):
            inspect(trust=Trust(("ab" * 32,), required=True))
        with pytest.raises(TransientError):
            inspect(Away(root.url))
        with root.lock("a"), pytest.raises(LockedError, match="is being removed or cleaned up by another process"):
            inspect()
        root.delete(["a/state.json"])
        far = PassedOn(root.url)
        far.is_local = False
        for storage in (root, far):
            with pytest.raises(DamagedError, match=r"a is damaged: state\.json is missing"):
                inspect(storage)


def chosen(tiers: list[Any], fails: Any = lambda candidate: None, **options: Any) -> Any:
    """What is taken; `fails` raises what is wrong with a candidate."""

    def prepare(candidate: Candidate) -> Candidate:
        fails(candidate)
        return candidate

    with ExitStack() as held:
        return choose(Selection(tiers=tiers, ranks=SingleProcess(), prepare=prepare, **options), held)


class TestChoosing:
    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(select, "_PAUSE", 0.0)

    def test_an_empty_root_has_none_and_the_newest_intact_one_is_taken(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "ckpt")
        assert chosen([root]) is None
        assert f"load_state(): found nothing in {root.url}" in caplog.messages
        for number, name in enumerate(("a", "b", "c")):
            save(root, name, sequence=number)
        found = chosen([root])
        assert f"load_state(): found {root.url}/c, {root.url}/b, {root.url}/a" in caplog.messages
        assert (found.manifest.name, found.url, found.tier, found.in_memory) == ("c", f"{root.url}/c", 0, False)
        assert (found.passed_over, found.damaged, found.root_step) == ({}, frozenset(), 0)
        assert not found.ready.or_afresh
        root.delete(["c/state.json"])
        found = chosen([root])
        assert (found.manifest.name, found.damaged) == ("b", {"c"})
        assert found.passed_over == {"c": "c is damaged: state.json is missing."}
        assert chosen([root], name="a").manifest.name == "a"
        with pytest.raises(DamagedError, match="Load another checkpoint, or call load_state"):
            chosen([root], name="c")

    def test_damage_that_is_found_while_it_is_read_leads_to_the_next(self, root: MemoryStorage) -> None:
        save(root, "a", sequence=1)
        save(root, "b", sequence=2)

        def altered(candidate: Candidate) -> None:
            if candidate.manifest.name == "b":
                raise DamagedError("b was altered.")

        found = chosen([root], altered)
        assert (found.manifest.name, found.passed_over, found.damaged) == ("a", {"b": "b was altered."}, {"b"})

        def all_altered(candidate: Candidate) -> None:
            raise DamagedError(f"{candidate.manifest.name} was altered.")

        with pytest.raises(
            DamagedError, match=r"no checkpoint in .* is intact, so nothing was loaded:\s+b was altered"
        ):
            chosen([root], all_altered)

    def test_one_that_cannot_be_read_now_is_no_reason_for_an_older_one(self, root: MemoryStorage) -> None:
        save(root, "a", sequence=1)
        save(root, "b", sequence=2)

        def away(candidate: Candidate) -> None:
            raise TransientError("no answer.")

        with pytest.raises(TransientError, match=r"^ckpt can't read b now: no answer\. .* may be intact"):
            chosen([root], away)
        mirror = new()
        save(mirror, "b", sequence=2)

        def away_in_root(candidate: Candidate) -> None:
            if candidate.storage is root:
                raise TransientError("no answer.")

        assert chosen([root, mirror], away_in_root).tier == 1

    def test_the_mirror_stands_in_and_both_together_where_each_lacks_something(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        mirror = new()
        for storage in (root, mirror):
            save(storage, "a", sequence=1)
            save(storage, "b", sequence=2)
        for name in (FILE_NAME, COPY_NAME):
            root.write(f"b/{name}", [mirror.read(f"b/{FILE_NAME}")])
        root.delete(["b/state.json"])
        found = chosen([root, mirror])
        assert (found.manifest.name, found.tier, found.damaged) == ("b", 1, {"b"})
        mirror.delete(["b/model.safetensors"])
        with caplog.at_level(logging.WARNING, "ckpt"):
            found = chosen([root, mirror])
        assert (found.manifest.name, found.tier) == ("b", 1)
        assert (
            "so ckpt reads each file from an intact copy: 1 of 2 files come from the second place (state.json)"
            in caplog.text
        )
        assert bytes(found.ready.storage.read("b/state.json")) == FILES["state.json"]
        root.delete(["b/model.safetensors"])
        found = chosen([root, mirror])
        assert found.manifest.name == "a"
        assert "b has no intact copy of model.safetensors in" in found.passed_over["b"]

    def test_where_hosts_have_roots_of_their_own_the_mirror_has_all_files_for_each(self, root: MemoryStorage) -> None:
        mirror, hosts = new(), Hosts((0, 1), ("one", "two"))
        save(mirror, "a")
        found = chosen([root, mirror], hosts=hosts)
        assert (found.manifest.name, found.tier, found.url) == ("a", 1, f"{mirror.url}/a")
        assert found.ready.storage is mirror
        save(root, "b", sequence=2)
        assert (found := chosen([root, mirror], hosts=hosts)).tier == 0
        assert found.manifest.name == "b"

    def test_a_mirror_is_not_waited_for_as_long_as_the_root_has_something(self, root: MemoryStorage) -> None:
        class Patience:
            def reached(self, mirror: Storage, call: Any) -> Any:
                asked.append(mirror)
                return call()

        mirror, asked = new(), list[Storage]()
        save(mirror, "a", sequence=1)
        assert chosen([root, mirror], patience=Patience()).tier == 1
        assert asked == []
        save(root, "a", sequence=1)
        assert chosen([root, mirror], patience=Patience()).tier == 0
        assert asked == [mirror]

    def test_a_mirror_that_was_not_waited_for_is_waited_for_where_the_root_is_damaged(
        self, root: MemoryStorage
    ) -> None:
        class Hesitates(PassedOn):
            """Is away when it is listed for the first time."""

            is_local = True
            lists = 0

            def list(self, prefix: str = "") -> Iterator[Entry]:
                if not prefix:
                    self.lists += 1
                    if self.lists == 1:
                        raise TransientError("no answer.")
                return super().list(prefix)

        mirror = new()
        save(root, "a", sequence=1)
        save(mirror, "b", sequence=2)
        hesitates = Hesitates(mirror.url)
        assert chosen([root, hesitates], patience=MirrorPatience()).manifest.name == "a"
        assert hesitates.lists == 1
        root.delete(["a/state.json"])
        hesitates.lists = 0
        assert chosen([root, hesitates], patience=MirrorPatience()).manifest.name == "b"
        assert hesitates.lists == 2

    def test_one_that_is_being_removed_is_waited_for(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(root, "a", sequence=1)
        calls: list[str] = []

        def busy(candidate: Candidate) -> None:
            calls.append(candidate.manifest.name)
            if len(calls) < 4:
                raise LockedError("process 7")

        assert chosen([root], busy).manifest.name == "a"
        assert len(calls) == 4

        def always(candidate: Candidate) -> None:
            calls.append(candidate.manifest.name)
            raise LockedError("process 7")

        calls.clear()
        with pytest.raises(LockedError, match="process 7"):
            chosen([root], always)
        assert len(calls) == select._BUSY_RESCANS

    def test_one_that_vanishes_is_looked_for_again_a_number_of_times(self, root: MemoryStorage) -> None:
        class Vanishing(PassedOn):
            """Is saved anew before every listing, and removed after it, some times."""

            scans = 0
            until = 3

            def list(self, prefix: str = "") -> Iterator[Entry]:
                if not prefix:
                    self.scans += 1
                    save(root, "a", sequence=self.scans)
                return super().list(prefix)

            def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
                if self.scans < self.until:
                    root.delete([entry.key for entry in root.list("a")])
                return super().lock(key, shared=shared, note=note)

        vanishing = Vanishing(root.url)
        assert chosen([vanishing]).manifest.sequence == 3
        vanishing.scans, vanishing.until = 0, 99
        with pytest.raises(DamagedError, match="is intact, so nothing was loaded"):
            chosen([vanishing])
        assert vanishing.scans == 2 * select._RESCANS  # the error of each names what is there

    def test_what_no_trusted_key_has_signed_is_passed_over_and_not_damaged(self, root: MemoryStorage) -> None:
        save(root, "a")
        with pytest.raises(UntrustedError):
            chosen([root], trust=Trust(("ab" * 32,), required=True))
        root.delete(["a/state.json"])
        save(root, "b", sequence=0)
        with pytest.raises(UntrustedError):
            chosen([root], trust=Trust(("ab" * 32,), required=True))

    def test_what_was_committed_and_is_lost_is_never_a_fresh_start(self, root: MemoryStorage) -> None:
        begin_and_write(root, attempt_at(root, "cut"))
        assert chosen([root]) is None
        root.write("lost/state.json", [b"{}"])
        with pytest.raises(DamagedError, match=r"is intact, so nothing was loaded:\s+lost has lost manifest\.json"):
            chosen([root])
        save(root, "a")
        found = chosen([root])
        assert (found.manifest.name, found.damaged) == ("a", {"lost"})

    def test_memory_comes_first_and_is_never_an_error(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        memory = new()
        tier = MemoryTier(memory, Hosts())
        saved = save(root, "a", sequence=1)
        snapshot = save(memory, "m", sequence=2)
        for name in (FILE_NAME, COPY_NAME):
            memory.write(f"m/{name}", [_with_parent(snapshot, saved.id)])
        found = chosen([root], memory=tier)
        assert (found.manifest.name, found.tier, found.in_memory, found.root_step) == ("m", MEMORY, True, 0)
        assert not found.ready.or_afresh

        def altered(candidate: Candidate) -> None:
            if candidate.storage is memory:
                raise error

        for error in (DamagedError("m was altered."), LockedError("process 7"), TransientError("no answer.")):
            found = chosen([root], altered, memory=tier)
            assert (found.manifest.name, found.tier, found.damaged) == ("a", 0, frozenset())
            assert found.passed_over == {"m in memory": str(error)}
        empty = new()
        for name in (FILE_NAME, COPY_NAME):
            memory.write(f"m/{name}", [_with_parent(snapshot, None)])
        assert chosen([empty], memory=tier).ready.or_afresh
        error = DamagedError("m was altered.")
        with caplog.at_level(logging.WARNING, "ckpt"):
            assert chosen([empty], altered, memory=tier) is None
        assert "ckpt skips m in memory: m was altered." in caplog.text

    def test_from_far_away_what_does_not_match_is_read_once_more(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        far, calls = PassedOn(root.url), list[str]()
        far.is_local = False
        save(root, "a")

        def once(candidate: Candidate) -> None:
            calls.append("x")
            if len(calls) == 1:
                raise DamagedError("a was altered.")

        chosen([far], lambda candidate: calls.append("x"))
        assert calls == ["x"]
        calls.clear()
        with caplog.at_level(logging.WARNING, "ckpt"):
            found = chosen([far], once)
        assert (found.manifest.name, found.passed_over, len(calls)) == ("a", {}, 2)
        assert "a second read was correct: a was altered." in caplog.text

        def always(candidate: Candidate) -> None:
            calls.append("x")
            raise DamagedError("a was altered.")

        calls.clear()
        for storage, times in ((far, 2), (root, 1)):
            calls.clear()
            with pytest.raises(DamagedError):
                chosen([storage], always)
            assert len(calls) == times


def _with_parent(snapshot: Manifest, parent: str | None) -> bytes:
    return replace(snapshot, parent=parent).to_bytes()


class TestHosts:
    def manifest(self, *names: str, ranks: int = 2) -> Manifest:
        files = tuple(FileRecord(name=name, path=name, size=1, blocks=("x",)) for name in names)
        return Manifest(name="a", id="id", sequence=1, created=MOMENT, run="run", files=files, world_size=ranks)

    class Two(SingleProcess):
        world_size = 2

    def test_a_rank_needs_what_all_have_and_its_own(self, root: MemoryStorage) -> None:
        mirror, listed = new(), self.manifest("state.json", "model/00000.safetensors", "model/00001.safetensors")
        with ExitStack() as held:
            assert storage_for_rank([root], listed, self.Two(), held) == ["state.json", "model/00000.safetensors"]
            assert storage_for_rank([root], listed, SingleProcess(), held) == [file.path for file in listed.files]
            for path in ("state.json", "model/00000.safetensors"):
                root.write(f"a/{path}", [b"1"])
            assert storage_for_rank([root, mirror], listed, self.Two(), held) is root
            root.write("a/state.json", [b"22"])
            assert storage_for_rank([root], listed, self.Two(), held) == ["state.json"]
            assert storage_for_rank([root, mirror], listed, self.Two(), held) == ["state.json"]
            root.delete(["a/state.json"])
            mirror.write("a/state.json", [b"1"])
            both = storage_for_rank([root, mirror], listed, self.Two(), held)
            assert not isinstance(both, list)
            assert bytes(both.read("a/state.json")) == b"1"

    def test_where_hosts_have_storages_of_their_own_each_is_inspected_in_its_own(self, root: MemoryStorage) -> None:
        mirror, memory, shared, separate = new(), new(), Hosts(), Hosts((0, 1), ("one", "two"))
        for of_root, of_memory in ((shared, shared), (shared, separate), (separate, shared), (separate, separate)):
            for tier, storage, hosts in ((MEMORY, memory, of_memory), (0, root, of_root), (1, mirror, shared)):
                asked: list[tuple[Any, ...]] = []
                selection: Any = Selection(
                    tiers=[root, mirror], ranks=SingleProcess(), prepare=lambda candidate: None, hosts=of_root,
                    memory=MemoryTier(memory, of_memory),
                )  # fmt: skip
                with ExitStack() as held:
                    lists: Any = {"passed_over": {}, "root_step": None, "lost": []}
                    search: Any = select._Search(selection, held, lists)
                    search.inspection = SimpleNamespace(
                        complete=lambda *given, asked=asked: asked.append(given[:2]) or (None, None),
                        complete_per_host=lambda *given, asked=asked: asked.append(given[:3]) or (None, "joined"),
                    )
                    candidate, _ = search._candidate(tier, "a", held)
                if not hosts.separate_roots:
                    assert (asked, candidate.storage) == ([(storage, "a")], storage)
                else:
                    tiers: Any = (memory,) if tier == MEMORY else [root, mirror]
                    assert (asked, candidate.storage) == ([(tiers, hosts, "a")], "joined")
                assert candidate.or_afresh == (tier == MEMORY)

    def test_which_host_lacks_what(self) -> None:
        hosts = Hosts((0, 0, 2, 2), ("one", "one", "two", "two"))
        assert problem_on_hosts("a", hosts, [[], [], [], []]) == ""
        told = problem_on_hosts("a", hosts, [["y"], ["x", "y"], [], []])
        assert told.startswith("a cannot be loaded on these hosts: one lacks x, y. Start the ranks")
        told = problem_on_hosts("a", hosts, [["y"], [], ["z"], []])
        assert "one lacks y; two lacks z." in told

    def test_a_replica_stands_in_where_every_piece_has_another_copy_here(self, root: MemoryStorage) -> None:
        table: dict[str, Any] = {
            "tensors": {"w": ["float32", [4], 0, -1]},
            "layouts": [Layout((2, 2), (0, 1, 2, 3), ("R", "S0")).to_json()],
            "aliases": {},
        }
        files = [f"model/0000{rank}.safetensors" for rank in range(4)]
        listed = self.manifest("state.json", "model-own-00001.safetensors", *files, ranks=4)
        root.write("a/state.json", [json.dumps({"parts": {"model": {"spread": table}}}).encode()])
        records = {file.name: file for file in listed.files}

        def stands_in(missing: str, *here: str) -> bool:
            return Replicas(root, listed, lambda file: file.name in here).stand_in_for(records[missing])

        first = [name for name in files if name.startswith("model/")]
        assert stands_in(first[0], first[2])
        table["tensors"]["few"] = ["float32", [1], 1, -1]
        table["layouts"].append(Layout((2,), (0, 1), ("S0",)).to_json())
        root.write("a/state.json", [json.dumps({"parts": {"model": {"spread": table}}}).encode()])
        assert stands_in(first[1], first[3])  # rank 1 has no element of the few, and rank 0 alone has them
        assert not stands_in(first[0], first[2])
        del table["tensors"]["few"]
        root.write("a/state.json", [json.dumps({"parts": {"model": {"spread": table}}}).encode()])
        assert not stands_in(first[0], first[1])
        assert not stands_in(first[0], first[3])
        assert stands_in(first[3], first[1])
        assert not stands_in(first[0])
        assert not stands_in("state.json", *files)
        assert not stands_in("model-own-00001.safetensors", *files)
        for path in first[1:]:
            root.write(f"a/{path}", [b"1"])
        root.write("a/model-own-00001.safetensors", [b"1"])
        common = self.manifest("state.json", "other.json", *files, ranks=4)
        common = replace(
            common,
            files=tuple(
                replace(file, size=len(root.read("a/state.json"))) if file.name == "state.json" else file
                for file in common.files
            ),
        )
        assert select._missing(root, common, SingleProcess()) == ["other.json"]
        root.write("a/other.json", [b"1"])
        assert select._missing(root, common, SingleProcess()) == []
        root.write("a/state.json", [b"{"])
        assert not stands_in(first[0], first[2])


def test_the_folder_of_a_candidate_is_where_its_files_are(tmp_path: Path) -> None:
    storage = ckpt.storage.open_storage(tmp_path)
    saved = save(storage, "a")
    with ExitStack() as held:
        assert Candidate(storage, saved, held).folder == f"{tmp_path}/a"
