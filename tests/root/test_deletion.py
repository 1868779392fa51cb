"""Who may delete what from a root: checkpoints that are let go, what interrupted saves left, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

import ckpt
from ckpt.errors import FullError, TransientError
from ckpt.formats.native import manifest as manifest_format
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, Manifest
from ckpt.root.catalog import DAY, HISTORY, MARKER, mark_save, read_marker
from ckpt.root.deletion import apply_retention, remove, remove_uncommitted, sweep
from ckpt.storage import ANY, Buffer, LocalStorage, Storage
from tests.helpers.byte_checkpoints import (
    FILES,
    attempt_at,
    begin_and_write,
    cut_off_at_every_call,
    is_whole,
    keys,
    save,
    tensor_file,
)
from tests.helpers.places import PassedOn

PROBES = {f".try-{'0' * 32}", f".try-{'1' * 32}/probe", f".host-{'a' * 32}-3"}
NEWER = {"model.safetensors": tensor_file(b"newer" * 50), "state.json": b"[]"}


class TestRemoval:
    def test_leaves_nothing_of_the_checkpoint_and_all_of_its_neighbours(self, storage: Storage) -> None:
        old, new = save(storage, "old", sequence=1), save(storage, "new", sequence=2)
        assert not remove(storage, old)
        assert not keys(storage, "old")
        assert is_whole(storage, new)

    def test_keeps_what_others_have_put_into_the_folder(self, storage: Storage) -> None:
        manifest = save(storage, "a")
        storage.write("a/notes.txt", [b"mine"])
        assert not remove(storage, manifest)
        assert keys(storage) == {"a/notes.txt"}

    def test_cut_off_at_any_call_leaves_the_checkpoint_whole_or_gone(self, new_storage: Callable[[], Storage]) -> None:
        found = set()
        for storage, manifest in _removals_cut_off_at_every_call(new_storage):
            committed = f"a/{FILE_NAME}" in keys(storage)
            assert committed == is_whole(storage, manifest)
            sweep(storage)
            assert keys(storage) == ({f"a/{path}" for path in (*FILES, FILE_NAME, COPY_NAME)} if committed else set())
            found.add(committed)
        assert found == {True, False}

    def test_that_was_cut_off_is_finished_by_another_one(self, new_storage: Callable[[], Storage]) -> None:
        for storage, manifest in _removals_cut_off_at_every_call(new_storage):
            assert not remove(storage, manifest)
            assert not keys(storage)

    def test_waits_for_no_reader_but_keeps_what_is_being_read(self, storage: Storage) -> None:
        manifest = save(storage, "a")
        with storage.lock("a", shared=True):
            assert remove(storage, manifest) == "is being read"
        assert is_whole(storage, manifest)
        assert MARKER not in {key.partition("/")[2] for key in keys(storage)}
        assert not remove(storage, manifest)

    def test_keeps_a_checkpoint_that_was_saved_anew_since_it_was_listed(self, storage: Storage) -> None:
        old = save(storage, "a")
        new = save(storage, "a", NEWER, sequence=2)
        assert remove(storage, old) == "was saved again in the meantime"
        assert is_whole(storage, new)

    def test_keeps_a_checkpoint_that_a_newer_version_of_ckpt_has_saved_anew(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = save(storage, "a")
        with monkeypatch.context() as patch:
            patch.setattr(manifest_format, "VERSION", 2)
            save(storage, "a", NEWER, sequence=2)
        before = keys(storage)
        assert remove(storage, old) == "was saved again in the meantime"
        assert keys(storage) == before

    def test_keeps_a_checkpoint_that_a_save_is_replacing(self, storage: Storage) -> None:
        manifest = save(storage, "a")
        begin_and_write(storage, attempt_at(storage, "a"), NEWER)
        assert remove(storage, manifest).startswith("is being saved again")
        assert is_whole(storage, manifest)

    def test_yields_to_a_save_that_begins_just_before_its_marker_is_written(self, storage: Storage) -> None:
        manifest = save(storage, "a")
        racing = _SaveBegins(storage.url)
        assert remove(racing, manifest) == "is being saved again"
        assert is_whole(storage, manifest)
        marker = read_marker(storage, "a")
        assert marker is not None
        assert not marker.removing

    def test_deletes_what_the_save_of_that_checkpoint_replaced_and_could_not_delete(self, storage: Storage) -> None:
        save(storage, "a")
        new = save(_CannotDelete(storage.url), "a", NEWER, sequence=2)
        assert {f"a/{path}" for path in FILES} < keys(storage)
        assert not remove(storage, new)
        assert not keys(storage)

    def test_needs_no_room_on_a_full_disk(self, storage: Storage) -> None:
        manifest = save(storage, "a")
        assert not remove(_Full(storage.url), manifest)
        assert not keys(storage)

    def test_of_a_checkpoint_that_somebody_has_removed_by_hand_is_done(self, storage: Storage) -> None:
        manifest = save(storage, "a")
        storage.delete(keys(storage))
        assert remove(storage, manifest) == ""


class TestLeftovers:
    def test_of_a_save_that_was_never_committed_are_swept_and_files_of_others_are_kept(self, storage: Storage) -> None:
        manifest = save(storage, "committed")
        begin_and_write(storage, attempt_at(storage, "cut-off"))
        others = {"cut-off/notes.txt", "data/train.bin", ".keep", f".try-{'0' * 31}", f".try-{'2' * 32}/mine"}
        for key in (*others, *PROBES):
            storage.write(key, [b"x"])
        found = sweep(storage)
        assert keys(storage) == {*others, *(f"committed/{path}" for path in (*FILES, FILE_NAME, COPY_NAME))}
        assert [checkpoint.name for checkpoint in found.checkpoints] == ["committed"]
        assert is_whole(storage, manifest)

    def test_of_a_save_that_was_to_replace_a_checkpoint_are_swept_and_the_checkpoint_is_kept(
        self, storage: Storage
    ) -> None:
        manifest = save(storage, "a")
        before = keys(storage)
        begin_and_write(storage, attempt_at(storage, "a"), NEWER)
        assert keys(storage) > before
        sweep(storage)
        assert keys(storage) == before
        assert is_whole(storage, manifest)

    def test_of_two_crashes_are_swept_together(self, storage: Storage) -> None:
        begin_and_write(storage, attempt_at(storage, "a"), {"first.json": b"1"})
        begin_and_write(storage, attempt_at(storage, "a"), {"second.json": b"2"})
        assert {"a/first.json", "a/second.json"} < keys(storage)
        sweep(storage)
        assert not keys(storage)

    def test_are_kept_while_somebody_reads_there_and_swept_afterwards(self, storage: Storage) -> None:
        save(storage, "a")
        before = keys(storage)
        begin_and_write(storage, attempt_at(storage, "a"), NEWER)
        left = keys(storage)
        with storage.lock("a", shared=True):
            remove_uncommitted(storage, "a")
            assert keys(storage) == left
        remove_uncommitted(storage, "a")
        assert keys(storage) == before

    def test_beside_a_manifest_that_this_version_cannot_read_are_kept(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(manifest_format, "VERSION", 2)
            manifest = save(storage, "a")
        mark_save(storage, "a", [file.path for file in manifest.files], [], "another")
        before = keys(storage)
        sweep(storage)
        assert keys(storage) == before

    def test_are_no_manifest_and_copy_that_differ_and_are_both_whole(self, storage: Storage) -> None:
        manifest = save(storage, "a")
        storage.write(f"a/{FILE_NAME}", [replace(manifest, sequence=7).to_bytes()])  # put there by hand
        before = {key: storage.read(key) for key in keys(storage)}
        sweep(storage)
        assert {key: storage.read(key) for key in keys(storage)} == before

    def test_that_cannot_be_removed_are_named_and_the_others_are_removed(
        self, storage: Storage, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in "abc":
            begin_and_write(storage, attempt_at(storage, name))
        stuck = _CannotDelete(storage.url)
        stuck.below = "b/"
        assert [found.name for found in sweep(stuck).checkpoints] == ["b"]
        assert {key.partition("/")[0] for key in keys(storage)} == {"b"}
        assert caplog.messages == [f"an interrupted save left {storage.url}/b, which could not be removed: read-only"]

    def test_are_not_tried_one_after_the_other_while_the_store_is_away(self, storage: Storage) -> None:
        for name in "abc":
            begin_and_write(storage, attempt_at(storage, name))
        away = _CannotDelete(storage.url)
        away.error = TransientError
        with pytest.raises(TransientError):
            sweep(away)
        assert away.tried == 1

    def test_that_somebody_resumes_are_spared(self, storage: Storage) -> None:
        for name in ("resumed", "cut-off"):
            begin_and_write(storage, attempt_at(storage, name))
        sweep(storage, spared=["resumed"])
        assert {key.partition("/")[0] for key in keys(storage)} == {"resumed"}

    def test_that_are_younger_than_the_age_are_kept_and_so_are_the_probe_files(self, storage: Storage) -> None:
        begin_and_write(storage, attempt_at(storage, "a"))
        for key in PROBES:
            storage.write(key, [b"x"])
        before = keys(storage)
        sweep(storage, age=DAY)
        assert keys(storage) == before
        sweep(storage, age=0.0)
        assert keys(storage) == PROBES

    def test_are_not_looked_for_where_a_save_failed_before_it_wrote_anything(self, storage: Storage) -> None:
        remove_uncommitted(_NeverLocked(storage.url), "a")  # locking a folder makes it
        assert not keys(storage)

    def test_are_removed_where_there_is_nothing_but_a_file_that_was_being_written(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / ".model.safetensors.x.ckpt-tmp").touch()
        remove_uncommitted(LocalStorage(tmp_path), "a")
        assert not list(tmp_path.rglob("*.ckpt-tmp"))

    def test_that_a_marker_names_outside_its_folder_are_kept(self, storage: Storage) -> None:
        manifest = save(storage, "a")
        marker = b'{"files": ["../a/model.safetensors"], "replaces": []}'
        storage.write(f"b/{MARKER}", [marker])
        sweep(storage)
        assert is_whole(storage, manifest)

    def test_are_swept_by_the_second_run_where_the_first_was_killed_at_any_call(
        self, new_storage: Callable[[], Storage]
    ) -> None:
        def prepare() -> Storage:
            storage = new_storage()
            save(storage, "a")
            begin_and_write(storage, attempt_at(storage, "a"), NEWER)
            begin_and_write(storage, attempt_at(storage, "b"))
            return storage

        for storage in cut_off_at_every_call(prepare, lambda storage: _swept(storage)):
            sweep(storage)
            assert keys(storage) == {f"a/{path}" for path in (*FILES, FILE_NAME, COPY_NAME)}


class TestRetention:
    def test_removes_what_is_not_kept_and_returns_what_is_left(self, storage: Storage) -> None:
        newest_first = [save(storage, name, sequence=number) for number, name in enumerate("abcd")][::-1]
        left = apply_retention(ckpt.Keep(last=2), storage, newest_first, ())
        assert [manifest.name for manifest in left] == ["d", "c"]
        assert {key.partition("/")[0] for key in keys(storage)} == {"c", "d", HISTORY}

    def test_counts_what_is_being_read_as_left(self, storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
        newest_first = [save(storage, name, sequence=number) for number, name in enumerate("abc")][::-1]
        with storage.lock("a", shared=True):
            left = apply_retention(ckpt.Keep(last=1), storage, newest_first, ())
        assert [manifest.name for manifest in left] == ["c", "a"]
        assert is_whole(storage, newest_first[-1])
        assert not caplog.text  # it goes after a later save

    def test_goes_on_where_one_cannot_be_removed_and_names_it_once(
        self, storage: Storage, caplog: pytest.LogCaptureFixture
    ) -> None:
        newest_first = [save(storage, name, sequence=number) for number, name in enumerate("abcd")][::-1]
        stuck = _CannotDelete(storage.url)
        stuck.below = "b/"
        left = apply_retention(ckpt.Keep(last=1), stuck, newest_first, ())
        assert [manifest.name for manifest in left] == ["d", "b"]
        assert [manifest.name for manifest in apply_retention(ckpt.Keep(last=1), stuck, left, ())] == ["d", "b"]
        assert {key.partition("/")[0] for key in keys(storage)} == {"b", "d", HISTORY}
        assert caplog.messages == [f"ckpt left {storage.url}/b, which could not be removed: read-only"]

    def test_does_not_count_a_damaged_checkpoint(self, storage: Storage) -> None:
        newest_first = [save(storage, name, sequence=number) for number, name in enumerate("abc")][::-1]
        left = apply_retention(ckpt.Keep(last=1), storage, newest_first, {"c"})
        assert [manifest.name for manifest in left] == ["c", "b"]


def _removals_cut_off_at_every_call(new_storage: Callable[[], Storage]) -> Iterator[tuple[Storage, Manifest]]:
    """Checkpoints whose removal was killed at a call, each one later than the last; then one that was removed."""
    manifests: dict[str, Manifest] = {}

    def prepare() -> Storage:
        storage = new_storage()
        manifests[storage.url] = save(storage, "a")
        return storage

    def remove_it(storage: Storage) -> None:
        assert not remove(storage, manifests[storage.url])

    for storage in cut_off_at_every_call(prepare, remove_it):
        yield storage, manifests[storage.url]


def _swept(storage: Storage) -> None:
    sweep(storage)


class _SaveBegins(PassedOn):
    """A save writes its marker right before another process writes one."""

    begun = False

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        if key.endswith(MARKER) and not self.begun:
            self.begun = True
            mark_save(self.inner, "a", ["new.json"], [], "the save's")
        super().write(key, pieces, over=over)


class _NeverLocked(PassedOn):
    def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
        pytest.fail(f"locks {key}")


class _CannotDelete(PassedOn):
    """Nothing below a prefix can be deleted."""

    below = ""
    error: type[ckpt.StorageError] = ckpt.StorageError
    tried = 0

    def delete(self, keys: Iterable[str]) -> None:
        there = list(keys)
        if any(key.startswith(self.below) for key in there):
            self.tried += 1
            raise self.error("read-only")
        super().delete(there)


class _Full(PassedOn):
    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        raise FullError("no space left")
