"""A checkpoint is committed by its manifest, which is written last and only over what the save has seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

import ckpt
from ckpt.errors import ConflictError, NotDurableError, StorageError, TransientError
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, Manifest
from ckpt.formats.tensors import FilePlan
from ckpt.root import write_link_commit
from ckpt.root.catalog import MARKER, copy_problems, find, read_marker, scan
from ckpt.root.deletion import sweep
from ckpt.root.verify import problems, verify_checkpoint
from ckpt.root.write_link_commit import Attempt
from ckpt.storage import ANY, Buffer, Entry, Storage
from tests.helpers.byte_checkpoints import (
    FILES,
    attempt_at,
    begin_and_write,
    cut_off_at_every_call,
    is_whole,
    keys,
    manifest_of,
    save,
    tensor_file,
)
from tests.helpers.places import PassedOn

NEWER = {"model.safetensors": tensor_file(b"newer" * 50), "state.json": b"[]"}
KEYS = {f"a/{path}" for path in (*FILES, FILE_NAME, COPY_NAME)}


class TestOrder:
    def test_the_marker_is_written_first_the_manifest_last_then_its_copy_and_the_marker_is_deleted(
        self, storage: Storage
    ) -> None:
        recorded = _Recorded(storage.url)
        save(recorded, "a")
        writes = [f"write a/{path}" for path in (MARKER, *FILES, FILE_NAME, COPY_NAME)]
        assert recorded.calls == [*writes, f"delete a/{MARKER}"]

    def test_the_marker_lists_every_file_before_the_first_is_written(self, storage: Storage) -> None:
        save(storage, "a")
        attempt = attempt_at(storage, "a")
        attempt.begin(storage, list(NEWER))
        marker = read_marker(storage, "a")
        assert marker is not None
        assert marker.id == attempt.id
        assert set(marker.files) == {*FILES, *(attempt.path_for(path) for path in NEWER)}

    def test_nothing_is_committed_before_the_manifest(self, storage: Storage) -> None:
        begin_and_write(storage, attempt_at(storage, "a"))
        (found,) = scan(storage)
        assert not found.committed

    def test_a_save_cut_off_at_any_call_leaves_nothing_or_the_new_checkpoint_whole(
        self, new_storage: Callable[[], Storage]
    ) -> None:
        found = set()
        for storage in cut_off_at_every_call(new_storage, lambda storage: _saved(storage, FILES)):
            manifest = find(storage, "a").manifest
            assert manifest is None or is_whole(storage, manifest)
            sweep(storage)
            assert keys(storage) == (KEYS if manifest else set())
            found.add(manifest is not None)
        assert found == {True, False}

    def test_a_save_that_replaces_cut_off_at_any_call_leaves_the_old_or_the_new_checkpoint_whole(
        self, new_storage: Callable[[], Storage]
    ) -> None:
        old: dict[str, Manifest] = {}

        def prepare() -> Storage:
            storage = new_storage()
            old[storage.url] = save(storage, "a")
            return storage

        found = set()
        for storage in cut_off_at_every_call(prepare, lambda storage: _saved(storage, NEWER)):
            manifest = find(storage, "a").manifest
            assert manifest is not None
            assert is_whole(storage, manifest)
            assert copy_problems(storage, "a") == []  # or, without its manifest, the old one would come back
            sweep(storage)
            assert keys(storage) == {
                f"a/{path}" for path in (*(file.path for file in manifest.files), FILE_NAME, COPY_NAME)
            }
            found.add(manifest.id == old[storage.url].id)
        assert found == {True, False}

    @pytest.mark.parametrize("harm", ["removed", "cut"])
    def test_elsewhere_than_on_a_disk_files_that_somebody_has_removed_or_cut_are_not_committed(self, harm: str) -> None:
        storage = PassedOn(f"memory://harmed-{harm}")
        storage.is_local = False
        attempt = attempt_at(storage, "a")
        written = begin_and_write(storage, attempt)
        data = storage.read("a/model.safetensors")
        storage.delete(["a/model.safetensors"])
        if harm == "cut":
            storage.write("a/model.safetensors", [data[:-1]])
        with pytest.raises(
            StorageError, match=r"1 of its files have disappeared or changed size .*\(model\.safetensors\)"
        ):
            attempt.commit(storage, manifest_of(attempt, written), {})
        assert not any(found.committed for found in scan(storage))

    @pytest.mark.parametrize(
        ("order", "most", "removed", "is_refused"),
        [
            (".abcd", 3, "", False),
            (".abcd", 3, "a", True),
            (".abcd", 3, "c", False),  # nobody has looked so far
            (".abcd", 9, "d", True),
            (".abcd", 9, "", False),
            ("bad.c", 3, "", False),  # a listing without order is read to its end
            ("bad.c", 3, "c", True),
        ],
    )
    def test_of_very_many_files_the_first_are_looked_at(
        self, monkeypatch: pytest.MonkeyPatch, order: str, most: int, removed: str, is_refused: bool
    ) -> None:
        class Listed(PassedOn):
            def list(self, prefix: str = "") -> Iterator[Entry]:
                there = {entry.key.removeprefix("a/")[0]: entry for entry in super().list(prefix)}
                return iter([there[one] for one in order if one in there])

        monkeypatch.setattr(write_link_commit, "_MOST_LISTED", most)
        storage = Listed(f"memory://listed-{order}-{most}-{removed}")
        storage.is_local = False
        attempt = Attempt("a")
        written = begin_and_write(storage, attempt, dict.fromkeys("abcd", b"x"))
        storage.delete([f"a/{removed}"] if removed else [])
        if is_refused:
            with pytest.raises(StorageError, match=rf"1 of its files have disappeared .*\({removed}\)"):
                attempt.commit(storage, manifest_of(attempt, written), {})
        else:
            attempt.commit(storage, manifest_of(attempt, written), {})

    def test_the_last_file_that_is_looked_at_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(write_link_commit, "_MOST_LISTED", 2)
        storage = PassedOn("memory://last-of-many")
        storage.is_local = False
        attempt = Attempt("a")
        written = begin_and_write(storage, attempt, {"a": b"x", "b": b"x"})
        storage.write("a/a", [b"longer"])
        with pytest.raises(StorageError, match="1 of its files"):
            attempt.commit(storage, manifest_of(attempt, written), {})


class TestPaths:
    def test_a_file_of_a_committed_checkpoint_is_never_overwritten(self, storage: Storage) -> None:
        old = save(storage, "a")
        attempt = attempt_at(storage, "a")
        begin_and_write(storage, attempt, NEWER)
        assert is_whole(storage, old)
        assert {attempt.path_for(path) for path in FILES}.isdisjoint(FILES)

    def test_a_file_that_exists_unexpectedly_is_refused_and_kept(self, storage: Storage) -> None:
        storage.write("a/state.json", [b"theirs"])
        with pytest.raises(ConflictError):
            begin_and_write(storage, Attempt("a"))
        assert storage.read("a/state.json") == b"theirs"

    def test_what_was_replaced_is_deleted_and_files_of_others_are_kept(self, storage: Storage) -> None:
        save(storage, "a")
        storage.write("a/notes.txt", [b"mine"])
        new = save(storage, "a", NEWER, sequence=2)
        assert keys(storage) == {
            f"a/{path}" for path in (*(file.path for file in new.files), FILE_NAME, COPY_NAME, "notes.txt")
        }
        assert is_whole(storage, new)

    def test_a_streamed_file_is_recorded_with_the_hashes_of_one_in_memory(self, storage: Storage) -> None:
        data = bytes(range(256)) * 1000
        pieces = [memoryview(data[start : start + 999]) for start in range(0, len(data), 999)]
        plans = [
            replace(FilePlan.of("memory.bin", data), head=100),
            FilePlan("stream.bin", len(data), lambda: iter(pieces), head=100),
        ]
        attempt = Attempt("a")
        attempt.begin(storage, [plan.path for plan in plans])
        written = attempt.write(storage, plans, {})
        memory, stream = (file.file for file in written)
        assert (memory.size, memory.blocks, memory.head) == (stream.size, stream.blocks, stream.head)
        assert not problems(storage, manifest_of(attempt, written))


class TestConditional:
    def test_of_two_saves_over_the_same_version_one_commits_and_the_other_is_refused(self, storage: Storage) -> None:
        save(storage, "a")
        first, second = attempt_at(storage, "a"), attempt_at(storage, "a")
        manifests = [manifest_of(each, begin_and_write(storage, each, NEWER), sequence=2) for each in (first, second)]
        first.commit(storage, manifests[0], {})
        with pytest.raises(ConflictError):
            second.commit(storage, manifests[1], {})
        current = find(storage, "a").manifest
        assert current is not None
        assert current.id == first.id

    def test_of_two_first_saves_one_commits(self, storage: Storage) -> None:
        first = attempt_at(storage, "a")
        manifest = manifest_of(first, begin_and_write(storage, first))
        theirs = save(storage, "a", NEWER)
        with pytest.raises(ConflictError):
            first.commit(storage, manifest, {})
        assert is_whole(storage, theirs)


class TestLostAnswers:
    def test_a_commit_that_took_effect_succeeds_whatever_the_storage_answered(
        self, storage: Storage, caplog: pytest.LogCaptureFixture
    ) -> None:
        manifest = save(_Answers(storage.url, TransientError("the connection was reset")), "a")
        assert is_whole(storage, manifest)
        assert keys(storage) == KEYS
        assert "/manifest.json was written: the connection was reset" in caplog.text

    def test_a_commit_that_did_not_take_effect_fails_and_the_old_checkpoint_is_kept(self, storage: Storage) -> None:
        old = save(storage, "a")
        with pytest.raises(TransientError):
            save(_Answers(storage.url, TransientError("no route"), takes_effect=False), "a", NEWER, sequence=2)
        assert is_whole(storage, old)

    def test_a_commit_fails_if_another_run_has_committed_there_meanwhile(self, storage: Storage) -> None:
        attempt = attempt_at(storage, "a")
        manifest = manifest_of(attempt, begin_and_write(storage, attempt))
        theirs = save(storage, "a", NEWER)
        with pytest.raises(TransientError):
            attempt.commit(_Answers(storage.url, TransientError("reset"), takes_effect=False), manifest, {})
        assert is_whole(storage, theirs)

    def test_a_commit_fails_if_what_it_wrote_cannot_be_read_back(self, storage: Storage) -> None:
        attempt = attempt_at(storage, "a")
        manifest = manifest_of(attempt, begin_and_write(storage, attempt))
        with pytest.raises(TransientError, match="reset"):
            attempt.commit(_Answers(storage.url, TransientError("reset"), readable=False), manifest, {})

    def test_what_cannot_be_cleaned_up_after_the_commit_is_no_error_and_swept_later(self, storage: Storage) -> None:
        save(storage, "a")
        new = save(_CannotDelete(storage.url), "a", NEWER, sequence=2)
        assert is_whole(storage, new)
        assert keys(storage) > KEYS - {f"a/{COPY_NAME}"}
        sweep(storage)
        assert keys(storage) == {f"a/{path}" for path in (*(file.path for file in new.files), FILE_NAME, COPY_NAME)}


class TestDurability:
    def test_a_manifest_that_may_not_be_durable_is_written_once_more(self, storage: Storage) -> None:
        answers = _Answers(storage.url, NotDurableError("fsync failed"))
        manifest = save(answers, "a")
        assert is_whole(storage, manifest)
        assert answers.writes == 2

    def test_if_that_fails_too_it_is_committed_and_what_it_replaced_is_kept(self, storage: Storage) -> None:
        save(storage, "a")
        with pytest.raises(NotDurableError):
            save(_Answers(storage.url, NotDurableError("fsync failed"), times=2), "a", NEWER, sequence=2)
        current = find(storage, "a").manifest
        assert current is not None
        assert is_whole(storage, current)
        assert current.sequence == 2
        assert keys(storage) > KEYS - {f"a/{COPY_NAME}"}

    def test_another_runs_manifest_is_not_overwritten_by_the_second_write(self, storage: Storage) -> None:
        theirs: list[Manifest] = []
        answers = _Answers(storage.url, NotDurableError("fsync failed"))
        answers.then = lambda: theirs.append(save(storage, "a", NEWER, sequence=5))
        with pytest.raises(ConflictError):
            save(answers, "a")
        assert is_whole(storage, theirs[0])

    @pytest.mark.parametrize("path", [MARKER, "state.json"])
    def test_a_file_before_the_manifest_that_may_not_be_durable_fails_the_save(
        self, storage: Storage, path: str
    ) -> None:
        with pytest.raises(StorageError, match="fsync failed") as raised:
            save(_Answers(storage.url, NotDurableError("fsync failed"), path=path), "a")
        assert not isinstance(raised.value, NotDurableError)  # which would say that the checkpoint is committed
        assert not find(storage, "a").committed


class TestStaging:
    def test_everything_is_published_at_once_and_what_was_replaced_goes_with_it(self, storage: Storage) -> None:
        old = save(storage, "a")
        before = keys(storage)
        staged = _Staged(storage.url)
        attempt = attempt_at(storage, "a")
        written = begin_and_write(staged, attempt, NEWER)
        assert keys(storage) == before
        assert is_whole(storage, old)
        manifest = manifest_of(attempt, written, sequence=2)
        attempt.commit(staged, manifest, {file.file.path: file.receipt or "" for file in written})
        assert is_whole(storage, manifest)
        assert keys(storage) == {
            f"a/{path}" for path in (*(file.path for file in manifest.files), FILE_NAME, COPY_NAME)
        }
        assert staged.published == 1


def _saved(storage: Storage, files: Mapping[str, bytes]) -> None:
    save(storage, "a", files, sequence=2)


class _Recorded(PassedOn):
    """Notes what changes the root."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.calls: list[str] = []

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        self.calls.append(f"write {key}")
        super().write(key, pieces, over=over)

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self.calls += [f"delete {key}" for key in keys]
        super().delete(keys)


