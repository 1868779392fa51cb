"""The catalog case by case: markers, the manifest and its copy, names of files, summaries, and the index."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import ConflictError, DamagedError, LockedError, MissingError, StorageError
from ckpt.formats.native import manifest as manifest_format
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, FileRecord, Manifest, digest
from ckpt.root import catalog
from ckpt.root.catalog import (
    DAY,
    FROZEN,
    INDEX,
    MARKER,
    UNINDEXED,
    Checkpoint,
    Checkpoints,
    History,
    Index,
    Overview,
    SaveMarker,
    Summary,
    UncommittedError,
    are_alike,
    contents_digest,
    copy_problems,
    find,
    find_manifest,
    list_checkpoints,
    manifest_bytes,
    manifests_of_run,
    mark_save,
    marked_names,
    marker_and_version,
    mend,
    own_key,
    part_of,
    rank_of,
    read_marker,
    resolve,
    spread_file,
    was_committed,
    whole_file,
)
from ckpt.storage import ANY, Buffer, Entry, LocalStorage, MemoryStorage, open_storage
from tests.helpers.byte_checkpoints import MOMENT, save
from tests.helpers.places import PassedOn

_numbers = itertools.count()


@pytest.fixture
def root() -> MemoryStorage:
    return MemoryStorage(f"catalog-{next(_numbers)}")


def manifest(name: str = "a", *, sequence: int = 1, files: tuple[FileRecord, ...] = (), **more: Any) -> Manifest:
    fields = {"id": f"id-{name}", "created": MOMENT, "run": "run", **more}
    return Manifest(name=name, sequence=sequence, files=files, **fields)


class TestMarkers:
    def test_a_marker_lists_what_is_new_and_apart_from_it_what_is_replaced_now_or_was_left(
        self, root: MemoryStorage
    ) -> None:
        mark_save(root, "a", ["one", "two"], ["old", "one", "old"], "first")
        told = json.loads(root.read(f"a/{MARKER}"))
        assert (told["files"], told["replaces"], told["id"]) == (["one", "two"], ["old"], "first")
        assert told["removing"] is False
        mark_save(root, "a", ["two", "three"], ["other"], "second")
        told = json.loads(root.read(f"a/{MARKER}"))
        assert (told["files"], told["replaces"]) == (["two", "three"], ["other", "one", "old"])
        read, version = marker_and_version(root, "a")
        assert read == read_marker(root, "a")
        assert read is not None
        assert (read.files, read.id, read.removing) == (("two", "three", "other", "one", "old"), "second", False)
        assert 0 <= read.age < DAY
        assert read.under_way
        assert version == root.version(f"a/{MARKER}")
        assert marker_and_version(root, "b") == (None, None)
        assert read_marker(root, "b") is None

    @pytest.mark.parametrize(
        ("content", "read"),
        [
            ({"files": ["x"], "replaces": ["y"]}, SaveMarker(("x", "y"))),
            ({"files": [], "replaces": [], "since": "", "more": 1}, SaveMarker(())),
            (
                {"files": [], "replaces": [], "id": "i", "since": MOMENT, "removing": True},
                SaveMarker((), id="i", since=MOMENT, removing=True),
            ),
            ({"files": ["x"]}, None),
            ({"files": ["../x"], "replaces": []}, None),
            ({"files": [], "replaces": [], "since": "yesterday"}, None),
            ({"files": [], "replaces": [], "removing": 1}, None),
            ({"files": [], "replaces": [], "writer": ["x"]}, None),
            ([], None),
            (b"{", None),
        ],
    )
    def test_one_that_ckpt_has_not_written_is_named_and_lists_nothing(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture, content: Any, read: SaveMarker | None
    ) -> None:
        root.write(f"a/{MARKER}", [content if isinstance(content, bytes) else json.dumps(content).encode()])
        found, version = marker_and_version(root, "a")
        assert (found, version) == (read, root.version(f"a/{MARKER}"))
        assert ("can't read the save marker" in caplog.text) == (read is None)
        assert found is None or not found.under_way

    def test_its_age_is_endless_where_it_does_not_say_when_it_was_written(self) -> None:
        hour_ago = (datetime.now(timezone.utc) - timedelta(hours=1)).isoformat()
        assert SaveMarker(()).age == math.inf
        assert 3600 <= SaveMarker((), since=hour_ago).age < 7200

    def test_a_writer_is_alive_by_its_start_here_and_for_a_day_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        me, now = catalog._own_identity(), datetime.now(timezone.utc)
        for writer, age, alive in (
            (me, 9 * DAY, True),
            ((*me[:2], me[2], "another start"), 0, False),
            (("another machine", *me[1:]), DAY - 600, True),
            (("another machine", *me[1:]), DAY + 600, False),
            ((me[0], "another space", *me[2:]), DAY + 600, False),
            ((), 0, False),
        ):
            marker = SaveMarker((), since=(now - timedelta(seconds=age)).isoformat(), writer=writer)
            assert marker.under_way == alive, (writer, age)
        monkeypatch.setattr(catalog, "_own_identity", lambda: ())
        assert not SaveMarker((), since=now.isoformat(), writer=me).under_way

    def test_a_save_waits_for_the_removal_of_what_it_replaces_and_says_so_when_that_takes_too_long(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Removed(PassedOn):
            left = 2

            def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
                assert (key, shared) == ("a", True)
                self.left -= 1
                if self.left >= 0:
                    raise LockedError("process 7 has it.")
                return super().lock(key, shared=shared, note=note)

        monkeypatch.setattr(catalog, "_PAUSE", 0.0)
        catalog.mark_removal(root, "a", ["old", "older"], "gone", over=None)
        read = read_marker(root, "a")
        assert read is not None
        assert (read.removing, read.files, read.id) == (True, ("old", "older"), "gone")
        storage = Removed(root.url)
        mark_save(storage, "a", ["new"], [], "id")
        assert storage.left == -1
        read = read_marker(root, "a")
        assert read is not None
        assert (read.removing, read.files) == (False, ("new", "old", "older"))
        catalog.mark_removal(root, "a", [], "gone", over=root.version(f"a/{MARKER}"))
        storage.left = 1000
        monkeypatch.setattr(catalog, "_PATIENCE", -1.0)
        with pytest.raises(LockedError, match=r"another process is removing .*a: process 7 has it"):
            mark_save(storage, "a", ["new"], [], "id")
        assert storage.left == 999

    def test_a_marker_that_others_write_is_read_again_a_number_of_times(self, root: MemoryStorage) -> None:
        class Busy(PassedOn):
            tries, until = 0, 3

            def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
                self.tries += 1
                if self.tries < self.until:
                    raise ConflictError("somebody was faster")
                super().write(key, pieces, over=over)

        storage = Busy(root.url)
        mark_save(storage, "a", ["new"], [], "id")
        assert storage.tries == 3
        storage.until = 1000
        with pytest.raises(ConflictError, match="other processes keep writing"):
            mark_save(storage, "a", ["new"], [], "id")
        assert storage.tries == 3 + catalog._ATTEMPTS

    def test_a_folder_is_marked_by_a_file_directly_in_it(self) -> None:
        paths = (f"a/{MARKER}", f"b/c/{MARKER}", MARKER, f"d/x{MARKER}", "e/state.json", f"f/{MARKER}/x", f"g/{MARKER}")
        assert marked_names(Entry(path, 1) for path in paths) == ["a", "g"]


INTACT, ALTERED, ABSENT, OTHER, NEWER = "intact", "altered", "absent", "other", "newer"


def written(root: MemoryStorage, first: str, second: str, marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint `a` of which the manifest and its copy are as they are called."""
    root.write("a/state.json", [b"{}"])
    good = manifest().to_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(manifest_format, "VERSION", 9)
        newer = manifest().to_bytes()
    data = {INTACT: good, ALTERED: b"x" + good, OTHER: manifest(id="id-b").to_bytes(), NEWER: newer}
    for state, file in ((first, FILE_NAME), (second, COPY_NAME)):
        if state != ABSENT:
            root.write(f"a/{file}", [data[state]])
    if marker:
        told = {"files": [], "replaces": [], "removing": marker == "removal"}
        root.write(f"a/{MARKER}", [json.dumps(told).encode()])


