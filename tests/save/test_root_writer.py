"""The writer of a root, without a training: when it holds the root, what it refuses, what it commits."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

import ckpt
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.formats.tensors import FilePlan
from ckpt.ranks.consensus import Result, SingleProcess
from ckpt.ranks.hosts import Hosts
from ckpt.root.catalog import find
from ckpt.save.root_writer import RootWriter
from ckpt.storage import ANY, Buffer, Storage, open_storage
from tests.helpers.byte_checkpoints import MOMENT
from tests.helpers.places import PassedOn

SECONDS = dict.fromkeys(("blocked", "copied", "written", "total"), 0.0)


class Rank(SingleProcess):
    """Rank 1 of a job whose main rank has decided that all is well."""

    rank = 1

    def broadcast(self, call: str, data: str) -> str:
        return Result().to_json(call)


class Unsure(PassedOn):
    """A storage that writes a manifest, or does not, loses the answer, and cannot be asked right afterwards."""

    def __init__(self, root: Path, *, takes_effect: bool) -> None:
        super().__init__(str(root))
        self.takes_effect, self.fails = takes_effect, False

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        if not (self.fails and key.endswith(FILE_NAME)):
            super().write(key, pieces, over=over)
            return
        if self.takes_effect:
            super().write(key, pieces, over=over)
        raise ckpt.TransientError("the answer was lost")

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if self.fails and key.endswith(FILE_NAME):
            raise ckpt.TransientError("nobody answers")
        return super().read(key, start, stop)


class NotSynced(PassedOn):
    """A disk that writes manifests, but cannot say that they are durable."""

    fails = False

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        super().write(key, pieces, over=over)
        if self.fails and key.endswith(FILE_NAME):
            raise ckpt.NotDurableError("fsync failed.")


def writer_of(root: Path | Storage, **options: object) -> RootWriter:
    return RootWriter(open_storage(str(root)) if isinstance(root, Path) else root, SingleProcess(), **options)  # type: ignore[arg-type]


def save(writer: RootWriter, name: str) -> Manifest:
    plan = FilePlan.of("state.json", f"the state of {name}".encode())
    attempt = writer.begin(name, [plan.path])
    return writer.commit(attempt, attempt.write(writer.storage, [plan], {}), {"seconds": SECONDS})


def names(root: Path) -> list[str]:
    return [checkpoint.name for checkpoint in ckpt.list_checkpoints(root)]


class TestHolding:
    def test_a_new_writer_holds_nothing_and_leaves_the_root_to_others(self, tmp_path: Path) -> None:
        writer, other = writer_of(tmp_path), writer_of(tmp_path)
        assert writer.held is None
        other.hold()
        assert other.held is not None
        other.close()

    def test_a_held_root_is_refused_to_others_until_it_is_closed(self, tmp_path: Path) -> None:
        writer, other = writer_of(tmp_path), writer_of(tmp_path)
        writer.hold()
        with pytest.raises(ckpt.LockedError, match="another run writes to"):
            other.hold()
        assert other.held is None
        held = writer.held  # referenced here, so that the lock is released by `close`, not with its last reference
        writer.close()
        assert held is not None
        assert writer.held is None
        other.hold()
        other.close()

    def test_the_first_save_holds_the_root(self, tmp_path: Path) -> None:
        writer = writer_of(tmp_path)
        save(writer, "a")
        assert writer.held is not None
        with pytest.raises(ckpt.LockedError):
            writer_of(tmp_path).hold()
        writer.close()

    def test_a_closed_writer_holds_again_with_its_next_save(self, tmp_path: Path) -> None:
        writer = writer_of(tmp_path)
        save(writer, "a")
        writer.close()
        save(writer, "b")
        assert writer.held is not None
        writer.close()
        assert names(tmp_path) == ["b", "a"]

    def test_a_hold_that_fails_in_the_mirror_releases_the_root(self, tmp_path: Path) -> None:
        class Taken:
            def start(self, newest_first: list[Manifest]) -> None:
                raise ckpt.LockedError("another run copies there")

        writer = writer_of(tmp_path, mirror=Taken())
        with pytest.raises(ckpt.LockedError, match="another run copies there"):
            writer.hold()
        assert writer.held is None
        other = writer_of(tmp_path)
        other.hold()
        other.close()

    def test_holding_removes_what_a_crashed_save_left(self, tmp_path: Path) -> None:
        crashed = writer_of(tmp_path)
        plan = FilePlan.of("state.json", b"half of it")
        crashed.begin("a", [plan.path]).write(crashed.storage, [plan], {})
        crashed.close()
        assert (tmp_path / "a" / "state.json").exists()
        writer = writer_of(tmp_path)
        writer.hold()
        assert not (tmp_path / "a" / "state.json").exists()
        writer.close()

    def test_a_rank_that_does_not_own_the_root_does_not_lock_it(self, tmp_path: Path) -> None:
        writer = RootWriter(open_storage(str(tmp_path)), Rank(), hosts=Hosts((0, 0), ("x", "x")))
        assert not writer.owns_root
        writer.hold()
        assert writer.held is None
        assert writer.lineage.has_resumed

    def test_the_first_rank_of_a_host_owns_the_root_of_that_host(self, tmp_path: Path) -> None:
        writer = RootWriter(open_storage(str(tmp_path)), Rank(), hosts=Hosts((0, 1), ("x", "y")))
        assert writer.owns_root


class TestOvertaking:
    def test_a_run_that_has_not_resumed_is_refused_and_leaves_no_trace(self, tmp_path: Path) -> None:
        first = writer_of(tmp_path)
        save(first, "old")
        first.close()
        fresh = writer_of(tmp_path)
        for name in ("new", "old"):
            with pytest.raises(ckpt.ConfigError, match=r"old is the newest\) that this run has not resumed from"):
                fresh.begin(name, ["state.json"])
        fresh.close()
        assert names(tmp_path) == ["old"]
        assert not (tmp_path / "new").exists()

    def test_a_run_that_follows_the_newest_continues_its_lineage(self, tmp_path: Path) -> None:
        first = writer_of(tmp_path)
        old = save(first, "old")
        first.close()
        second = writer_of(tmp_path)
        second.follow(old, ())
        new = save(second, "new")
        second.close()
        assert (new.run, new.parent, new.sequence) == (old.run, old.id, old.sequence + 1)

    def test_after_a_failed_load_even_an_empty_root_is_refused_until_a_load_succeeds(self, tmp_path: Path) -> None:
        writer = writer_of(tmp_path)
        writer.lineage.note_failed_load(ckpt.StorageError("the mirror cannot be reached."))
        with pytest.raises(ckpt.ConfigError, match="the mirror cannot be reached"):
            save(writer, "a")
        writer.hold()
        save(writer, "a")
        writer.close()

    def test_the_newest_of_the_mirror_counts_though_the_root_is_empty(self, tmp_path: Path) -> None:
        class Copied:
            newest = Manifest(name="copied", id="id", sequence=7, created=MOMENT, run="run", files=())

            def start(self, newest_first: list[Manifest]) -> None: ...

        writer = writer_of(tmp_path, mirror=Copied())
        with pytest.raises(ckpt.ConfigError, match=r"copied is the newest"):
            save(writer, "a")

    def test_a_name_that_another_run_has_written_meanwhile_is_kept(self, tmp_path: Path) -> None:
        writer = writer_of(tmp_path)
        save(writer, "a")
        theirs = Manifest(name="b", id="theirs", sequence=9, created=MOMENT, run="theirs", files=())
        writer.storage.write(f"b/{FILE_NAME}", [theirs.to_bytes()])
        with pytest.raises(ckpt.ConflictError, match="b was saved by another run meanwhile, and is kept"):
            save(writer, "b")
        writer.close()
        found = find(writer.storage, "b").manifest
        assert found is not None
        assert found.id == "theirs"


class TestAnUnsureCommit:
    @pytest.mark.parametrize("takes_effect", [True, False])
    def test_it_is_resolved_by_the_next_save_and_its_number_is_not_used_again(
        self, tmp_path: Path, takes_effect: bool
    ) -> None:
        storage = Unsure(tmp_path, takes_effect=takes_effect)
        writer = writer_of(storage, keep=ckpt.Keep(last=9))
        storage.fails = True
        with pytest.raises(ckpt.TransientError, match="the answer was lost"):
            save(writer, "a")
        storage.fails = False
        assert save(writer, "b").sequence == 2
        again = save(writer, "a")  # if "a" was committed it replaces that, and is no conflict
        writer.close()
        assert again.sequence == 3
        assert ckpt.verify(tmp_path) == {"a": [], "b": []}

    @pytest.mark.parametrize(
        "is_local",
        [
            pytest.param(True, id="on a disk that can be asked they are removed"),
            pytest.param(False, id="far away they are kept: it may have taken effect"),
        ],
    )
    def test_when_it_is_abandoned_its_files_are_removed_where_it_is_known_to_have_had_no_effect(
        self, tmp_path: Path, is_local: bool
    ) -> None:
        storage = Unsure(tmp_path, takes_effect=False)
        storage.is_local = is_local
        writer = writer_of(storage)
        storage.fails = True
        with pytest.raises(ckpt.TransientError) as caught:
            save(writer, "a")
        storage.fails = False
        writer.abandon("a", caught.value)
        assert (tmp_path / "a" / "state.json").exists() != is_local
        writer.close()

    def test_while_a_commit_is_not_durable_the_files_that_it_replaces_are_kept(self, tmp_path: Path) -> None:
        storage = NotSynced(str(tmp_path))
        writer = writer_of(storage)
        save(writer, "a")
        storage.fails = True
        with pytest.raises(ckpt.NotDurableError, match="a is committed and can be loaded") as caught:
            save(writer, "a")
        storage.fails = False
        writer.abandon("a", caught.value)
        assert (tmp_path / "a" / "state.json").read_bytes() == b"the state of a"  # a crash may bring its manifest back
        save(writer, "b")
        writer.close()
        assert ckpt.verify(tmp_path) == {"b": [], "a": []}


class TestALostLock:
    def test_the_root_is_locked_again_and_the_run_goes_on_without_what_is_gone(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        root = tmp_path / "root"
        writer = writer_of(root)
        save(writer, "a")
        shutil.rmtree(root)
        with caplog.at_level(logging.WARNING, "ckpt"):
            again = save(writer, "b")
        assert "Checkpoints that are gone: a." in caplog.text
        assert (names(root), again.sequence) == (["b"], 2)
        with pytest.raises(ckpt.LockedError):
            writer_of(root).hold()
        writer.close()

    def test_what_others_have_committed_meanwhile_must_be_resumed_from_first(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        writer, other = writer_of(root), writer_of(root)
        save(writer, "a")
        (root / ".lock").unlink()
        other.hold()
        theirs = save(other, "theirs")
        other.close()
        with pytest.raises(ckpt.ConfigError, match=r"theirs is the newest\) that this run has not resumed from"):
            save(writer, "b")
        writer.follow(theirs, ())
        assert save(writer, "b").parent == theirs.id
        writer.close()

    def test_while_another_run_holds_it_the_root_is_not_held(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        writer, other = writer_of(root), writer_of(root)
        save(writer, "a")
        shutil.rmtree(root)
        save(other, "theirs")
        with pytest.raises(ckpt.LockedError, match="another run writes to"):
            save(writer, "b")
        assert writer.held is None
        other.close()
        with pytest.raises(ckpt.ConfigError, match="has not resumed from"):
            save(writer, "b")
        writer.close()
        assert names(root) == ["theirs"]


class TestRetention:
    def test_it_removes_old_checkpoints_and_forgets_them(self, tmp_path: Path) -> None:
        writer = writer_of(tmp_path, keep=ckpt.Keep(last=1))
        for name in ("a", "b"):
            save(writer, name)
            writer.retain()
        assert names(tmp_path) == ["b"]
        assert writer.held is not None
        assert [manifest.name for manifest in writer.held.committed] == ["b"]
        save(writer, "a")  # nothing is left of the older checkpoint of that name
        writer.close()
        assert ckpt.verify(tmp_path) == {"a": [], "b": []}

    def test_a_writer_that_holds_nothing_removes_nothing(self, tmp_path: Path) -> None:
        first = writer_of(tmp_path)
        for name in ("a", "b"):
            save(first, name)
        first.close()
        writer_of(tmp_path, keep=ckpt.Keep(last=1)).retain()
        assert names(tmp_path) == ["b", "a"]

    def test_a_checkpoint_that_was_removed_does_not_count_as_kept(self, tmp_path: Path) -> None:
        writer = writer_of(tmp_path, keep=ckpt.Keep(last=2))
        save(writer, "a")
        save(writer, "b")
        writer.remove("b")
        assert names(tmp_path) == ["a"]
        save(writer, "c")
        writer.retain()
        writer.close()
        assert names(tmp_path) == ["c", "a"]