class _Answers(PassedOn):
    """Raises an error for the first writes of a file, whether or not they take effect."""

    then: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self,
        root: str,
        error: Exception,
        *,
        path: str = FILE_NAME,
        times: int = 1,
        takes_effect: bool = True,
        readable: bool = True,
    ) -> None:
        super().__init__(root)
        self.error, self.path, self.times = error, path, times
        self.takes_effect, self.readable = takes_effect, readable
        self.writes = 0

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        failing = key.endswith(f"/{self.path}")
        if not failing or self.takes_effect:
            super().write(key, pieces, over=over)
        if failing:
            self.writes += 1
            if self.writes <= self.times:
                self.then()
                raise self.error

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if not self.readable and key.endswith(FILE_NAME):
            raise TransientError("cannot be read")
        return super().read(key, start, stop)


class _CannotDelete(PassedOn):
    def delete(self, keys: Iterable[str]) -> None:
        raise ckpt.StorageError("read-only")


class _Staged(PassedOn):
    """Shows objects only when they are published, all at once."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.staged: dict[str, bytes] = {}
        self.published = 0

    def stage(self, key: str, pieces: Iterable[Buffer]) -> str:
        receipt = f"receipt-{len(self.staged)}"
        self.staged[receipt] = b"".join(pieces)
        return receipt

    def publish(self, receipts: Mapping[str, str], *, gone: Iterable[str] = ()) -> None:
        self.published += 1
        for key, receipt in receipts.items():
            self.inner.write(key, [self.staged[receipt]])
        self.inner.delete(gone)

    def settle(self) -> None:
        """Everything is."""


class TestMarker:
    @pytest.mark.parametrize(
        ("days", "change", "state"),
        [
            (0, {}, "under way"),
            (0, {3: "another start"}, "DAMAGED"),  # a process that has the number of the writer by now
            (0, {0: "another machine"}, "under way"),
            (2, {0: "another machine"}, "DAMAGED"),
            (2, {}, "under way"),
        ],
    )
    def test_a_save_is_under_way_as_long_as_its_writer_may_live(
        self, storage: Storage, days: int, change: dict[int, str], state: str
    ) -> None:
        begin_and_write(storage, attempt_at(storage, "a"))
        marker = json.loads(storage.read(f"a/{MARKER}"))
        marker["writer"] = [change.get(number, part) for number, part in enumerate(marker["writer"])]
        marker["since"] = (datetime.now(timezone.utc) - timedelta(days=days)).isoformat()
        storage.write(f"a/{MARKER}", [json.dumps(marker).encode()])
        assert verify_checkpoint(storage, "a").state == state
