"""What a root is said to hold: names, order, and checkpoints that cannot be read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ckpt
from ckpt.errors import ConfigError, DamagedError, MissingError, TransientError, VersionError
from ckpt.formats.checkpoint_name import check_name
from ckpt.formats.native import manifest as manifest_format
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, Manifest
from ckpt.root.catalog import MARKER, find, list_checkpoints, read_manifest, resolve, scan
from ckpt.storage import Entry, LocalStorage, Storage
from tests.helpers.byte_checkpoints import attempt_at, begin_and_write, keys, save
from tests.helpers.places import PassedOn


def names(storage: Storage) -> list[str]:
    return [checkpoint.name for checkpoint in scan(storage)]


class TestListing:
    def test_an_empty_root_has_no_checkpoints(self, storage: Storage) -> None:
        assert scan(storage) == []

    def test_the_newest_commit_comes_first_whatever_the_names_are(self, storage: Storage) -> None:
        for sequence, name in enumerate(["m", "z", "a"]):
            save(storage, name, sequence=sequence)
        assert names(storage) == ["a", "z", "m"]

    def test_of_equal_sequences_the_later_one_comes_first(self, storage: Storage) -> None:
        for name, day in (("a", "02"), ("b", "03"), ("c", "01")):
            manifest = replace(save(storage, name, sequence=7), created=f"2024-01-{day}T00:00:00.000+00:00")
            storage.write(f"{name}/{FILE_NAME}", [manifest.to_bytes()])
        assert names(storage) == ["b", "a", "c"]

    def test_those_that_were_never_committed_come_last_and_say_so(self, storage: Storage) -> None:
        begin_and_write(storage, attempt_at(storage, "zz-cut-off"))
        save(storage, "a")
        committed, cut_off = scan(storage)
        assert (committed.name, committed.committed, committed.step) == ("a", True, 0)
        assert (cut_off.name, cut_off.committed, cut_off.step) == ("zz-cut-off", False, None)
        assert isinstance(cut_off.problem, DamagedError)
        assert "was never committed: its save was interrupted before the manifest was written" in str(cut_off.problem)

    @pytest.mark.parametrize("file", [FILE_NAME, COPY_NAME, MARKER, "state.json", "rank-00000.json"])
    def test_a_folder_with_any_of_these_files_is_a_checkpoint(self, storage: Storage, file: str) -> None:
        storage.write(f"a/{file}", [b"x"])
        assert names(storage) == ["a"]

    def test_folders_and_files_of_others_are_none(self, storage: Storage) -> None:
        for key in ("notes.txt", "data/train.bin", f"logs/a/{FILE_NAME}", "model.safetensors"):
            storage.write(key, [b"x"])
        assert scan(storage) == []

    def test_a_damaged_manifest_is_listed_last_with_what_is_wrong(self, storage: Storage) -> None:
        save(storage, "intact", sequence=1)
        save(storage, "damaged", sequence=2)
        altered = bytearray(storage.read(f"damaged/{FILE_NAME}"))
        altered[-10] ^= 1
        for file in (FILE_NAME, COPY_NAME):
            storage.write(f"damaged/{file}", [altered])
        intact, damaged = scan(storage)
        assert (intact.name, damaged.name) == ("intact", "damaged")
        assert isinstance(damaged.problem, DamagedError)
        assert "its bytes do not match its digest" in str(damaged.problem)

    def test_one_that_is_committed_while_it_is_looked_for_is_found(self, storage: Storage) -> None:
        manifest = save(storage, "a")
        storage.delete([f"a/{file}" for file in (FILE_NAME, COPY_NAME)])
        assert read_manifest(_Committing(storage.url, manifest), "a") == manifest

    def test_a_manifest_of_a_newer_version_is_listed_last_with_what_to_do(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(storage, "readable", sequence=1)
        with monkeypatch.context() as patch:
            patch.setattr(manifest_format, "VERSION", 2)
            save(storage, "newer", sequence=2)
        readable, newer = scan(storage)
        assert (readable.name, newer.name) == ("readable", "newer")
        assert isinstance(newer.problem, VersionError)
        assert "Upgrade with" in str(newer.problem)

    def test_a_storage_that_cannot_be_read_is_an_error_and_not_a_damaged_checkpoint(self, storage: Storage) -> None:
        save(storage, "a")
        with pytest.raises(TransientError):
            scan(_Unreachable(storage.url))

    def test_reads_manifests_and_no_other_file(self, storage: Storage) -> None:
        save(storage, "a")
        storage.delete([key for key in keys(storage) if not key.endswith(FILE_NAME)])
        (found,) = list_checkpoints(storage)
        assert found.committed

    def test_what_is_listed_does_not_keep_the_callers_frames_alive(self, storage: Storage) -> None:
        storage.write(f"a/{FILE_NAME}", [b"x"])
        problem = find(storage, "a").problem
        assert problem is not None
        assert problem.__traceback__ is None


class TestNames:
    @pytest.mark.parametrize("name", ["a", "step-00000500", "best_v2.1", "_", "9", "lr=1e-3+wd@0.1", "x" * 200])
    def test_plain_names_are_taken(self, name: str) -> None:
        assert check_name(name) == name

    @pytest.mark.parametrize(
        "name",
        ["", ".", "..", "a/b", "/a", "a\\b", ".hidden", "-a", "a..b", "a b", "a\n", "x" * 201, "é", "a:b", None, 3],
    )
    def test_what_could_lead_out_of_the_root_or_hide_in_it_is_refused(self, name: object) -> None:
        with pytest.raises(ConfigError, match="is not a valid checkpoint name"):
            check_name(name)  # type: ignore[arg-type]

    def test_a_name_that_is_not_there_is_answered_with_those_that_are(self, storage: Storage) -> None:
        save(storage, "old", sequence=1)
        save(storage, "new", sequence=2)
        begin_and_write(storage, attempt_at(storage, "cut-off"))
        with pytest.raises(MissingError, match=r"there is no checkpoint 'other' in .*\. There are: new, old\.$"):
            read_manifest(storage, "other")
        assert isinstance(find(storage, "other").problem, MissingError)

    def test_where_there_are_none_it_says_so(self, storage: Storage) -> None:
        with pytest.raises(MissingError, match=r"There are: none\.$"):
            read_manifest(storage, "other")

    def test_a_checkpoint_whose_folder_was_renamed_has_the_name_of_its_folder(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        save(storage, "before")
        os.rename(tmp_path / "before", tmp_path / "after")
        (found,) = scan(storage)
        assert found.manifest is not None
        assert (found.name, found.manifest.name) == ("after", "after")
        assert ckpt.verify(tmp_path / "after") == {"after": []}


class TestLocating:
    def test_a_root_is_located_with_its_names_and_is_no_checkpoint_even_if_it_has_only_one(
        self, new_storage: Callable[[], Storage]
    ) -> None:
        storage = new_storage()
        save(storage, "a", sequence=1)
        found, listed, is_checkpoint = resolve(storage.url)
        assert (found.url, listed, is_checkpoint) == (storage.url, ["a"], False)
        save(storage, "b", sequence=2)
        assert resolve(storage.url)[1] == ["b", "a"]

    def test_a_checkpoint_is_located_in_its_root(self, storage: Storage) -> None:
        save(storage, "a")
        save(storage, "b")
        for url in (f"{storage.url}/a", f"{storage.url}/a/"):
            found, listed, is_checkpoint = resolve(url)
            assert (found.url, listed, is_checkpoint) == (storage.url, ["a"], True)

    def test_a_checkpoint_that_was_never_committed_is_located_too(self, storage: Storage) -> None:
        begin_and_write(storage, attempt_at(storage, "a"))
        assert resolve(f"{storage.url}/a")[1:] == (["a"], True)

    def test_a_checkpoint_is_located_from_within_its_root(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(LocalStorage(tmp_path), "a")
        monkeypatch.chdir(tmp_path)
        assert resolve("a")[1:] == (["a"], True)
        monkeypatch.chdir(tmp_path / "a")
        assert resolve(".")[1:] == (["a"], True)

    def test_what_is_neither_is_refused(self, storage: Storage) -> None:
        save(storage, "a")
        with pytest.raises(MissingError, match="neither a root nor a checkpoint"):
            resolve(f"{storage.url}/other")


class _Committing(PassedOn):
    """Another process commits a checkpoint between the first look and the listing."""

    def __init__(self, url: str, manifest: Manifest) -> None:
        super().__init__(url)
        self._manifest = manifest

    def list(self, prefix: str = "") -> Iterator[Entry]:
        self.write(f"{self._manifest.name}/{FILE_NAME}", [self._manifest.to_bytes()])
        return super().list(prefix)


class _Unreachable(PassedOn):
    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        raise TransientError("no route to host")
