"""The writer of a root, without a training: when it holds the root, what it refuses, what it commits."""

from __future__ import annotations

import itertools
import logging
import platform
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import ckpt
from ckpt.formats.native import manifest as manifest_format
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, LARGEST_SEQUENCE, FileRecord, Manifest
from ckpt.formats.tensors import FilePlan
from ckpt.ranks.consensus import Result, SingleProcess
from ckpt.ranks.hosts import Hosts
from ckpt.root.catalog import History, Overview, PastAttempt, Summary, find
from ckpt.root.signing import Seal
from ckpt.root.write_link_commit import EarlierFile, WrittenFile
from ckpt.save import root_writer
from ckpt.save.root_writer import (
    AttemptLog,
    Lineage,
    Links,
    Numbering,
    RootWriter,
    adopt,
    next_sequence,
    remove_checkpoint,
    resumption,
    writer_at,
)
from ckpt.storage import ANY, Buffer, MemoryStorage, Storage, open_storage
from tests.helpers.byte_checkpoints import MOMENT
from tests.helpers.places import PassedOn

_numbers = itertools.count()
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


class Away(PassedOn):
    """A storage that does not answer."""

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        raise ckpt.TransientError("nobody answers")


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
        mirror = Mirrored()
        mirror.newest = manifest_named("copied", sequence=7)
        writer = writer_of(tmp_path, mirror=mirror)
        with pytest.raises(ckpt.ConfigError, match=r"copied is the newest"):
            save(writer, "a")

    @pytest.mark.parametrize(("mirrored", "reserved"), [(1, 3), (7, 8)])
    def test_numbers_are_above_those_of_the_root_and_of_the_mirror(
        self, tmp_path: Path, mirrored: int, reserved: int
    ) -> None:
        first = writer_of(tmp_path)
        for name in ("a", "b"):
            save(first, name)
        first.close()
        mirror = Mirrored()
        mirror.newest = manifest_named("copied", sequence=mirrored)
        writer = writer_of(tmp_path, mirror=mirror)
        writer.hold()
        assert writer.reserve() == reserved
        writer.close()

    @pytest.mark.parametrize("name", ["a", "b"])
    def test_a_name_that_another_run_has_written_meanwhile_is_kept(self, tmp_path: Path, name: str) -> None:
        writer = writer_of(tmp_path)
        save(writer, "a")
        theirs = manifest_named(name, id="theirs", run="theirs")
        writer.storage.write(f"{name}/{FILE_NAME}", [theirs.to_bytes()])
        with pytest.raises(ckpt.ConflictError, match=rf"another run has saved .*{name} in the meantime"):
            save(writer, name)
        writer.close()
        found = find(writer.storage, name).manifest
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

    def test_nor_is_a_number_that_was_higher_than_the_one_reserved_for_it(self, tmp_path: Path) -> None:
        writer = writer_of(storage := Unsure(tmp_path, takes_effect=False))
        first, second = writer.reserve(), writer.reserve()
        writer.commit(writer.begin("b", [], number=second), [], {"seconds": SECONDS})
        storage.fails = True
        with pytest.raises(ckpt.TransientError):
            writer.commit(writer.begin("a", [], number=first), [], {"seconds": SECONDS})
        storage.fails = False
        assert save(writer, "c").sequence == 4
        writer.close()

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
        assert "These checkpoints are gone: a." in caplog.text
        assert (names(root), again.sequence) == (["b"], 2)
        with pytest.raises(ckpt.LockedError):
            writer_of(root).hold()
        (root / ".lock").unlink()
        save(writer, "c")  # nobody was there meanwhile, and nothing is gone
        assert "These checkpoints are gone: none." in caplog.text
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

    def test_a_run_that_has_committed_nothing_removes_nothing_at_its_end(self, tmp_path: Path) -> None:
        first = writer_of(tmp_path)
        for name in ("a", "b"):
            save(first, name)
        first.close()
        writer = writer_of(tmp_path, keep=ckpt.Keep(last=1), mirror=Mirrored())
        writer.hold()
        writer.close()
        assert names(tmp_path) == ["b", "a"]

    def test_all_ranks_are_told_that_it_is_at_work_and_a_failure_is_no_error(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Working(SingleProcess):
            told: ClassVar[list[bool]] = []

            @contextmanager
            def working(self, *, job_wide: bool = False) -> Iterator[None]:
                self.told.append(job_wide)
                yield

        class Stuck(PassedOn):
            def delete(self, keys: Iterable[str]) -> None:
                raise ckpt.StorageError("read-only")

        writer = RootWriter(Stuck(str(tmp_path)), Working(), ckpt.Keep(last=1), mirror := Mirrored())  # type: ignore[arg-type]
        save(writer, "a")
        save(writer, "b")
        writer.retain()
        assert (Working.told, names(tmp_path)) == ([True], ["b", "a"])
        assert "which could not be removed: read-only" in caplog.text
        writer.close()
        assert mirror.is_closed
        assert Working.told == [True] * 3

    def test_a_damaged_checkpoint_that_was_saved_anew_is_damaged_no_more_and_what_is_damaged_is_not_mirrored(
        self, tmp_path: Path
    ) -> None:
        writer = writer_of(tmp_path, mirror=(mirror := Mirrored()))
        for name in ("a", "b"):
            save(writer, name)
        writer.damaged |= {"a", "b"}
        save(writer, "a")
        assert writer.damaged == {"b"}
        writer.close()
        mirror.started.clear()
        writer.hold()
        assert mirror.started == ["a"]
        writer.close()

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


class TestNumbers:
    def test_numbers_are_above_all_that_are_known_and_the_last_one_comes_again(self) -> None:
        numbering = Numbering()
        for known, reserved in ((0, 1), (0, 2), (5, 6), (3, 7)):
            assert numbering.reserve(known) == reserved
        numbering.note(20)
        numbering.note(9)
        assert numbering.reserve(1) == 21
        assert [next_sequence(known) for known in (0, 7, LARGEST_SEQUENCE - 1, LARGEST_SEQUENCE)] == [
            1, 8, LARGEST_SEQUENCE, LARGEST_SEQUENCE
        ]  # fmt: skip

    def test_nobody_takes_a_number_while_another_one_is_noted(self) -> None:
        numbering = Numbering()
        numbering._guard = entered = Entered(numbering._guard)  # type: ignore[assignment]
        numbering.note(3)
        assert entered.count == 1
        numbering.reserve(3)
        assert entered.count == 2

    def test_the_manifest_has_the_number_that_was_reserved_unless_a_higher_one_was_used_since(
        self, tmp_path: Path
    ) -> None:
        writer = writer_of(tmp_path)
        first, second = writer.reserve(), writer.reserve()
        attempt = writer.begin("b", [], number=second)
        assert writer.commit(attempt, [], {"seconds": SECONDS}).sequence == 2
        attempt = writer.begin("a", [], number=first)
        assert writer.commit(attempt, [], {"seconds": SECONDS}).sequence == 3
        assert save(writer, "c").sequence == 4
        writer.close()


class Entered:
    """A lock that counts."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.count = lock, 0

    def __enter__(self) -> None:
        self.count += 1
        self.lock.acquire()

    def __exit__(self, *args: object) -> None:
        self.lock.release()


class TestLineage:
    def test_what_a_load_says_of_itself(self) -> None:
        long, many = "x" * 401, {f"n{number}": "why" for number in range(23)}
        loaded = manifest_named("a", parent="older", progress={"step": 7})
        for tier, found_in in ((-1, "memory"), (0, "root"), (1, "mirror"), (2, "elsewhere")):
            lineage = Lineage(sequence=3)
            lineage.follow(loaded, tier, {"b": long, "c": "x" * 400})
            assert lineage.resumed == {
                "name": "a", "id": "id-a", "step": 7, "found_in": found_in,
                "passed_over": {"b": "x" * 397 + "...", "c": "x" * 400},
            }  # fmt: skip
            assert (lineage.run, lineage.parent) == ("run", "older" if tier < 0 else "id-a")
            assert (lineage.sequence, lineage.has_resumed) == (9, True)
        said = resumption(loaded, 0, many)
        assert (len(said["passed_over"]), said["more"]) == (20, 3)
        assert "more" not in resumption(loaded, 0, dict(list(many.items())[:20]))
        lineage = Lineage(sequence=30)
        lineage.follow(loaded, 0, {})
        assert lineage.sequence == 30

    def test_what_a_fresh_start_must_not_overtake(self) -> None:
        newest = Summary.of(manifest_named("a"))
        for failed, known, lost, why in (
            ("", None, {}, ""),
            ("it is away.", None, {}, "the last load failed: it is away."),
            ("", newest, {}, "a is the newest"),
            ("", None, {"b": "b is damaged."}, "so ckpt saves nothing next to them: b is damaged."),
        ):
            lineage = Lineage(failed_load=failed)
            if why:
                with pytest.raises(ckpt.ConfigError, match=why):
                    lineage.require_resumed("root", known, lost)
            else:
                lineage.require_resumed("root", known, lost)
            assert lineage.has_resumed == (not why)
            lineage.has_resumed = True
            lineage.require_resumed("root", known, lost)


def manifest_named(name: str, **fields: Any) -> Manifest:
    known = {"id": f"id-{name}", "sequence": 9, "created": MOMENT, "run": "run", "files": (), **fields}
    return Manifest(name=name, **known)


class TestCommits:
    def test_a_commit_says_what_it_took(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        writer = writer_of(tmp_path)
        with caplog.at_level(logging.INFO, "ckpt"):
            plan = FilePlan.of("state.json", b"x" * 2500)
            attempt = writer.begin("a", [plan.path])
            seconds = {**SECONDS, "blocked": 1.25, "total": 2.5}
            made = writer.commit(attempt, attempt.write(writer.storage, [plan], {}), {"seconds": seconds})
        assert caplog.messages == ["saved a: 2.5 kB, training waited 1.25 s, durable after 2.50 s"]
        assert (made.world_size, made.hosts, made.parent, made.signature) == (1, (), None, None)
        assert made.versions.keys() == {"ckpt", "torch", "python"}
        assert made.hardware
        writer.close()

    def test_one_that_only_amends_documents_is_no_news(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        writer = writer_of(tmp_path)
        for amends, file, linked, is_news in (
            (False, "state.json", False, True),
            (True, "state.json", False, False),
            (True, "model.safetensors", True, False),
            (True, "model.safetensors", False, True),
        ):
            caplog.clear()
            record = FileRecord(name=file, path=file, size=0, blocks=())
            with caplog.at_level(logging.INFO, "ckpt"):
                attempt = replace(writer.begin("a", []), amends=amends)
                writer.commit(attempt, [WrittenFile(record, linked=linked)], {"seconds": SECONDS})
            assert bool(caplog.messages) == is_news, (amends, file, linked)
        writer.close()

    def test_files_are_hashed_by_sha256_where_the_seal_wants_it(self, tmp_path: Path) -> None:
        for number, (seal, wanted) in enumerate(((None, False), (Seal(), False), (Seal(with_sha256=True), True))):
            writer = writer_of(tmp_path / f"{number}", seal=seal)
            assert writer.begin("a", []).sha256 == wanted
            writer.close()

    def test_a_folder_or_a_root_of_accelerate_is_kept_as_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs" / "random_states_0.pkl").write_bytes(b"x")
        (tmp_path / "theirs" / "model.safetensors").write_bytes(b"x")
        (tmp_path / "others").mkdir()
        (tmp_path / "others" / "notes.txt").write_bytes(b"x")
        writer = writer_of(tmp_path)
        with pytest.raises(
            ckpt.ConfigError, match=r"Accelerate wrote .*theirs, and ckpt does not overwrite it\. Save un"
        ):
            save(writer, "theirs")
        save(writer, "others")
        writer.close()
        inside = writer_of(tmp_path / "theirs")
        with pytest.raises(ckpt.ConfigError, match=r"Accelerate wrote .*theirs, and ckpt does not write into it"):
            save(inside, "a")
        inside.close()

    def test_what_is_replaced_is_known_to_the_history_and_the_old_files_are_gone(self, tmp_path: Path) -> None:
        writer = writer_of(tmp_path, keep=ckpt.Keep(last=5))
        first, second = save(writer, "a"), save(writer, "a")
        held = writer.held
        assert held is not None
        assert (held.newest, held.replaced, held.find("a"), held.find("b")) == (second, True, second, None)
        assert [summary.id for summary in held.committed] == [second.id]
        writer.retain()
        assert not held.replaced
        assert {past.summary.id for past in History.of(writer.storage).saves} == {first.id, second.id}
        third = save(writer, "b")
        assert held.find("a") == second
        assert held.find("b") is third
        assert writer.committed_as("a") == second
        writer.close()
        assert writer.committed_as("a") is None
        assert not (tmp_path / "a" / "state.json").exists()
        again = writer_of(tmp_path, keep=ckpt.Keep(last=5))
        again.follow(third, ())
        save(again, "a")
        again.retain()
        again.close()
        (past,) = (past for past in History.of(writer.storage).saves if past.summary.id == second.id)
        assert past.seconds == SECONDS  # another process had saved what it replaced

    def test_one_whose_manifest_was_replaced_by_others_is_not_taken_for_ours(self, tmp_path: Path) -> None:
        writer = writer_of(tmp_path)
        save(writer, "a")
        save(writer, "b")
        theirs = manifest_named("a", id="theirs")
        writer.storage.write(f"a/{FILE_NAME}", [theirs.to_bytes()])
        assert writer.committed_as("a") is None
        writer.storage.delete([f"a/{FILE_NAME}", f"a/{COPY_NAME}"])
        assert writer.committed_as("a") is None
        writer.close()

    def test_a_checkpoint_of_a_newer_version_is_not_replaced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = writer_of(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(manifest_format, "VERSION", 9)
            save(first, "newer")
            first.close()
        writer = writer_of(tmp_path)
        writer.lineage.has_resumed = True
        with pytest.raises(ckpt.VersionError):
            save(writer, "newer")
        save(writer, "other")
        writer.close()
        fresh = writer_of(tmp_path / "other-root")
        (tmp_path / "other-root" / "newer").mkdir(parents=True)
        shutil.copy(tmp_path / "newer" / FILE_NAME, tmp_path / "other-root" / "newer")
        with pytest.raises(ckpt.ConfigError, match="can't read, so ckpt saves nothing next to them"):
            save(fresh, "other")
        fresh.close()

    def test_files_that_the_mirror_has_under_a_name_get_other_paths(self, tmp_path: Path) -> None:
        mirror = Mirrored("taken")
        writer = writer_of(tmp_path, mirror=mirror)
        assert [file.path for file in save(writer, "free").files] == ["state.json"]
        assert [file.path for file in save(writer, "taken").files] != ["state.json"]
        assert [manifest.name for manifest in mirror.enqueued] == ["free", "taken"]
        attempt = writer.begin("far", ["x", "y"], elsewhere=["y"])
        assert attempt.occupied_paths == ("y",)
        writer.close()

    def test_what_was_kept_for_the_mirror_is_removed_when_it_has_it(self, tmp_path: Path) -> None:
        for error, left in ((None, ["c"]), ("away", ["c", "b", "a"])):
            root = tmp_path / f"{error}"
            writer = writer_of(root, mirror=(mirror := Mirrored()), keep=ckpt.Keep(last=1))
            mirror.storage, mirror.error = writer.storage, error
            for name in ("a", "b", "c"):
                save(writer, name)
                writer.retain()
            assert names(root) == ["c", "b", "a"]
            writer.close()
            assert mirror.is_closed
            assert names(root) == left

    def test_links_follow_what_was_read_or_written_last(self, tmp_path: Path) -> None:
        writer = writer_of(tmp_path)
        first = save(writer, "a")
        save(writer, "b")
        assert [writer.unread_newest] == ["b"]
        writer.advance("a", first.id, first.files)
        assert (writer.links.files, writer.lineage.parent) == (
            {"state.json": EarlierFile("a", first.files[0])}, first.id
        )  # fmt: skip
        assert not writer.unread_newest
        writer.follow(first, ["b"], 1, {})
        assert (writer.links, writer.damaged) == (Links(), {"b"})
        assert [writer.unread_newest] == ["a"]
        writer.links.follow_unread(writer.storage, "a")
        assert writer.links.files == {"state.json": EarlierFile("a", first.files[0], was_read=False)}
        assert [writer.links.are_known] == [False]
        writer.follow(first, [])
        assert [writer.links.are_known] == [True]
        writer.links.follow_unread(Away(str(tmp_path)), "a")
        assert [writer.links.are_known] == [True]  # as they were: the save goes on
        writer.links.follow_unread(writer.storage, "none")
        assert writer.links.files == {}
        writer.close()
        assert writer.unread_newest is None

    def test_a_hosts_own_root_gets_the_manifest_of_files_that_are_there(self, tmp_path: Path) -> None:
        storage = open_storage(str(tmp_path))
        records = tuple(FileRecord(name=path, path=path, size=0, blocks=()) for path in ("x", "of another host"))
        for name, present, adopted in (("a", ["x"], True), ("b", ["y"], False), ("c", ["x", FILE_NAME], False)):
            for path in present:
                storage.write(f"{name}/{path}", [b"1"])
            adopt(storage, manifest_named(name, files=records))
            written = storage.version(f"{name}/{FILE_NAME}") is not None and storage.read(f"{name}/{FILE_NAME}") != b"1"
            assert written == adopted, name
        for number, (hosts, tier, adopted) in enumerate(
            (((0, 1), 0, True), ((0, 1), 1, True), ((0, 1), -1, False), ((0, 0), 0, False))
        ):
            storage.write(f"n{number}/x", [b"1"])
            writer = RootWriter(storage, Rank(), hosts=Hosts(hosts, ("x", "y")))
            writer.follow(manifest_named(f"n{number}", files=records), (), tier)
            assert (storage.version(f"n{number}/{FILE_NAME}") is not None) == adopted, number


class Mirrored:
    """A mirror that has a checkpoint of that name, and holds those that it is to copy until it is closed."""

    newest: Manifest | None = None
    error: str | None = None
    storage: Storage | None = None
    is_closed = False

    def __init__(self, *taken: str) -> None:
        self.taken, self.enqueued, self._held = taken, list[Manifest](), ExitStack()
        self.started: list[str] = []

    def start(self, newest_first: list[Summary]) -> None:
        self.started += [summary.name for summary in newest_first]

    def is_free(self, name: str) -> bool:
        return name not in self.taken

    def enqueue(self, manifest: Manifest) -> None:
        self.enqueued.append(manifest)
        if self.storage is not None:
            self._held.enter_context(self.storage.lock(manifest.name, shared=True))

    def close(self) -> None:
        self.is_closed = True
        self._held.close()


def is_empty(writer: RootWriter) -> bool | None:
    return writer.held.is_empty if writer.held is not None else None


class TestTakingARoot:
    def test_what_is_to_be_done_then_is_done_where_its_file_is_there(self, tmp_path: Path) -> None:
        (tmp_path / "there").touch()
        writer, done = writer_of(tmp_path), list[str]()
        for file in ("", "there", "missing"):
            writer.lock.call_when_taken(lambda file=file: done.append(file), file)  # type: ignore[misc]
        writer.hold()
        writer.hold()
        assert done == ["", "there"]
        assert [is_empty(writer)] == [False]
        writer.close()
        (tmp_path / "there").unlink()
        writer.hold()
        assert [is_empty(writer)] == [True]
        assert done == ["", "there", ""]
        writer.close()

    def test_a_local_one_is_free_again_until_it_is_held_and_a_remote_one_is_not(self, tmp_path: Path) -> None:
        for is_local in (True, False):
            storage = PassedOn(str(tmp_path / f"{is_local}"))
            storage.is_local = is_local
            writer, other = writer_of(storage), writer_of(tmp_path / f"{is_local}")
            with writer.taking() as take:
                take()
                assert is_empty(writer) is None
                if is_local:
                    other.hold()
                    other.close()
                else:
                    with pytest.raises(ckpt.LockedError):
                        other.hold()
            other.hold()  # nobody has held it since
            with pytest.raises(ckpt.LockedError), writer.taking() as take:
                take()
            with pytest.raises(ckpt.LockedError):
                writer.hold()
            other.close()
            with writer.taking() as take:
                take()
                writer.hold()
            with pytest.raises(ckpt.LockedError):
                other.hold()
            with writer.taking() as take:
                take()
            assert writer.held is not None
            writer.close()

    def test_what_was_listed_before_it_was_locked_does_not_count(self, tmp_path: Path) -> None:
        storage = PassedOn(str(tmp_path))
        storage.is_local = False
        writer, other = writer_of(storage), writer_of(tmp_path)
        before = Overview.of(storage)
        writer.lock.note_listing(before)
        save(other, "a")
        other.close()
        writer.hold()
        assert [summary.name for summary in writer.lock.committed] == ["a"]
        writer.close()
        assert writer.lock.committed == []
        with writer.taking() as take:
            take()
            writer.lock.note_listing(before)  # as if a load had listed it now
            writer.hold()
            assert writer.lock.committed == []
        writer.close()


class TestElsewhere:
    def test_a_folder_outside_is_written_by_this_run_alone_and_must_be_local(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        root = writer_of(tmp_path / "root")
        with caplog.at_level(logging.INFO, "ckpt"):
            made = save(writer := writer_at(str(tmp_path / "out"), root), "out")
            writer_at(str(tmp_path / "epoch_1"), root)
        assert caplog.text.count(f"{tmp_path} is outside") == 1
        writer.close()
        assert made.run == root.lineage.run
        assert (writer.numbering is root.numbering, writer.lineage is root.lineage) == (True, False)
        again = writer_at(str(tmp_path / "out"), root)
        save(again, "out")
        again.close()
        assert ", a checkpoint of another run" not in caplog.text
        other = writer_of(tmp_path / "other")
        fresh = writer_at(str(tmp_path / "out"), other)
        with pytest.raises(ckpt.ConfigError, match="has not resumed from"):
            save(fresh, "out")
        fresh.close()
        other.lineage.has_resumed = True
        save(resumed := writer_at(str(tmp_path / "out"), other), "out")
        resumed.close()
        assert ", a checkpoint of another run" in caplog.text
        with pytest.raises(ckpt.ConfigError, match="it is not a local folder"):
            writer_at("s3://bucket/out", root)
        root.hosts = Hosts((0, 1), ("x", "y"))
        with pytest.raises(ckpt.ConfigError, match="every host has a root of its own"):
            writer_at(str(tmp_path / "out"), root)


def test_a_removal_keeps_what_is_being_read_and_tells_the_history(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    save(writer, "a")
    remove_checkpoint(writer.storage, None, "none")
    with writer.storage.lock("a", shared=True):
        writer.remove("a")
        assert names(tmp_path) == ["a"]
        assert [summary.name for summary in writer.lock.committed] == ["a"]
    writer.remove("a")
    assert (names(tmp_path), writer.lock.committed) == ([], [])
    assert [past.summary.name for past in History.of(writer.storage).saves] == ["a"]
    writer.close()


def test_a_failed_save_is_cleaned_up_by_the_rank_that_owns_the_root(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    plan = FilePlan.of("state.json", b"x")
    for error, left in ((ckpt.NotDurableError("x"), True), (ckpt.StorageError("x"), False)):
        if left:
            writer.begin("a", [plan.path]).write(writer.storage, [plan], {})
        writer.abandon("a", error)
        assert (tmp_path / "a" / "state.json").exists() == left
    writer.close()


def test_who_locks_a_root_does_so_alone_and_commits_that_wait_are_published(tmp_path: Path) -> None:
    class Staged(PassedOn):
        settled = 0

        def stage(self, key: str, pieces: Iterable[Buffer]) -> str:
            return ""

        def publish(self, receipts: Any, *, gone: Iterable[str] = ()) -> None: ...

        def settle(self) -> None:
            self.settled += 1

    staged = Staged(str(tmp_path))
    writer = writer_of(staged)
    writer.settle()
    assert staged.settled == 1
    writer_of(tmp_path).settle()
    writer.lock._guard = entered = Entered(writer.lock._guard)  # type: ignore[assignment]
    writer.hold()
    assert entered.count == 1
    assert writer.unread_newest is None
    writer.close()


def test_a_checkpoint_names_the_processor_or_else_the_kind_of_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_writer, "_processor", lambda: "A processor")
    assert root_writer.device_name() == "A processor"
    monkeypatch.setattr(root_writer, "_processor", lambda: "")
    assert root_writer.device_name() == platform.machine()


@pytest.mark.parametrize(
    ("held", "files", "present", "refused"),
    [
        (None, ["random_states_0.pkl"], [], ""),
        ({}, ["random_states_0.pkl"], [], "root"),
        ({"is_empty": True}, ["random_states_0.pkl"], [], ""),
        ({"committed": ["a"]}, ["random_states_0.pkl"], [], ""),
        ({}, ["notes.txt"], [], ""),
        (None, ["x/random_states_0.pkl"], [], ""),
        (None, ["x/random_states_0.pkl"], ["random_states_0.pkl"], "root/x"),
        (None, ["x/notes.txt"], ["notes.txt"], ""),
        ({"is_empty": True}, ["x/random_states_0.pkl"], ["random_states_0.pkl"], "root/x"),
    ],
)
def test_nothing_is_saved_into_what_accelerate_wrote(held: Any, files: Any, present: Any, refused: str) -> None:
    storage = MemoryStorage(f"foreign-{id(files)}/root")
    for path in files:
        storage.write(path, [b"x"])
    known: Any = None if held is None else SimpleNamespace(**{"is_empty": False, "committed": [], **held})
    if refused:
        with pytest.raises(ckpt.ConfigError, match=f"{refused}, "):
            root_writer.refuse_foreign(storage, "x", known, present)
    else:
        root_writer.refuse_foreign(storage, "x", known, present)


class TestTheAttempt:
    """What a process tells the history of itself."""

    def log(self, steps: list[int]) -> AttemptLog:
        return AttemptLog(lambda: steps[-1], lambda: {"loss": [(1, 0.5)]})

    def stored(self, log: AttemptLog) -> PastAttempt | None:
        storage = MemoryStorage(f"attempt-{next(_numbers)}")
        log.store(History(storage), "run")
        return next(iter(History.of(storage).attempts), None)

    def test_it_begins_where_its_first_load_has_left_it_and_counts_what_later_ones_redo(self) -> None:
        steps, resumed = [0], resumption(manifest_named("a"), 0, {})
        log = self.log(steps)
        steps.append(10)
        log.loaded(0, resumed)
        for before, after in ((14, 12), (13, 13), (13, 20), (25, 22)):
            steps.append(after)
            log.loaded(before, {})
        with log.waiting():
            time.sleep(0.002)
        log.end(None)
        found = self.stored(log)
        assert found is not None
        assert (found.run, found.first, found.last, found.redone) == ("run", 10, 22, 5)
        assert (found.resumed, found.ended, found.reason) == (resumed, "finished", "")
        assert found.metrics == {"loss": [(1, 0.5)]}
        assert 0.002 <= found.seconds["waited"] <= found.seconds["total"]
        assert 0 <= found.seconds["ready"] <= found.seconds["total"]

    @pytest.mark.parametrize(
        ("error", "told", "ended", "reason"),
        [
            (None, None, "finished", ""),
            (SystemExit(0), None, "finished", ""),
            (SystemExit(None), None, "finished", ""),
            (SystemExit(3), None, "failed", "SystemExit: 3"),
            (ValueError(""), None, "failed", "ValueError"),
            (ValueError("too large"), None, "failed", "ValueError: too large"),
            (ValueError("too large"), signal.SIGTERM, "stopped", "SIGTERM"),
        ],
    )
    def test_how_it_ended(
        self, error: BaseException | None, told: signal.Signals | None, ended: str, reason: str
    ) -> None:
        log = self.log([0])
        log.end(error, told)
        assert (log.ended, log.reason) == (ended, reason)

    @pytest.mark.parametrize(
        ("last", "since", "resumed", "error", "is_told"),
        [
            (0, 0, False, None, False),
            (1, 0, False, None, True),
            (0, 1, False, None, True),
            (0, 0, True, None, False),
            (0, 0, False, ValueError(), False),
            (0, 0, True, ValueError(), True),
        ],
    )
    def test_one_in_which_nothing_has_happened_is_not_told(
        self, last: int, since: int, resumed: bool, error: BaseException | None, is_told: bool
    ) -> None:
        steps = [0]
        log = self.log(steps)
        log.loaded(0, resumption(manifest_named("a"), 0, {}) if resumed else {})
        steps.append(last)
        log.since = since
        log.end(error)
        assert (self.stored(log) is not None) == is_told

    def test_a_training_that_is_gone_has_come_as_far_as_it_had(self) -> None:
        steps = [7]
        log = self.log(steps)
        self.stored(log)
        steps.append(0)
        found = self.stored(log)
        assert found is not None
        assert found.last == 7

    def test_one_whose_manager_was_never_closed_has_exited(self) -> None:
        storage = MemoryStorage(f"attempt-{next(_numbers)}")
        far = PassedOn(storage.url)
        far.is_local = False
        cases: list[tuple[Storage, str, bool, str]] = [
            (storage, "", True, "exited"),
            (far, "", True, ""),
            (storage, "finished", True, ""),
            (storage, "", False, ""),
        ]
        for root, ended, is_here, told in cases:
            log = self.log([7])
            log.dropped()  # nothing was ever stored
            log.store(History(root), "run")
            log.ended = ended
            log._owner.is_here = is_here
            log.dropped()
            assert History.of(storage).attempts[-1].ended == told, (root, ended, is_here)

    def test_its_first_checkpoint_is_the_one_that_it_names(self, tmp_path: Path) -> None:
        writer = writer_of(tmp_path, attempt=(log := self.log([7])))
        for name in ("a", "b"):
            save(writer, name)
        assert log.since == 1
        writer.close()
        assert [found.since for found in History.of(writer.storage).attempts] == [1]