class TestTheManifestAndItsCopy:
    @pytest.mark.parametrize(
        ("first", "second", "marker", "flaw", "problems", "mended", "to_mend"),
        [
            (INTACT, INTACT, "", "", "", "", False),
            (INTACT, INTACT, "save", "", "", "", False),
            (INTACT, ALTERED, "", "", f"{COPY_NAME} was altered", COPY_NAME, True),
            (INTACT, ABSENT, "", "", "", COPY_NAME, True),
            (INTACT, OTHER, "", "", f"{COPY_NAME} was altered", "", False),
            (ALTERED, INTACT, "", "its bytes do not match", f"{FILE_NAME} was altered", FILE_NAME, True),
            (ABSENT, INTACT, "", "manifest.json is missing", f"{FILE_NAME} was altered", FILE_NAME, True),
            (ABSENT, INTACT, "save", "manifest.json is missing", f"{FILE_NAME} was altered", FILE_NAME, True),
        ],
    )
    def test_either_serves(
        self,
        root: MemoryStorage,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        first: str,
        second: str,
        marker: str,
        flaw: str,
        problems: str,
        mended: str,
        to_mend: bool,
    ) -> None:
        written(root, first, second, marker, monkeypatch)
        found = find_manifest(root, "a")
        assert found.manifest.id == "id-a"
        assert bool(found.flaw) == bool(flaw)
        assert flaw in found.flaw
        find_manifest(root, "a")
        assert caplog.text.count("is used. The next run in this root repairs it") == bool(flaw)  # once
        assert manifest_bytes(root, "a") == manifest().to_bytes()
        assert are_alike(root, "a") == (first == second)
        (problem,) = copy_problems(root, "a") or [""]
        assert bool(problem) == bool(problems)
        assert problem.startswith(problems)
        listed = Overview.of(root)
        assert (listed.to_mend, listed.lost) == (["a"] if to_mend else [], {})
        written_from = mend(root, "a")
        source = FILE_NAME if mended == COPY_NAME else COPY_NAME
        assert written_from == ({mended: f"{root.url}/a/{source}"} if mended else {})
        assert are_alike(root, "a") == (second != OTHER)
        assert mend(root, "a", proven=True) == ({COPY_NAME: f"{root.url}/a/{FILE_NAME}"} if second == OTHER else {})
        assert root.read(f"a/{COPY_NAME}") == root.read(f"a/{FILE_NAME}") == manifest().to_bytes()

    @pytest.mark.parametrize(
        ("first", "second", "marker", "says", "was"),
        [
            (ABSENT, ABSENT, "", "a has lost manifest.json and", True),
            (ABSENT, ABSENT, "save", "a was never committed", False),
            (ABSENT, ABSENT, "removal", "a was never committed", False),
            (ABSENT, INTACT, "removal", "a was never committed", False),
            (ABSENT, ALTERED, "", "is missing. Its copy is damaged too", True),
            (ALTERED, ALTERED, "", "Its copy is damaged too", True),
            (ALTERED, ABSENT, "", "its bytes do not match its digest", True),
            (ALTERED, ABSENT, "removal", "its bytes do not match its digest", True),
        ],
    )
    def test_where_neither_does_it_says_whether_it_was_committed_once(
        self,
        root: MemoryStorage,
        monkeypatch: pytest.MonkeyPatch,
        first: str,
        second: str,
        marker: str,
        says: str,
        was: bool,
    ) -> None:
        written(root, first, second, marker, monkeypatch)
        with pytest.raises(DamagedError) as raised:
            find_manifest(root, "a")
        assert says in str(raised.value)
        assert isinstance(raised.value, UncommittedError) != was
        assert was_committed(raised.value) == was
        found = find(root, "a")
        assert (found.committed, found.was_committed, found.step) == (False, was, None)
        assert ("a" in Overview.of(root).lost) == was
        assert Overview.of(root).to_mend == []
        assert mend(root, "a", proven=True) == {}

    def test_what_a_newer_version_wrote_is_intact(self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
        written(root, NEWER, ALTERED, "", monkeypatch)
        assert copy_problems(root, "a")[0].startswith(f"{COPY_NAME} was altered")
        assert mend(root, "a") == {COPY_NAME: f"{root.url}/a/{FILE_NAME}"}
        assert copy_problems(root, "a") == []

    def test_a_save_between_two_reads_is_no_difference(self, root: MemoryStorage) -> None:
        class Replaced(PassedOn):
            """Another save of the name is committed after each of the first reads of the manifest."""

            saves = 2

            def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
                data = super().read(key, start, stop)
                if key.endswith(FILE_NAME) and self.saves:
                    self.saves -= 1
                    for file in (FILE_NAME, COPY_NAME):
                        self.inner.write(f"a/{file}", [manifest(id=f"save-{self.saves}").to_bytes()])
                return data

        for file in (FILE_NAME, COPY_NAME):
            root.write(f"a/{file}", [manifest().to_bytes()])
        assert copy_problems(Replaced(root.url), "a") == []

    def test_a_copy_that_is_written_while_it_is_looked_for_is_none_that_was_altered(self, root: MemoryStorage) -> None:
        class Written(PassedOn):
            def version(self, key: str) -> str | None:
                self.inner.write(f"a/{COPY_NAME}", [manifest().to_bytes()])
                return super().version(key)

        root.write(f"a/{FILE_NAME}", [manifest().to_bytes()])
        assert copy_problems(Written(root.url), "a") == []

    @pytest.mark.parametrize("name", ["latest", "last", "newest", "other"])
    def test_a_name_that_is_meant_for_the_newest_is_answered_with_how_to_load_it(
        self, root: MemoryStorage, name: str
    ) -> None:
        with pytest.raises(MissingError) as raised:
            find_manifest(root, name, lambda: " Known.")
        assert str(raised.value).endswith(
            "Known." if name == "other" else "Known. To load the newest one, leave out the name."
        )


def test_names_of_files_say_the_part_and_the_rank() -> None:
    for name, part, rank in (
        (whole_file("model"), "model", None),
        (whole_file("model", aside="frozen"), "model", None),
        (whole_file("replay", aside="chunks.3"), "replay", None),
        (whole_file("replay-00012", aside="chunks.3"), "replay-00012", 12),
        (spread_file("model", 3), "model", 3),
        (spread_file("model", 12, aside=FROZEN), "model", 12),
        (whole_file(own_key("scaler", 7)), "scaler-own-00007", 7),
        ("model/00003.0123abcd.safetensors", "model", 3),
        ("model-00003.safetensors.json", "model-00003.safetensors.json", None),
        ("model-123.safetensors", "model-123", None),
    ):
        assert (part_of(name), rank_of(name)) == (part, rank), name
    assert spread_file("model", 3, aside=FROZEN) == "model/00003+frozen.safetensors"
    assert whole_file("model") == "model.safetensors"


class TestSummaries:
    def test_one_comes_back_from_json_and_from_nothing_else(self) -> None:
        known = replace(
            Summary.of(manifest(metrics={"loss": 0.5}, progress={"step": 3}, world_size=2)), contents="digest"
        )
        assert (known.step, known.world_size, known.name) == (3, 2, "a")
        fields = json.loads(json.dumps(known.to_json()))
        assert "name" not in fields
        assert Summary.from_json("a", fields) == known
        odd = replace(known, metrics={"a": math.inf, "b": -math.inf, "c": math.nan, "d": -0.0})
        told = json.dumps(odd.to_json(), allow_nan=False)
        back = Summary.from_json("a", json.loads(told))
        assert back is not None
        assert [str(value) for value in back.metrics.values()] == ["inf", "-inf", "nan", "-0.0"]
        for key, wrong in (
            ("id", 1), ("sequence", -1), ("created", "today"), ("run", None), ("parent", 1), ("step", 1.5),
            ("metrics", {"loss": "x"}), ("metrics", []), ("world_size", "1"), ("size", True), ("contents", None),
        ):  # fmt: skip
            assert Summary.from_json("a", {**fields, key: wrong}) is None, key
        for key in fields:
            assert Summary.from_json("a", {k: v for k, v in fields.items() if k != key}) is None, key
        assert Summary.from_json("a", []) is None

    def test_the_digest_of_contents_is_of_paths_and_sizes_but_not_of_what_a_commit_adds(self) -> None:
        base = {"model.safetensors": 3, "state.json": 2}
        same = {"state.json": 2, FILE_NAME: 9, COPY_NAME: 9, MARKER: 9, "model.safetensors": 3}
        assert contents_digest(base) == contents_digest(same)
        others: tuple[dict[str, int], ...] = ({**base, "state.json": 3}, {**base, "x": 0}, {"model.safetensors": 3}, {})
        assert len({contents_digest(other) for other in (base, *others)}) == 5
        files = tuple(FileRecord(name=path, path=path, size=size, blocks=()) for path, size in base.items())
        known = Summary.of(manifest(files=files))
        assert (known.size, known.contents) == (5, contents_digest(base))
        assert known.has_all_of(same)
        assert not known.has_all_of({**same, "x": 1})


class TestTheIndex:
    def test_it_counts_for_the_version_that_it_was_made_of(self) -> None:
        index, one = Index(), Summary.of(manifest("one"))
        index.add("v1", one)
        assert (index.find("one", "v1"), index.unwritten) == (one, {"one"})
        assert index.find("one", "v2") is index.find("one", None) is index.find("two", "v1") is None
        index.add(None, one)
        assert index.entries == {}

    def test_it_is_written_with_the_first_manifest_too_many_and_without_what_is_gone(self, root: MemoryStorage) -> None:
        index = Index()
        names = [f"n{number}" for number in range(UNINDEXED + 2)]
        for name in names:
            index.add(f"version of {name}", Summary.of(manifest(name, metrics={"loss": math.nan})))
        index.update(root, set(names[:UNINDEXED]))
        assert root.version(INDEX) is None
        assert set(index.entries) == index.unwritten == set(names[:UNINDEXED])
        index.add("v", Summary.of(manifest("n16")))
        index.update(root, set(names))
        assert index.unwritten == set()
        read = Index.read(root)
        assert read.unwritten == set()
        assert {name: version for name, (version, _) in read.entries.items()} == {
            **{name: f"version of {name}" for name in names[:UNINDEXED]},
            "n16": "v",
        }
        assert read.entries["n16"][1] == index.entries["n16"][1]

    def test_one_that_cannot_be_written_is_written_later(self, root: MemoryStorage) -> None:
        class Full(PassedOn):
            def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
                raise StorageError("no room")

        index = Index()
        for number in range(UNINDEXED + 1):
            index.add("v", Summary.of(manifest(f"n{number}")))
        index.update(Full(root.url), set(index.entries))
        assert len(index.unwritten) == UNINDEXED + 1

    def test_what_is_in_it_and_is_no_entry_does_not_count(self, root: MemoryStorage) -> None:
        good = {"version": "v", **Summary.of(manifest("good")).to_json()}
        for content, found in (
            ({"version": 1, "checkpoints": {"good": good}}, {"good"}),
            ({"version": 1, "checkpoints": {"good": good, "bad": {**good, "version": 1}}}, {"good"}),
            ({"version": 1, "checkpoints": {"good": good, "bad": {**good, "size": "1"}}}, {"good"}),
            ({"version": 1, "checkpoints": {"good": good, "bad": None}}, {"good"}),
            ({"version": 1, "checkpoints": [good]}, set()),
            ({"version": 2, "checkpoints": {"good": good}}, set()),
            ([], set()),
        ):
            said = json.dumps(content)
            root.write(INDEX, [json.dumps([digest(said.encode()), said]).encode()])
            assert set(Index.read(root).entries) == found, content
            root.write(INDEX, [json.dumps([digest(b""), said]).encode()])
            assert Index.read(root).entries == {}


class TestListing:
    def test_an_overview_says_what_was_read_and_what_is_there(self, root: MemoryStorage) -> None:
        older, newer = save(root, "older", sequence=1), save(root, "newer", sequence=2)
        root.write("notes.txt", [b"mine"])
        root.delete([f"older/{COPY_NAME}"])
        listed = Overview.of(root)
        assert listed.manifests == {"newer": newer, "older": older}
        assert [found.name for found in listed.committed] == ["newer", "older"]
        assert listed.to_mend == ["older"]
        assert {entry.key for entry in listed.entries} == {entry.key for entry in root.list()}
        assert listed.sizes("older") == {entry.key.removeprefix("older/"): entry.size for entry in root.list("older")}
        assert listed.sizes("none") == {}
        assert manifests_of_run(root, "run") == [newer, older]
        assert manifests_of_run(root, "another") == []

    def test_a_copy_of_another_size_is_to_be_mended(self, root: MemoryStorage) -> None:
        save(root, "a")
        root.write(f"a/{COPY_NAME}", [root.read(f"a/{COPY_NAME}")[:-1]])
        assert Overview.of(root).to_mend == ["a"]

    def test_where_nothing_is_listed_the_root_itself_is_looked_for(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[object] = []
        monkeypatch.setattr(catalog, "check_exists", asked.append)
        assert list_checkpoints(root) == []
        assert asked == [root]
        save(root, "a")
        assert len(list_checkpoints(root)) == 1
        assert asked == [root]

    def test_in_a_notebook_it_is_a_table(self, root: MemoryStorage) -> None:
        listed = manifest(
            metrics={"loss": 0.5, "f1": 2.0},
            progress={"step": 1234},
            files=(FileRecord(name="x", path="x", size=2_500_000, blocks=()),),
        )
        good = Checkpoint("a", "root/a", listed)
        bad = Checkpoint("b", "root/b", problem=DamagedError("b is damaged."))
        table = Checkpoints([good, bad, Checkpoint("c", "root/c")])._repr_html_()
        for text in (
            "3 checkpoints",
            "1234",
            "2.5 MB",
            "loss 0.5, f1 2",
            " ago",
            "committed",
            "b is damaged.",
            "not c",
        ):
            assert text in table, text
        assert "1234" in good._repr_html_()
        assert "root/a" in good._repr_html_()


class TestLocating:
    def test_a_folder_with_a_checkpoint_is_no_root_and_one_without_any_is_neither(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path / "root")
        save(storage, "a")
        for url in (tmp_path / "root" / "a", f"{tmp_path}/root/a/"):
            found, names, is_checkpoint = resolve(url)
            assert (found.url, names, is_checkpoint) == (storage.url, ["a"], True)
        assert resolve(tmp_path / "root")[1:] == (["a"], False)
        (tmp_path / "notes.txt").touch()
        assert resolve(tmp_path)[1:] == ([], False)
        (tmp_path / "empty").mkdir()
        for missing in ("empty", "none/a"):
            with pytest.raises(MissingError, match="neither a root nor a checkpoint"):
                resolve(tmp_path / missing)

    def test_through_fsspec_a_checkpoint_is_found_by_the_list_of_its_files(self, tmp_path: Path) -> None:
        save(LocalStorage(tmp_path / "root"), "a")
        url = f"local://{tmp_path}/root"
        assert open_storage(url).url == url
        found, names, is_checkpoint = resolve(f"{url}/a")
        assert (found.url, names, is_checkpoint) == (url, ["a"], True)
        assert resolve(url)[1:] == (["a"], False)


class TestTheHistory:
    def test_it_prefers_what_says_how_a_checkpoint_was_saved(self, root: MemoryStorage) -> None:
        history, seconds = History(root), {"blocked": 1.0, "total": 2.0}
        saved = manifest("a", seconds=seconds)
        assert history.lacks_save(saved)
        history.add(Summary.of(saved))
        assert history.lacks_save(saved)
        history.add(saved)
        assert not history.lacks_save(saved)
        history.add(Summary.of(saved))
        assert not history.lacks_save(saved)
        history.store([manifest("b", id="b", created="2025-01-01T00:00:00.000+00:00", seconds={})])
        again = History.of(root)
        assert [(save.summary.name, dict(save.seconds)) for save in again.saves] == [("b", {}), ("a", seconds)]
        assert again.saves == history.saves
        assert [save.summary.name for save in again.without([saved])] == ["b"]
        assert not History(root).lacks_save(saved)  # it reads what is stored
        again.add(manifest("a", seconds={"total": 9.0}))
        assert dict(again.saves[1].seconds) == seconds  # the first word counts
        assert again.left_out == 0

    def test_of_one_moment_the_sequence_decides(self, root: MemoryStorage) -> None:
        history = History(root)
        for name, sequence in (("b", 2), ("c", 3), ("a", 1)):
            history.add(manifest(name, sequence=sequence))
        assert [save.summary.name for save in history.saves] == ["a", "b", "c"]

    def test_what_resumed_and_what_it_took_of_memory_is_kept(self, root: MemoryStorage) -> None:
        resumed = {"name": "x", "id": "i", "step": 1, "found_in": "root", "passed_over": {}}
        History(root).store([manifest(memory={"host": 5}, resumed=resumed, seconds={"total": 1.0})])
        (found,) = History.of(root).saves
        assert (found.memory, found.resumed, found.seconds) == ({"host": 5}, resumed, {"total": 1.0})


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ckpt")
