"""The saver and the transaction case by case: what waits, what is told and when, room on the disk, reports of ranks."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.formats.layout import Layout
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, FileRecord, Manifest
from ckpt.formats.native.shard_table import EVERY, ShardedState, ShardSpec, ShardTable
from ckpt.formats.tensors import FilePlan
from ckpt.ranks.consensus import SingleProcess
from ckpt.ranks.hosts import Hosts
from ckpt.root.catalog import History
from ckpt.save import capture as capturing
from ckpt.save import transaction
from ckpt.save.capture import (
    CapturedState,
    ComparisonHistory,
    LiveState,
    StateCapture,
    are_dense,
    sharded_replicas,
)
from ckpt.save.rank_description import outlines_match
from ckpt.save.rank_differences import Held, judge, mistaken_names, refuse_to_mix, unite_parts
from ckpt.save.read_back import CommittedFiles, DiskProblem, Repair, RepairReport, _Reading
from ckpt.save.root_writer import Lineage, Links, RootWriter
from ckpt.save.saver import QueuedSave, SaveQueue, Saver, SaveReport, SaveReports
from ckpt.save.snapshot.snapshots import Snapshot, Snapshots
from ckpt.save.snapshot.tensor_copies import Group, Leaves, TensorCopy
from ckpt.save.transaction import SaveRequest, make_room, merge_reports
from ckpt.state import rng
from ckpt.state.parts import ObjectPart
from ckpt.storage import Buffer, open_storage
from tests.helpers.byte_checkpoints import MOMENT, save
from tests.helpers.places import Folder, PassedOn
from tests.helpers.processes import DEADLINE


def report(name: str = "a") -> SaveReport:
    made = Manifest(
        name=name, id=name, sequence=1, created=MOMENT, run="run", files=(), metrics={"loss": 1.0},
        progress={"step": 4}, seconds={"blocked": 0.5, "total": 2.0},
    )  # fmt: skip
    return SaveReport.of(made, "root", 7, None, (3, 1.5))


class TestReports:
    def test_one_says_what_the_manifest_says(self) -> None:
        found = report()
        assert (found.name, found.url, found.step, found.size, found.linked) == ("a", "root/a", 4, 0, 7)
        assert (found.blocked, found.durable, found.mirrored, found.metrics) == (0.5, 2.0, None, {"loss": 1.0})
        assert (found.slowest_rank, found.slowest) == (3, 1.5)

    def test_all_callbacks_get_all_reports_whatever_one_raises(self, caplog: pytest.LogCaptureFixture) -> None:
        reports, got = SaveReports(), list[tuple[str, bool | None]]()
        reports.add("a", report())  # nobody listens
        reports.deliver()

        def fails(found: SaveReport) -> None:
            raise ValueError("no")

        reports.callbacks += [fails, lambda found: got.append((found.name, found.mirrored))]
        reports.mirrored("a")
        reports.add("b", report("b"))
        reports.add("c", report("c"))
        reports.mirrored("b")
        reports.mirrored("b")
        reports.mirrored("x")
        assert got == []
        reports.deliver()
        reports.deliver()
        assert got == [("b", None), ("c", None), ("b", True)]
        assert caplog.text.count("failed for b: ValueError: no") == 2

    def test_those_that_the_mirror_may_copy_are_remembered_up_to_a_number(self) -> None:
        reports, got = SaveReports(), list[str]()
        reports.callbacks.append(lambda found: got.append(found.name) if found.mirrored else None)
        for number in range(102):
            reports.add(f"{number}", report(f"{number}"))
        for number in (0, 1, 2, 101):
            reports.mirrored(f"{number}")
        reports.deliver()
        assert got == ["2", "101"]


def until_idle(queue: SaveQueue | Saver) -> None:
    while queue.busy:
        threading.Event().wait(0.001)


class TestTheQueue:
    def test_a_failure_is_raised_once_and_does_not_keep_what_waits_from_being_run(self) -> None:
        queue, ran, go_on = SaveQueue(), list[str](), threading.Event()
        assert queue.withdraw() is None

        def fail() -> None:
            assert go_on.wait(DEADLINE)
            raise ckpt.FullError("full")

        def fail_too() -> None:
            ran.append("second")
            raise ckpt.StorageError("another")

        queue.add(QueuedSave("first", fail, lambda: None))
        queue.check()
        queue.add(QueuedSave("second", fail_too, lambda: None))
        go_on.set()
        with pytest.raises(ckpt.FullError):
            queue.wait()
        assert ran == ["second"]
        queue.wait()
        queue.check()
        queue.add(QueuedSave("third", lambda: ran.append("third"), lambda: None))
        queue.wait()
        assert ran == ["second", "third"]

    @pytest.mark.parametrize("ask", ["wait", "check"])
    def test_what_was_put_back_behind_a_failure_is_run_and_the_failure_told_later(self, ask: str) -> None:
        queue, ran = SaveQueue(), list[str]()

        def fail() -> None:
            raise ckpt.FullError("full")

        queue.add(QueuedSave("first", fail, lambda: None))
        until_idle(queue)
        queue.restore(QueuedSave("second", lambda: ran.append("second"), lambda: None))
        until_idle(queue)
        assert ran == ["second"]
        with pytest.raises(ckpt.FullError):
            getattr(queue, ask)()
        getattr(queue, ask)()

    def test_who_changes_it_has_its_lock(self) -> None:
        queue = SaveQueue()
        counted = Counted(queue._turn)
        queue._turn = counted  # type: ignore[assignment]
        queue.restore(QueuedSave("a", lambda: None, lambda: None))
        queue.wait()
        assert counted.count == 2  # and the end of the thread
        queue.withdraw()
        assert counted.count == 3
        queue.add(QueuedSave("a", lambda: None, lambda: None))
        queue.wait()
        assert counted.count == 5


class Counted:
    """A condition that counts who has it."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.count = inner, 0

    def __enter__(self) -> Any:
        self.count += 1
        return self.inner.__enter__()

    def __exit__(self, *args: Any) -> None:
        self.inner.__exit__(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Working(SingleProcess):
    """A rank that notes when it says that it is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.at_work = 0

    def channel(self, name: str) -> Working:
        return self

    @contextmanager
    def working(self, *, job_wide: bool = False) -> Iterator[None]:
        self.at_work += 1
        yield
        self.at_work -= 1


def request(
    name: str = "a",
    do: Any = lambda: None,
    ranks: Any = None,
    *,
    check_room: bool = False,
    values: Sequence[torch.Tensor] = (torch.ones(3),),
) -> SaveRequest:
    class Value:
        def state_dict(self) -> dict[str, Any]:
            do()
            return {"value": values[-1]}

        def load_state_dict(self, state: Any) -> None: ...

    state = {"rng": rng.capture(), "generators": {}, "loaders": {}}
    capture = StateCapture(ranks or SingleProcess())
    facts = {"progress": {"step": 1}, "metrics": {}}
    return SaveRequest(name, lambda: capture.capture([ObjectPart("x", Value())], {}, state), facts, check_room)


class TestTheSaver:
    def test_a_new_one_has_done_nothing(self, tmp_path: Path) -> None:
        saver = Saver(RootWriter(open_storage(tmp_path), SingleProcess()))
        assert (saver.has_saved, saver.has_news, saver.has_prefaulted, saver.busy) == (False, False, False, False)
        assert saver.reports.callbacks == []
        saver.close()

    @pytest.mark.parametrize("wait", [True, False])
    def test_while_it_writes_others_are_told_that_it_is_at_work(self, tmp_path: Path, wait: bool) -> None:
        ranks, seen = Working(), list[bool]()
        saver = Saver(RootWriter(storage := open_storage(tmp_path), ranks))
        write = storage.write

        def noted(key: str, pieces: Any, **options: Any) -> None:
            seen.append(ranks.at_work > 0)
            write(key, pieces, **options)

        storage.write = noted  # type: ignore[method-assign]
        saver.save(request(ranks=ranks), wait=wait)
        assert (saver.has_saved, saver.has_news) == (True, not wait)
        saver.wait()
        assert set(seen) == {True}
        assert ranks.at_work == 0
        saver.tell(errors=True)
        assert not saver.has_news
        saver.close()

    def test_news_of_a_failed_save_are_told_once_if_errors_are_wanted(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        saver = Saver(RootWriter(storage := open_storage(tmp_path), SingleProcess()))
        got: list[str] = []
        saver.reports.callbacks.append(lambda found: got.append(found.name))
        saver.save(request("good"), wait=False)
        saver.wait()
        assert got == ["good"]

        def full(*args: Any, **options: Any) -> None:
            raise ckpt.FullError("full.")

        write, storage.write = storage.write, full  # type: ignore[method-assign]
        saver.save(request("bad"), wait=False)
        until_idle(saver)
        saver.tell(errors=False)
        with pytest.raises(ckpt.FullError):
            saver.tell(errors=True)
        saver.tell(errors=True)
        assert f"{tmp_path}/bad was not saved: full." in caplog.text
        storage.write = write  # type: ignore[method-assign]
        with pytest.raises(ckpt.UnsupportedError):
            saver.save(request("odd", do=lambda: 1 / 0), wait=True)
        saver.save(request("last"), wait=True)
        assert got == ["good", "last"]
        saver.close()
        assert [found.name for found in ckpt.list_checkpoints(tmp_path)] == ["last", "good"]
        assert not (tmp_path / "bad").exists()

    def test_memory_is_prefaulted_once_and_loads_pause_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saver, asked, paused = Saver(RootWriter(open_storage(tmp_path), SingleProcess())), list[Any](), list[str]()
        monkeypatch.setattr(
            saver.snapshots, "prefault", lambda tensors, *, for_devices_only: asked.append(for_devices_only)
        )

        @contextmanager
        def pause() -> Iterator[None]:
            paused.append("yes")
            yield

        monkeypatch.setattr(saver.snapshots, "paused", pause)
        with saver.reading():
            assert paused == []
        for _ in range(2):
            saver.prefault(lambda: [torch.ones(1)], for_devices_only=True)
        assert asked == [True]
        with saver.reading():
            assert paused == ["yes"]
        saver.close()

    def test_what_is_not_kept_is_removed_after_each_save(self, tmp_path: Path) -> None:
        saver = Saver(RootWriter(open_storage(tmp_path), SingleProcess(), keep=ckpt.Keep(last=1)))
        for name in ("a", "b"):
            saver.save(request(name), wait=True)
            assert [found.name for found in ckpt.list_checkpoints(tmp_path)] == [name]
        saver.close()

    def test_what_was_repaired_is_copied_to_the_mirror_again(self, tmp_path: Path) -> None:
        storage: Any = open_storage(tmp_path)
        root, enqueued = RootWriter(storage, SingleProcess()), list[Any]()
        saver = Saver(root)
        saver.save(request(), wait=True)
        read = _Reading(root, storage, CommittedFiles("a", "id", (), {}), frozenset(), always=True)
        read._mirror_again()
        root.mirror = SimpleNamespace(enqueue=enqueued.append)  # type: ignore[assignment]
        read._mirror_again()
        root.mirror = None
        assert [manifest.name for manifest in enqueued] == ["a"]
        saver.close()

    def test_one_that_amends_replaces_a_file_that_is_damaged_on_the_disk(self, tmp_path: Path) -> None:
        saver = Saver(writer := RootWriter(open_storage(tmp_path), SingleProcess()))
        first = request("a", values=[torch.ones(3)])
        saver.save(first, wait=True)
        made = writer.committed_as("a")
        assert made is not None
        (file,) = (file for file in made.files if file.name.startswith("x"))
        path = tmp_path / "a" / file.path
        path.write_bytes(bytes(path.stat().st_size))
        del writer.links.files[file.name]  # as reading back does
        saver.save(replace(first, amends=True), wait=True)
        assert ckpt.verify(tmp_path) == {"a": []}
        saver.close()

    def test_one_that_amends_is_saved_if_anything_has_changed_and_keeps_the_files_that_have_not(
        self, tmp_path: Path
    ) -> None:
        values = [torch.ones(3)]
        saver = Saver(writer := RootWriter(open_storage(tmp_path), SingleProcess()))
        first = request("a", values=values)
        further = {"progress": {"step": 1}, "metrics": {"loss": 0.5}}
        left, seen = set[str](), list[tuple[bool, set[str]]]()
        for each in (
            replace(first, amends=True),  # there is none yet
            replace(first, amends=True),
            replace(first, amends=True, facts=further),
            replace(first, amends=True, facts={**further, "progress": {"step": 2}}),
            replace(first, amends=True, facts=further, capture=request("a", values=[torch.zeros(3)]).capture),
            first,
            first,
        ):
            before = writer.committed_as("a")
            saver.save(each, wait=True)
            made = writer.committed_as("a")
            assert made is not None
            files = {file.path for file in made.files}
            seen.append((before is not None and made.id == before.id, {file.split(".")[0] for file in files - left}))
            left = files
            assert {path.name for path in (tmp_path / "a").iterdir()} == {*files, FILE_NAME, COPY_NAME}
            assert ckpt.verify(tmp_path) == {"a": []}
        new = {"rank-00000", "state", "x"}
        assert seen == [
            (False, new),
            (True, set()),
            (False, set()),
            (False, set()),
            (False, {"x"}),
            (False, new),
            (False, new),
        ]
        saver.close()

    def test_ranks_talk_no_more_than_they_must(self, tmp_path: Path) -> None:
        class Talking(SingleProcess):
            def channel(self, name: str) -> Talking:
                return self

            def gather(self, call: str, data: str) -> list[str]:
                calls.append(call.rpartition("(")[2])
                return super().gather(call, data)

        calls: list[str] = []
        saver = Saver(RootWriter(open_storage(tmp_path), Talking()))
        saver.save(request(), wait=True)
        assert calls == ["'a')", "files written)"]
        calls.clear()
        saver.save(request("b"), wait=False)
        saver.wait()
        assert calls == ["'b')", "files written)"]
        calls.clear()
        saver.save(request("c"), wait=False, replace=True)
        saver.wait()
        assert calls == ["its turn)", "in memory)", "'c')", "files written)"]
        calls.clear()
        saver.save(request("d"), wait=True, replace=True)
        assert calls == ["'d')", "files written)"]
        saver.close()

    def test_while_a_save_is_under_way_nothing_is_released(self, tmp_path: Path) -> None:
        go_on = threading.Event()
        saver = Saver(RootWriter(storage := open_storage(tmp_path), SingleProcess()))
        write, settled = storage.write, list[int]()

        def gated(key: str, pieces: Any, **options: Any) -> None:
            assert go_on.wait(DEADLINE)
            write(key, pieces, **options)

        storage.write = gated  # type: ignore[method-assign]
        saver.root.settle = lambda: settled.append(1)  # type: ignore[method-assign]
        saver.save(request(), wait=False)
        saver.close()
        saver.release_idle()
        go_on.set()
        saver.wait()
        assert settled == [1]
        assert saver.root.held is not None
        saver.close()
        assert ckpt.verify(tmp_path) == {"a": []}

    def test_who_abandons_waits_for_the_save_under_way_for_so_long_and_then_for_no_other_rank(
        self, tmp_path: Path
    ) -> None:
        class Leaving(SingleProcess):
            left = 0

            def channel(self, name: str) -> Leaving:
                return self

            def abandon(self) -> None:
                self.left += 1

        go_on, ranks = threading.Event(), Leaving()
        saver = Saver(RootWriter(storage := open_storage(tmp_path), ranks))
        write = storage.write

        def gated(key: str, pieces: Any, **options: Any) -> None:
            assert go_on.wait(DEADLINE)
            write(key, pieces, **options)

        storage.write = gated  # type: ignore[method-assign]
        saver.abandon(DEADLINE)  # nothing is under way
        assert ranks.left == 1
        saver.save(request(), wait=False)
        saver.abandon(0.0)
        assert (ranks.left, saver.busy) == (2, True)
        opening = threading.Timer(0.05, go_on.set)
        opening.start()
        saver.abandon(DEADLINE)
        assert (ranks.left, saver.busy) == (3, False)
        opening.join()
        saver.close()

    @pytest.mark.parametrize(
        ("saves", "reads", "is_released"), [(True, False, 0), (False, True, 0), (True, True, 0), (False, False, 1)]
    )
    def test_memory_is_given_back_when_nothing_uses_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: bool, reads: bool, is_released: int
    ) -> None:
        saver, released = Saver(RootWriter(open_storage(tmp_path), SingleProcess())), list[int]()
        reading: Any = SimpleNamespace(done=threading.Event(), stop=lambda: None, proven=frozenset())
        saver.read_back._reading = reading
        assert saver.read_back.busy
        if not reads:
            reading.done.set()
        written: Any = SimpleNamespace(release=lambda: released.append(1))
        saver._written = written
        with monkeypatch.context() as patch:
            patch.setattr(Saver, "busy", saves)
            for _ in range(2):
                saver.release_idle()
        assert len(released) == is_released
        saver.close()

    @pytest.mark.parametrize("wait", [True, False])
    def test_a_save_that_is_waited_for_is_published_when_it_returns(self, tmp_path: Path, wait: bool) -> None:
        ranks, at_work = Working(), list[bool]()

        class Staged(PassedOn):
            def __init__(self) -> None:
                super().__init__(Folder(tmp_path))
                self.staged: dict[str, bytes] = {}

            def stage(self, key: str, pieces: Iterable[Buffer]) -> str:
                self.staged[key] = b"".join(pieces)
                return key

            def publish(self, receipts: Mapping[str, str], *, gone: Iterable[str] = ()) -> None:
                for key, receipt in receipts.items():
                    self.inner.write(key, [self.staged[receipt]])

            def settle(self) -> None:
                at_work.append(ranks.at_work > 0)

        saver = Saver(RootWriter(Staged(), ranks))
        saver.save(request(ranks=ranks), wait=wait)
        assert at_work == ([True] if wait else [])
        saver.wait()
        assert at_work == ([True, False] if wait else [False])
        saver.close()
        assert ckpt.verify(tmp_path) == {"a": []}

    def test_a_root_elsewhere_is_released_after_the_save_into_it(self, tmp_path: Path) -> None:
        root = RootWriter(open_storage(tmp_path / "root"), SingleProcess())
        other = RootWriter(open_storage(tmp_path / "other"), SingleProcess())
        saver = Saver(root)
        saver.save(request(), wait=True, root=other)
        assert (root.held, other.held) == (None, None)
        with pytest.raises(ckpt.UnsupportedError):
            saver.save(request("b", do=lambda: 1 / 0), wait=True, root=other)
        assert other.held is None
        assert [found.name for found in ckpt.list_checkpoints(tmp_path / "other")] == ["a"]
        saver.close()


FACTS = {"progress": {"step": 9}, "metrics": {}}


class TestRoomOnTheDisk:
    @pytest.fixture
    def writer(self, tmp_path: Path) -> Iterator[RootWriter]:
        storage = open_storage(tmp_path)
        for number in range(1, 4):
            save(storage, f"s{number}", {"x.bin": os.urandom(8192 * number)}, sequence=number)
        writer = RootWriter(storage, SingleProcess(), keep=ckpt.Keep(last=1))
        writer.hold()
        yield writer
        writer.close()

    def test_only_as_many_are_removed_as_are_needed_the_oldest_first(
        self, writer: RootWriter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        answers = iter([1000, 1000, 5000])
        monkeypatch.setattr(transaction, "_free", lambda path: next(answers))
        with caplog.at_level(logging.INFO, "ckpt"):
            make_room(writer, "s4", FACTS, 5000)
        assert [summary.name for summary in writer.lock.committed] == ["s3", "s2"]
        assert "s1 to make room for s4" in caplog.text
        assert [past.summary.name for past in History.of(writer.storage).saves] == ["s1", "s2", "s3"]

    @pytest.mark.parametrize(("damaged", "left"), [(["s3"], ["s2"]), (["s2", "s3"], ["s1"]), (["s1"], ["s3"])])
    def test_the_newest_that_is_intact_is_no_room(
        self, writer: RootWriter, monkeypatch: pytest.MonkeyPatch, damaged: list[str], left: list[str]
    ) -> None:
        monkeypatch.setattr(transaction, "_free", lambda path: 0)
        writer.damaged.update(damaged)
        make_room(writer, "s4", FACTS, 8192)
        assert [summary.name for summary in writer.lock.committed] == left

    def test_where_none_is_intact_or_all_but_one_are_replaced_nothing_is_removed(
        self, writer: RootWriter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transaction, "_free", lambda path: 0)
        monkeypatch.setattr(transaction, "filesystem_type", lambda path: "ext4")
        writer.damaged.update(["s1", "s2", "s3"])
        with pytest.raises(ckpt.FullError, match=r"is free there\. Nothing"):
            make_room(writer, "s4", FACTS, 8192)
        writer.damaged.clear()
        make_room(writer, "s1", FACTS, 8192)  # what is replaced makes no room before the commit
        assert [summary.name for summary in writer.lock.committed] == ["s3", "s1"]

    def test_the_newest_is_no_room_and_nothing_is_removed_where_it_does_not_suffice(
        self, writer: RootWriter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transaction, "_free", lambda path: 1000)
        monkeypatch.setattr(transaction, "filesystem_type", lambda path: "ext4")
        frees = sum(transaction._own_bytes(Path(writer.storage.url, name)) for name in ("s1", "s2"))
        assert frees >= 3 * 8192
        with pytest.raises(ckpt.FullError, match=r"s4 needs .*, but only 1.0 kB is free there, .* that Keep would"):
            make_room(writer, "s4", FACTS, 1001 + frees)
        assert len(writer.lock.committed) == 3
        make_room(writer, "s4", FACTS, 1000 + frees)
        assert [summary.name for summary in writer.lock.committed] == ["s3"]
        with pytest.raises(ckpt.FullError, match=r"is free there\. Nothing was written"):
            make_room(writer, "s4", FACTS, 1001)
        monkeypatch.setattr(transaction, "filesystem_type", lambda path: "btrfs")
        make_room(writer, "s4", FACTS, 1001)

    def test_where_nothing_is_known_or_all_fits_nothing_is_done(
        self, writer: RootWriter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for free, size in ((None, 9999), (5000, 5000), (0, 0)):
            monkeypatch.setattr(transaction, "_free", lambda path, free=free: free)
            make_room(writer, "s4", FACTS, size)
        monkeypatch.setattr(transaction, "_free", lambda path: 0)
        for other in (
            RootWriter(writer.storage, SingleProcess()),
            RootWriter(open_storage("memory://room"), SingleProcess()),
            RootWriter(open_storage(tmp_path / "other"), SingleProcess(), hosts=Hosts((0, 1), ("x", "y"))),
        ):
            if other.storage is not writer.storage:
                other.hold()
            make_room(other, "s4", FACTS, 5000)
            other.close()
        assert len(writer.lock.committed) == 3
        writer.keep = None
        with pytest.raises(ckpt.FullError):
            make_room(writer, "s4", FACTS, 5000)

    def test_what_is_free_is_what_the_filesystem_says(self, tmp_path: Path) -> None:
        status = os.statvfs(tmp_path)
        found = transaction._free(str(tmp_path))
        assert found is not None
        assert abs(found - status.f_bavail * status.f_frsize) < 1 << 30
        assert transaction._free(str(tmp_path / "none")) is None

    def test_bytes_that_others_link_to_are_not_freed(self, tmp_path: Path) -> None:
        (tmp_path / "a" / "deep").mkdir(parents=True)
        (tmp_path / "a" / "deep" / "own").write_bytes(os.urandom(10_000))
        before = transaction._own_bytes(tmp_path / "a")
        assert before == (tmp_path / "a" / "deep" / "own").stat().st_blocks * 512
        (tmp_path / "a" / "linked").write_bytes(os.urandom(10_000))
        assert transaction._own_bytes(tmp_path / "a") >= before + 10_000
        os.link(tmp_path / "a" / "linked", tmp_path / "other")
        assert transaction._own_bytes(tmp_path / "a") == before


def test_the_reports_of_ranks_are_joined_and_must_agree() -> None:
    def entry(name: str, blocks: tuple[str, ...] = ("x",), **more: Any) -> dict[str, Any]:
        record = FileRecord(name=name, path=name, size=1, blocks=blocks)
        return {"file": {**record.to_json(), "blocks": list(blocks)}, "receipt": None, **more}

    stored = merge_reports([[entry("a"), entry("b", linked=True)], [entry("c")], [entry("a")]])
    assert [(each.file.name, each.linked) for each in stored] == [("a", False), ("b", True), ("c", False)]
    with pytest.raises(ckpt.RanksError, match="files that differ from the main rank's: a on rank 1; b on rank 2"):
        merge_reports([[entry("a"), entry("b")], [entry("a", ("y",))], [entry("a", ("z",)), entry("b", ("y",))]])


def test_devices_are_waited_for_where_live_tensors_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    captured: Any = SimpleNamespace(devices=["cuda:0", "cuda:1"])
    assert transaction._settled(captured) is captured
    assert waited == ["cuda:0", "cuda:1"]


def test_which_differences_are_named() -> None:
    for tensors, values, told in (
        ({"a": [1], "b": [2]}, [], "x (a, b on ranks 1, 2)"),
        ({"a": [1], "b": [1], "c": [1]}, [], "x (a, b, c on rank 1)"),
        ({"a": [1], "b": [1], "c": [1], "d": [1]}, [3], "x (a, b, c, ... on ranks 1, 3)"),
        ({}, [2], "x (values on rank 2)"),
    ):
        assert transaction._described("x", {"tensors": tensors, "values": values}) == told


class TestReplicas:
    def test_which_tensors_of_a_sharded_part_a_rank_keeps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Piece(torch.Tensor):
            """Stands for a shard on a mesh."""

        everywhere, mesh = Layout.replicated(4), Layout((2, 2), (0, 1, 2, 3), ("R", "S0"))
        monkeypatch.setattr(capturing, "is_sharded", lambda tensor: isinstance(tensor, Piece))
        monkeypatch.setattr(capturing, "local_tensor", lambda tensor: tensor)
        tensors = {name: torch.ones(2) for name in ("plain", "mine", "sure")}
        tensors |= {"shard": torch.ones(2).as_subclass(Piece), "far": torch.ones(2)}
        specs = {name: ShardSpec(torch.float32, (2,), everywhere) for name in ("plain", "mine", "sure")}
        specs |= {
            "shard": ShardSpec(torch.float32, (4,), mesh),
            "far": ShardSpec(torch.float32, (2,), Layout.of_one(9)),
        }
        part = ShardedState("M", {}, ShardTable(specs), tensors)
        for rank, gathered, kept in (
            (0, False, {"plain", "shard"}),
            (1, False, {"plain", "shard"}),
            (0, True, set()),
            (1, True, {"plain"}),  # its shard is gathered
            (3, True, {"plain", "shard"}),
        ):
            found = sharded_replicas(part, {"mine"}, lambda name: name != "sure", rank, gathered=gathered)
            assert set(found) == kept, (rank, gathered)
            if "shard" in found:
                assert (found["shard"].shape, found["shard"].offsets) == ((4,), ((rank % 2) * 2,))

    def test_what_is_dense(self) -> None:
        plain = torch.ones(2, 3)
        for tensors, dense in (
            ([], True),
            ([plain, torch.empty(0)], True),
            ([plain, plain.t()], False),
            ([plain.to_sparse()], False),
            ([torch.ones(2, dtype=torch.complex64).conj()], False),
            ([torch.ones(2, dtype=torch.complex64).conj().imag], False),
            ([plain, torch.ones(2, device="meta")], False),
        ):
            assert are_dense(tensors) == dense

    def test_nothing_to_save_is_refused_for_one_rank(self) -> None:
        state = {"rng": rng.capture(), "generators": {}, "loaders": {}}
        with pytest.raises(ckpt.ConfigError, match="there is nothing to save"):
            StateCapture(SingleProcess()).capture([], {}, state)
        StateCapture(SingleProcess()).capture([], {}, {**state, "values": {"a": 1}})
        StateCapture(SingleProcess()).capture([ObjectPart("x", nn.Linear(1, 1))], {}, state)
        StateCapture(SingleProcess()).capture([], {"x": ObjectPart("x", nn.Linear(1, 1))}, state)


def described(tensors: Mapping[str, str | None], **more: Any) -> dict[str, Any]:
    """What a rank says of a model of plain tensors, by their checksums."""
    rows = {name: ["float32", [2], checksum] for name, checksum in tensors.items()}
    part = {"class": "M", "values": "v", "how": "whole", "tensors": rows, "sums": {}, "pieces": {}}
    tree = {name: {"$tensor": name} for name in tensors}
    return {
        "parts": {"model": part}, "tables": {}, "layouts": {}, "kept": {"model": list(tensors)},
        "trees": {"model": tree}, "announced": [], "equal": {"model": []}, "trusted": True, "attended": True, **more,
    }  # fmt: skip


def spread(
    checksum: str | None,
    layout: Layout,
    *,
    kept: bool = True,
    narrow: Layout | None = None,
    written: str = "in pieces",
    copy: int = 0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """What a rank says of a model of one sharded tensor, by the checksum of its shard."""
    table = ShardTable({"w": ShardSpec(dtype, (4,), layout, copy)})
    part = {"class": "M", "values": "v", "how": "spread", "tensors": {}, "sums": {}, "pieces": {"w": checksum}}
    return described(
        {},
        parts={"model": part},
        tables={"model": {"written": written, **table.to_json()}},
        layouts={"model": {"w": narrow.to_json()}} if narrow else {},
        kept={"model": ["w"] if kept else []},
        trees={},
    )


HYBRID = Layout((2, 2), (0, 1, 2, 3), ("R", "S0"))  # ranks 0 and 2 hold the first half, 1 and 3 the second


class TestVerdictsOnShards:
    @pytest.mark.parametrize(
        ("checksums", "options", "own"),
        [
            ("xyxy", {}, ""),
            ("xyzy", {}, "2"),
            ("xyxz", {}, "3"),
            ("xyzy", {"narrow": HYBRID}, "23"),  # a load with another sharding needs the copy of both
            ("xy y", {}, ""),  # one of which nothing is known
            ("xyzy", {"written": "whole"}, "2"),
            ("xyzy", {"copy": 1}, "0"),  # the second copy is written
            ("xyzy", {"copy": EVERY}, ""),  # each writes what it holds
            ("xyzy", {"copy": EVERY, "written": "whole"}, "2"),
        ],
    )
    def test_who_holds_another_copy_saves_its_own(self, checksums: str, options: dict[str, Any], own: str) -> None:
        verdict = judge([spread(each.strip() or None, HYBRID, **options) for each in checksums]).to_json()
        expected = [{"model": {"tensors": ["w"]}} if str(rank) in own else {} for rank in range(4)]
        assert verdict["own"] == expected
        assert (verdict["problems"], verdict["drifted"]) == ([], [])

    def test_what_was_not_kept_has_drifted_from_the_rank_that_writes_it(self) -> None:
        ranks = [spread(each, HYBRID, kept=each != "z", narrow=HYBRID) for each in "xyzz"]
        verdict = judge(ranks).to_json()
        assert verdict["own"] == [{}] * 4
        assert verdict["drifted"] == [
            "model.w: differs between rank 2 and rank 0", "model.w: differs between rank 3 and rank 1"
        ]  # fmt: skip
        kept = [spread(each, HYBRID, kept=rank != 3, narrow=HYBRID) for rank, each in enumerate("xyzy")]
        own = judge(kept).to_json()["own"]
        assert own == [{}, {}, {"model": {"tensors": ["w"]}}, {"model": {"tensors": []}}]

    def test_on_the_ranks_of_one_mesh_a_tensor_has_one_dtype(self) -> None:
        ranks = [spread("x", HYBRID, dtype=torch.float16 if rank == 2 else torch.float32) for rank in range(4)]
        assert set(judge(ranks).to_json()["problems"]) == {
            f"model.w: {text}"
            for text in (
                "float32[4] on rank 0; float16[4] on rank 2",
                "float32[4] on rank 1; float16[4] on rank 2",
                "float16[4] on rank 2; float32[4] on rank 3",
            )
        }
        one, two = Layout((2,), (0, 1), ("S0",)), Layout((2,), (2, 3), ("S0",))
        apart = [
            spread("x", one if rank < 2 else two, dtype=torch.float16 if rank > 1 else torch.float32)
            for rank in range(4)
        ]
        verdict = judge(apart).to_json()
        assert verdict["problems"] == []
        assert verdict["own"] == [{}, {}, {"model": {"tensors": ["w"]}}, {"model": {"tensors": ["w"]}}]

    def test_ways_to_write_a_part_are_not_mixed(self) -> None:
        ranks = [spread("x", HYBRID, written=way) for way in ("in pieces", "whole", "in pieces")]
        ranks.append(described({"w": "x"}))
        with pytest.raises(
            ckpt.RanksError, match="model: in pieces on rank 0, 2; whole on rank 1; whole or not there on rank 3"
        ):
            judge(ranks)


def pipeline(stages: int, ranks: int) -> list[dict[str, Any]]:
    """What the ranks of a pipeline say, each of whose stages is sharded: those of one stage have their table alike."""
    found = []
    for stage in range(stages):
        mine, name = range(stage * ranks, (stage + 1) * ranks), f"layer{stage}"
        spec = ShardSpec(torch.float32, (ranks, 2), Layout((ranks,), tuple(mine), ("S0",)))
        tables = {"model": {**ShardTable({name: spec}).to_json(), "written": "in pieces"}}
        for rank in mine:
            said = described({name: None}, tables=tables)
            part = {"how": "spread", "tensors": {}, "pieces": {name: str(rank)}}
            found.append({**said, "parts": {"model": {**said["parts"]["model"], **part}}})
    return found


class TestVerdicts:
    def test_the_work_for_a_pipeline_grows_with_the_ranks_and_not_with_their_square(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        work: Counter[str] = Counter()
        parse, is_like = ShardTable.from_json, Held.is_like

        def counted_parse(*arguments: Any) -> ShardTable:
            work["tables"] += 1
            return parse(*arguments)

        def counted_is_like(held: Held, other: Held) -> bool:
            work["shards"] += 1
            return is_like(held, other)

        monkeypatch.setattr(ShardTable, "from_json", counted_parse)
        monkeypatch.setattr(Held, "is_like", counted_is_like)
        did = {}
        for ranks in (10, 100):
            work.clear()
            verdict = judge(pipeline(4, ranks))
            assert verdict.to_json()["own"] == [{}] * 4 * ranks
            assert set(verdict.united["model"].table.tensors) == {f"layer{stage}" for stage in range(4)}
            did[ranks] = dict(work)
        assert did[100]["tables"] == did[10]["tables"]  # of stages
        assert did[100]["shards"] == 10 * did[10]["shards"]

    def test_what_differs_is_saved_by_each_that_has_it_otherwise(self) -> None:
        same, other = {"a": "1", "b": "2", "c": None}, {"a": "1", "b": "3", "c": "9"}
        verdict = judge([described(same), described(other), described(same)]).to_json()
        assert verdict["own"] == [{}, {"model": {"tensors": ["b"]}}, {}]
        assert verdict["differs"] == {"model": {"tensors": {"b": [1]}, "values": []}}
        assert (verdict["problems"], verdict["drifted"], verdict["doubted"]) == ([], [], False)
        assert (verdict["attended"], verdict["writes"]) == (True, [{}, {}, {}])

    def test_what_was_not_kept_was_to_be_equal(self) -> None:
        for trusting, news in (((True, True), True), ((True, False), True), ((False, False), False)):
            ranks = [described({"a": str(number)}, kept={}, trusted=trusted) for number, trusted in enumerate(trusting)]
            verdict = judge(ranks).to_json()
            assert verdict["own"] == [{}, {}]
            assert verdict["drifted"] == ["model.a: differs between rank 1 and rank 0"]
            assert verdict["doubted"] is news
            assert bool(verdict["problems"]) == (len(set(trusting)) > 1)

    def test_training_waits_only_if_it_does_on_all_ranks(self) -> None:
        for attended in ((True, True), (True, False), (False, False)):
            ranks = [described({"a": "1"}, attended=each) for each in attended]
            assert judge(ranks).to_json()["attended"] == all(attended)

    def test_parts_and_values_that_only_some_have(self) -> None:
        main, other = described({"a": "1"}, trees={}), described({"a": "1"}, trees={})
        other["parts"]["model"] = {**other["parts"]["model"], "values": "w"}
        other["parts"]["extra"] = {**main["parts"]["model"], "tensors": {}}
        main["parts"]["lost"] = {**main["parts"]["model"], "tensors": {}}
        verdict = judge([main, other]).to_json()
        assert verdict["own"] == [{}, {"model": {"tensors": []}, "extra": {"tensors": []}, "lost": {"absent": True}}]
        assert verdict["differs"] == {key: {"tensors": {}, "values": [1]} for key in ("model", "extra", "lost")}

    def test_parts_are_united_where_all_describe_their_states_and_none_contradicts(self) -> None:
        first, second = described({"a.0": "1", "x": "5"}), described({"a.1": "2", "x": "5"})
        (part,) = unite_parts([first, second]).values()
        assert {name: spec.layout.ranks for name, spec in part.table.tensors.items()} == {
            "a.0": (0,), "a.1": (1,), "x": (0,)
        }  # fmt: skip
        assert (part.others, part.first, part.by_main) == ({}, {"a.0": 0, "x": 0, "a.1": 1}, True)
        assert (part.written_by(0), part.written_by(1)) == (["a.0", "x"], ["a.1"])
        assert unite_parts([first, first]) == {}
        assert unite_parts([first, described({"a.1": "2"}, trees={})]) == {}
        assert unite_parts([first, {**second, "parts": {}}]).keys() == {"model"}
        odd = described({"a.1": "2", "x": "6"})
        (part,) = unite_parts([first, odd]).values()
        assert part.others == {1: ["x"]}
        verdict = judge([first, odd]).to_json()
        assert verdict["own"] == [{}, {"model": {"tensors": ["x"]}}]
        assert verdict["writes"] == [{}, {"model": ["a.1"]}]
        shaped = described({"a.1": "2", "x": "5"})
        shaped["parts"]["model"]["tensors"]["x"][1] = [3]
        (part,) = unite_parts([first, shaped]).values()
        assert part.others == {1: ["x"]}

    def test_which_names_are_mistakes(self) -> None:
        usual = {"body": "1", "tail": "1", "head": "1"}
        for other, more, mistaken in (
            ({"body": "1", "tail": "1", "haed": "1"}, {}, True),
            ({"body": "1", "tail": "1", "haed": "1"}, {"announced": ["model"]}, False),
            ({"body": "1", "tail": "1", "haed": "1"}, {"trees": {}}, False),
            (usual, {}, False),
            ({"body": "1", "tail": "1"}, {}, False),
            ({"body": "1", "tail": "1"}, {"equal": {"model": ["head"]}}, True),
            ({"x": "1", "y": "1", "z": "1"}, {}, False),  # another stage
            ({"body": "1", "x": "1", "y": "1"}, {}, False),
        ):
            lines = mistaken_names([described(usual), described(usual), described(other, **more)])
            assert bool(lines) == mistaken, (other, more)
            if mistaken and "haed" in other:
                assert lines == ["model: haed on rank 2; head on ranks 0, 1"]
        numbered = [described({"body": "1", "e.0.w": "1"}), described({"body": "1", "e.1.w": "1"})]
        assert mistaken_names(numbered) == []
        shaped = described({"body": "1", "tail": "1", "haed": "1"})
        shaped["parts"]["model"]["tensors"]["haed"][1] = [7]
        assert mistaken_names([described(usual), described(usual), shaped]) == []

    def test_refusals_list_problems_before_drift(self) -> None:
        refuse_to_mix([], [])
        with pytest.raises(ckpt.RanksError, match="nothing was saved, because the ranks disagree:\n  p\n  d\n"):
            refuse_to_mix(["p", "p"], ["d"])
        with pytest.raises(ckpt.RanksError, match="drifted apart:\n  d\n"):
            refuse_to_mix([], ["d"])

    def test_outlines_match_where_the_state_is_one_and_every_box_has_one_value(self) -> None:
        for pieces, states, match in (
            (({"b": "1"}, {"b": "1"}), ("s", "s"), True),
            (({"b": "1"}, {"b": "2"}), ("s", "s"), False),
            (({"b": "1"}, {"c": "2"}), ("s", "s"), True),
            (({}, {}), ("s", "t"), False),
        ):
            outlines = [{"state": state, "pieces": piece} for piece, state in zip(pieces, states, strict=True)]
            assert outlines_match(outlines) == match


def test_memory_that_was_to_be_read_back_is_freed() -> None:
    record = FileRecord(name="x", path="p", size=3, blocks=())
    files = CommittedFiles("a", "id", (record, record), {"x": FilePlan.of("x", b"123")})
    assert (files.size, files.key(record)) == (6, "a/p")
    files.free_memory()
    assert files.in_memory == {}


class TestAdvice:
    def advice(self, root: Any, repair: Repair, storage: Any, *, shared: bool = False) -> str:
        record = FileRecord(name="x", path="x", size=0, blocks=())
        files = CommittedFiles("a", "id", (record,), {})
        return RepairReport(storage, files, record, shared)._advice(repair, root)

    def test_it_depends_on_what_a_resume_will_find(self, tmp_path: Path) -> None:
        storage: Any = open_storage(tmp_path)
        damaged, unread = Repair("x", is_damage=True), Repair("x")
        save(storage, "a")
        away = SimpleNamespace(newest=None)
        mirrored = SimpleNamespace(newest="b")
        skips, none, stops = "A resume skips", "No other checkpoint is known", "A resume that reaches"
        for mirror, known_damaged, repair, told in (
            (None, set(), damaged, none),
            (away, set(), damaged, none),
            (mirrored, set(), damaged, skips),
            (None, set(), unread, stops),
            (mirrored, set(), unread, stops),
        ):
            root = SimpleNamespace(mirror=mirror, damaged=known_damaged)
            assert self.advice(root, repair, storage).startswith(told)
        assert self.advice(None, damaged, storage).startswith(none)
        save(storage, "b")
        assert self.advice(None, damaged, storage).startswith(skips)
        assert self.advice(SimpleNamespace(mirror=None, damaged={"b"}), damaged, storage).startswith(none)

    def test_what_is_said_of_a_repair(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        storage: Any = open_storage(tmp_path)
        save(storage, "a", {"x": b"1"})
        record = FileRecord(name="x", path="x", size=1, blocks=())
        files = CommittedFiles("a", "id", (record,), {"x": FilePlan.of("x", b"1")})
        for repair, level, told in (
            (Repair(), "WARNING", "a/x again, and it is intact now"),
            (Repair("no time", is_unproven=True), "WARNING", "a/x again, but has not read it back: no time."),
            (Repair("no room", is_damage=True), "ERROR", "/a/x: no room."),
        ):
            for is_shared in (False, True):
                caplog.clear()
                shown = RepairReport.begin(storage, files, record, DiskProblem("bits differ", is_damage=True))
                shown.end(repair, None)
                first, second = caplog.records
                assert (first.levelname, second.levelname) == ("ERROR", level)
                assert f"does not return what ckpt wrote to {storage.url}/a: bits differ." in first.message
                assert told in second.message
                assert ("Older checkpoints share the file" in second.message) == is_shared
                if not is_shared:
                    os.link(tmp_path / "a" / "x", tmp_path / "link")
            (tmp_path / "link").unlink()


def test_what_nobody_has_said() -> None:
    captured = CapturedState(0, {})
    assert (captured.writes_common, captured.trusted, captured.files) == (True, True, [])
    assert (ComparisonHistory().trusted, StateCapture(SingleProcess()).compares) == (True, True)
    assert Repair() == Repair("", is_unproven=False, is_damage=False)
    lineage = Lineage()
    assert (lineage.sequence, lineage.has_resumed, lineage.parent, Links().are_known) == (0, False, None, False)
    assert Snapshot({}).in_host_memory
    assert (Group().size, Leaves({}, {}).are_dense, TensorCopy("", torch.ones(1), 0).is_live) == (0, True, False)
    assert not SaveRequest("a", lambda: LiveState, {}).check_room  # type: ignore[arg-type, return-value]
    root = RootWriter(open_storage("memory://unsaid"), SingleProcess())
    made = transaction.SaveTransaction(
        root,
        Snapshots(),
        SingleProcess(),
        ComparisonHistory(),
        SaveRequest("a", lambda: LiveState, {}),  # type: ignore[arg-type, return-value]
    )
    assert (made.linked, made.attended, made.number, made.detached) == (0, False, 0, False)
    history = ComparisonHistory(reported={"model"})
    history.distrust()
    assert (history.trusted, history.reported) == (False, set())
