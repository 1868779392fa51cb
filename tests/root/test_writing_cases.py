"""Writing and copying case by case: what is hashed and linked, who holds a lock, what a mirror waits for and sends."""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ckpt
from ckpt.errors import (
    AbsentError,
    ConfigError,
    ConflictError,
    DamagedError,
    LockedError,
    MissingError,
    NotDurableError,
    StorageError,
    TransientError,
    UnsupportedError,
)
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, FileRecord, digest, sha256
from ckpt.formats.registry import HF
from ckpt.formats.tensors import FileHashes, FilePlan
from ckpt.root import lock, mirror, write_link_commit
from ckpt.root import open as opening
from ckpt.root.catalog import DAY, MARKER, History, SaveMarker, Summary, find, mark_save
from ckpt.root.deletion import (
    apply_retention,
    remove,
    remove_all,
    set_aside_uncommitted,
    sweep,
    was_cut_off,
)
from ckpt.root.folder import Folder, Place, is_foreign, open_url, single_file
from ckpt.root.lock import lock_root
from ckpt.root.mirror import Copies, MirrorPatience, MirrorWorker, QuietWait, Throttle, progress_of
from ckpt.root.open import open_tiers, parent_instead, refuse_checkpoint, try_out_tiers
from ckpt.root.signing import Seal, Trust, find_signing_key, new_key
from ckpt.root.verify import VerifiedFile
from ckpt.root.write_link_commit import Attempt, EarlierFile, UnsureCommits, WrittenFile, hashed
from ckpt.storage import ANY, Buffer, LocalStorage, MemoryStorage
from tests.helpers.byte_checkpoints import FILES, attempt_at, begin_and_write, is_whole, keys, manifest_of, save
from tests.helpers.places import PassedOn

_numbers = itertools.count()


def new() -> MemoryStorage:
    return MemoryStorage(f"writing-{next(_numbers)}")


@pytest.fixture
def root() -> MemoryStorage:
    return new()


class TestHashing:
    @pytest.mark.parametrize("with_sha256", [False, True])
    @pytest.mark.parametrize("in_memory", [False, True])
    def test_a_record_has_the_hash_of_every_block_and_of_the_head(
        self, monkeypatch: pytest.MonkeyPatch, in_memory: bool, with_sha256: bool
    ) -> None:
        data, opened = bytes(range(200)), list[int]()

        def pieces() -> Iterator[memoryview]:
            opened.append(1)
            return (memoryview(data)[start : start + 70] for start in range(0, 200, 70))

        for threads_from, head, reserved in (
            (1 << 30, 0, None), (1 << 30, 50, None), (100, 50, None), (200, 50, None), (201, 0, None),
            (100, 50, "a file"), (100, 0, "a file"), (201, 50, "a file"),
        ):  # fmt: skip
            monkeypatch.setattr(write_link_commit, "_WORTH_THREADS", threads_from)
            plan = FilePlan("x", 200, pieces, head=head, in_memory=in_memory, reserved=reserved if in_memory else None)
            sizes: list[float] = []
            opened.clear()
            record = hashed(plan, "x.path", sizes.append, sha256=with_sha256)
            assert (record.name, record.path, record.size) == ("x", "x.path", 200)
            assert record.blocks == (digest(data),)
            assert record.sha256 == ((sha256(data),) if with_sha256 else ())
            assert record.head == ((50, digest(data[:50])) if head else None)
            assert record.head_sha256 == (sha256(data[:50]) if head and with_sha256 else "")
            assert sum(sizes) == 200
            assert in_memory or opened == [1]  # ranks send the pieces of a stream once

    @pytest.mark.parametrize("with_sha256", [False, True])
    @pytest.mark.parametrize("in_memory", [False, True])
    @pytest.mark.parametrize("head", [0, 50])
    def test_what_a_device_has_hashed_is_hashed_again_by_sha256_alone(
        self, monkeypatch: pytest.MonkeyPatch, in_memory: bool, with_sha256: bool, head: int
    ) -> None:
        monkeypatch.setattr(write_link_commit, "BLOCK_SIZE", 100)  # as if there were work for two threads
        data, opened, sizes = bytes(range(200)), list[int](), list[float]()

        def pieces() -> Iterator[memoryview]:
            opened.append(1)
            return iter([memoryview(data)])

        known = FileHashes(("the device's",), "the device's too")
        plan = FilePlan("x", 200, pieces, head=head, in_memory=in_memory, hashes=known)
        assert hashed(plan, "x.path", sizes.append, sha256=with_sha256) == FileRecord(
            name="x",
            path="x.path",
            size=200,
            blocks=known.blocks,
            head=(head, known.head) if head else None,
            sha256=(sha256(data),) if with_sha256 else (),
            head_sha256=sha256(data[:head]) if head and with_sha256 else "",
        )
        assert sizes == ([200] if in_memory else [])
        assert in_memory or len(opened) == with_sha256 * (1 + bool(head))

    def test_after_a_failure_no_thread_reads_the_memory_any_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ended: list[int] = []

        def digests(pieces: Iterator[memoryview], first: int, step: int, new: object) -> dict[int, str]:
            if first == 0:
                raise StorageError("no")
            time.sleep(0.1)
            ended.append(first)
            return {}

        monkeypatch.setattr(write_link_commit, "digests_of_every", digests)
        monkeypatch.setattr(write_link_commit, "BLOCK_SIZE", 100)
        monkeypatch.setattr(write_link_commit, "_WORTH_THREADS", 100)
        plan = FilePlan("x", 200, lambda: iter([memoryview(bytes(200))]), in_memory=True, reserved="a file")
        with pytest.raises(StorageError, match="no"):
            hashed(plan, "x", lambda size: None)
        assert ended == [1]

    def test_an_empty_file_has_no_blocks(self) -> None:
        record = hashed(FilePlan.of("x", b""), "x", lambda size: None, sha256=True)
        assert (record.size, record.blocks, record.sha256, record.head) == (0, (), (), None)


@pytest.fixture
def advanced(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """By how much the progress bar was advanced."""
    sizes = list[float]()

    def bar(text: str, total: float, *, in_bytes: bool, show: bool) -> AbstractContextManager[Callable[[float], None]]:
        assert (in_bytes, show) == (True, False)
        return nullcontext(sizes.append)

    monkeypatch.setattr(write_link_commit, "progress_bar", bar)
    return sizes


class TestLinking:
    def plan(self, data: bytes = b"weights", *, unchanged: bool = True) -> FilePlan:
        return replace(FilePlan.of("x", data), likely_unchanged=unchanged)

    def test_a_file_is_linked_if_it_is_said_to_be_unchanged_and_is(
        self, root: MemoryStorage, advanced: list[float]
    ) -> None:
        first = Attempt("a")
        first.begin(root, ["x"])
        (written,) = first.write(root, [self.plan()], {})
        assert not written.linked
        earlier = {"x": EarlierFile("a", written.file)}
        links: list[tuple[str, str]] = []

        class Noted(PassedOn):
            def link(self, source: str, target: str) -> None:
                links.append((source, target))
                super().link(source, target)

        noted, same = Noted(root.url), FileHashes(written.file.blocks, "")
        for number, (plan, known, linked) in enumerate(
            (
                (self.plan(), earlier, True),
                (replace(self.plan(unchanged=False), hashes=same), earlier, True),
                (self.plan(unchanged=False), earlier, False),
                (self.plan(b"another"), earlier, False),
                (self.plan(b"longer than it"), earlier, False),
                (self.plan(), {}, False),
            )
        ):
            links.clear()
            advanced.clear()
            attempt = Attempt(f"n{number}")
            attempt.begin(noted, ["x"])
            (made,) = attempt.write(noted, [plan], known)
            assert made.linked == linked, number
            assert links == ([("a/x", f"n{number}/x")] if linked else [])
            assert sum(advanced) == plan.size
            assert root.read(f"n{number}/x") == b"".join(plan.pieces())
            assert made.file.blocks == (digest(root.read(f"n{number}/x")),)

    def test_one_that_nobody_has_read_is_read_first_and_written_where_it_is_damaged_or_gone(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = Attempt("a")
        first.begin(root, ["x"])
        (written,) = first.write(root, [self.plan()], {})
        unread = {"x": EarlierFile("a", written.file, was_read=False)}
        for name, harm, linked in (("b", None, True), ("c", b"weightx", False), ("d", b"", False)):
            if harm is not None:
                root.write("a/x", [harm])
            attempt = Attempt(name)
            attempt.begin(root, ["x"])
            (made,) = attempt.write(root, [self.plan()], unread)
            assert made.linked == linked
            assert root.read(f"{name}/x") == b"weights"
        assert caplog.text.count("again, because the earlier file is not intact") == 2
        root.delete(["a/x"])
        attempt = Attempt("e")
        attempt.begin(root, ["x"])
        (made,) = attempt.write(root, [self.plan()], {"x": EarlierFile("a", written.file)})
        assert (made.linked, root.read("e/x")) == (False, b"weights")

    def test_of_a_checkpoint_that_is_amended_what_is_the_same_stays_where_it_is(
        self, root: MemoryStorage, advanced: list[float]
    ) -> None:
        opened: list[str] = []

        def gathered(path: str, data: bytes) -> FilePlan:  # as of tensors that all ranks send, together and once
            def pieces() -> Iterator[memoryview]:
                opened.append(path)
                yield memoryview(data)

            return FilePlan(path, len(data), pieces)

        other, first = Attempt("b"), Attempt("a")
        other.begin(root, ["w"])
        first.begin(root, ["v", "x", "y", "z"])
        written = first.write(root, [FilePlan.of(path, path.encode()) for path in "vxyz"], {})
        earlier = {each.file.name: EarlierFile("a", each.file) for each in written}
        (elsewhere,) = other.write(root, [FilePlan.of("w", b"w")], {})
        earlier["w"] = EarlierFile("b", elsewhere.file)
        again = Attempt("a", amends=True, occupied_paths=tuple("vxyz"), replaces=tuple("vxyz"))
        again.begin(root, list("vwxyz"))
        advanced.clear()
        found = again.write(
            root,
            [
                gathered("v", b"V"),
                replace(FilePlan.of("w", b"w"), likely_unchanged=True),
                replace(FilePlan.of("x", b"x"), contents=None),
                FilePlan.of("y", b"Y"),
                gathered("z", b"z"),
            ],
            earlier,
        )
        assert [(each.file.name, each.file.path == each.file.name, each.linked) for each in found] == [
            ("v", False, False),
            ("w", True, True),
            ("x", True, True),
            ("y", False, False),
            ("z", True, True),
        ]
        assert opened == ["v", "z"]
        assert sum(advanced) == 5
        moved = {first.path_for(path) for path in "vyz"} | {again.path_for(path) for path in "vyz"}
        assert keys(root, "a") == {f"a/{path}" for path in (*moved, "w", "x", MARKER)}  # x was not written in vain
        again.commit(root, manifest_of(again, found), {})
        stayed = {each.file.path for each in found}
        assert keys(root, "a") == {f"a/{path}" for path in (*stayed, FILE_NAME, COPY_NAME)}

    def test_a_link_that_may_not_be_durable_fails_the_save(self, root: MemoryStorage) -> None:
        class Fails(PassedOn):
            def link(self, source: str, target: str) -> None:
                raise NotDurableError("fsync failed.")

        first = Attempt("a")
        first.begin(root, ["x"])
        (written,) = first.write(root, [self.plan()], {})
        with pytest.raises(StorageError, match="fsync failed") as raised:
            Attempt("b").write(Fails(root.url), [self.plan()], {"x": EarlierFile("a", written.file)})
        assert not isinstance(raised.value, NotDurableError)

    def test_occupied_paths_get_the_attempts_id(self) -> None:
        attempt = Attempt("a", occupied_paths=("x.json", "m/0.safetensors"), id="0123456789")
        for path, to in (
            ("x.json", "x.01234567.json"), ("m/0.safetensors", "m/0.01234567.safetensors"), ("y.json", "y.json")
        ):  # fmt: skip
            assert attempt.path_for(path) == to

    @pytest.mark.parametrize("size", [100, 5 << 20])
    def test_files_are_written_over_nothing_and_streams_are_closed(
        self, root: MemoryStorage, size: int, advanced: list[float]
    ) -> None:
        data, closed = os.urandom(size), list[int]()

        def stream() -> Any:
            try:
                yield memoryview(data)[:10]
                yield memoryview(data)[10:]
            finally:
                closed.append(1)

        attempt = Attempt("a", sha256=True)
        plans = [FilePlan.of("memory.bin", data), FilePlan("stream.bin", size, stream, head=7)]
        memory, streamed = attempt.write(root, plans, {})
        assert closed == [1]
        assert memory.file.blocks == streamed.file.blocks
        assert memory.file.sha256 == streamed.file.sha256 != ()
        assert (streamed.file.head, memory.receipt) == ((7, digest(data[:7])), None)
        assert sum(advanced) == 2 * size
        for plan in plans:
            with pytest.raises(ConflictError):
                attempt.write(root, [plan], {})
        assert closed == [1, 1]

    def test_what_a_device_has_hashed_and_streams_is_hashed_again_by_sha256_alone(self, root: MemoryStorage) -> None:
        known = FileHashes(("the device's",), "the device's too")
        plan = FilePlan("x", 7, lambda: iter([memoryview(b"weights")]), head=3, hashes=known)
        for number, with_sha256 in enumerate((False, True)):
            (made,) = Attempt(f"a{number}", sha256=with_sha256).write(root, [plan], {})
            blocks = (digest(b"weights"),) if with_sha256 else known.blocks
            assert (made.file.blocks, bool(made.file.sha256)) == (blocks, with_sha256)


class TestCommits:
    def test_what_cannot_be_written_beside_the_manifest_is_no_error(self, root: MemoryStorage) -> None:
        class NoCopy(PassedOn):
            fails = ""

            def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> str | None:  # type: ignore[override]
                if key.endswith(self.fails or "none"):
                    raise StorageError("no room")
                return self.inner.write(key, pieces, over=over)

        storage = NoCopy(root.url)
        attempt = attempt_at(storage, "a")
        written = begin_and_write(storage, attempt)
        storage.fails = COPY_NAME
        attempt.commit(storage, manifest_of(attempt, written), {})
        assert f"a/{COPY_NAME}" not in keys(root)
        assert f"a/{MARKER}" not in keys(root)
        found = find(root, "a").manifest
        assert found is not None
        assert is_whole(root, found)

    def test_the_copy_of_what_is_replaced_is_gone_before_the_commit(self, root: MemoryStorage) -> None:
        seen: list[bool] = []

        class Seen(PassedOn):
            def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
                if key.endswith(f"/{FILE_NAME}"):
                    seen.append(f"a/{COPY_NAME}" in keys(root))
                super().write(key, pieces, over=over)

        save(Seen(root.url), "a")
        save(Seen(root.url), "a", sequence=2)
        assert seen == [False, False]
        assert f"a/{COPY_NAME}" in keys(root)

    def test_unsure_commits_are_asked_about_once(self, root: MemoryStorage) -> None:
        unsure, there = UnsureCommits(), save(root, "a")
        gone = replace(there, name="b")
        unsure.add(there)
        unsure.add(gone)
        assert ("a" in unsure, "b" in unsure, "c" in unsure) == (True, True, False)
        assert list(unsure.settle(root)) == [there]
        assert ("a" in unsure, "b" in unsure) == (False, False)
        unsure.add(replace(there, id="another"))
        assert list(unsure.settle(root)) == []


class Held(PassedOn):
    """A root whose lock somebody has, for some tries."""

    def __init__(self, url: str, note: str, tries: int) -> None:
        super().__init__(url)
        self.note, self.left = note, tries

    def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
        assert (key, shared) == (".lock", False)
        self.left -= 1
        if self.left >= 0:
            raise LockedError(f"held by {self.note}")
        self.note = note
        return super().lock(key, shared=shared, note=note)


class TestTheLock:
    def test_a_run_waits_for_a_prune_and_for_nobody_else(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lock, "_PAUSE", 0.0)
        for note, waits in (("ckpt prune, process 7", True), ("process 7", False)):
            held = Held(root.url, note, 3)
            with ExitStack() as stack:
                if waits:
                    lock_root(held, stack)
                    assert held.left == -1
                    assert held.note.startswith(f"process {os.getpid()} on ")
                else:
                    with pytest.raises(
                        LockedError, match=r"another run writes to .* Wait until it ends or stop it, or"
                    ):
                        lock_root(held, stack)
                    assert held.left == 2
        monkeypatch.setattr(lock, "_PATIENCE", -1.0)
        with ExitStack() as stack, pytest.raises(LockedError, match="ckpt prune"):
            lock_root(held := Held(root.url, "ckpt prune, process 7", 3), stack)
        assert held.left == 2

    def test_a_prune_says_so_and_waits_for_nobody(self, root: MemoryStorage) -> None:
        with ExitStack() as stack:
            lock_root(held := Held(root.url, "", 0), stack, to_prune=True)
            assert held.note.startswith(f"ckpt prune, process {os.getpid()}")
        held = Held(root.url, "ckpt prune, process 7", 1)
        with ExitStack() as stack, pytest.raises(LockedError):
            lock_root(held, stack, to_prune=True)
        assert held.left == 0

    def test_managers_of_this_process_that_nobody_uses_give_it_up(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        collected: list[int] = []
        monkeypatch.setattr(lock, "_collect_managers", lambda: collected.append(1))
        here = f"process {os.getpid()} on {socket.gethostname()}, since now."
        with ExitStack() as stack:
            lock_root(Held(root.url, here, 1), stack)
        assert collected == [1]
        with (
            ExitStack() as stack,
            pytest.raises(LockedError, match=r"That is a StateManager of this process: close\(\)"),
        ):
            lock_root(Held(root.url, here, 9), stack)
        assert collected == [1, 1]
        with ExitStack() as stack, pytest.raises(LockedError):
            lock_root(Held(root.url, here, 9), stack, to_prune=True)
        assert collected == [1, 1]


class Call:
    """A call that ends after some looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.waited: list[float] = []

    def done_within(self, seconds: float) -> bool:
        self.waited.append(seconds)
        self.looks -= 1
        return self.looks < 0


class TestPatience:
    def test_a_call_is_waited_for_while_there_is_progress(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = itertools.count(0.0, 1.0)
        monkeypatch.setattr(mirror, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        steps = itertools.count()
        assert QuietWait(lambda: next(steps), 3.0).ended(Call(50))
        assert not QuietWait(lambda: 0, 5.0).ended(Call(50))
        assert QuietWait(lambda: 0, 500.0).ended(Call(50))
        assert not QuietWait(lambda: next(steps), 500.0, end_by=next(clock) + 10).ended(Call(50))
        call = Call(0)
        assert QuietWait(lambda: 0, 500.0).ended(call)
        assert call.waited == [mirror._TICK]

    def test_the_start_waits_so_long_for_all_calls_together_until_one_succeeds(self, root: MemoryStorage) -> None:
        patience = MirrorPatience(at_start=5.0)
        assert (patience.left_at_start, patience.is_away) == (5.0, False)
        patience.note_away(3.0)
        assert (patience.left_at_start, patience.is_away) == (2.0, True)
        patience.note_away(3.0)
        assert patience.left_at_start == 1.0
        assert MirrorPatience(at_start=0.5).left_at_start == 0.5
        far = PassedOn(root.url)
        far.is_local = False
        assert patience.reached(far, lambda: 7) == 7
        assert (patience.left_at_start, patience.is_away) == (5.0, False)

        def fails() -> None:
            time.sleep(0.01)
            raise TransientError("away")

        with pytest.raises(TransientError, match="away"):
            patience.reached(far, fails)
        assert patience.is_away
        patience = MirrorPatience()
        with pytest.raises(TransientError, match="away"):
            patience.reached(root, fails)
        assert not patience.is_away  # a local one has no server

    def test_a_call_that_gives_no_sign_is_given_up(self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mirror, "_TO_END", 0.0)
        far, ends = PassedOn(root.url), threading.Event()
        far.is_local = False
        patience = MirrorPatience(at_start=0.01)
        with pytest.raises(TransientError, match=r"has not answered for 0\.01 s"):
            patience.reached(far, lambda: ends.wait(20))
        ends.set()
        assert patience.is_away

    def test_its_requests_are_ended_where_the_storage_can_do_that(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ends = threading.Event()

        class Ends(PassedOn):
            progress = 5

            @contextmanager
            def giving_up(self) -> Iterator[None]:
                ends.set()
                yield

        far = Ends(root.url)
        far.is_local = False
        assert progress_of(far) == 5
        with pytest.raises(TransientError, match="has not answered"):
            MirrorPatience(at_start=0.01).reached(far, lambda: ends.wait(20))
        assert ends.is_set()

    def test_told_to_terminate_it_waits_no_longer_than_that_allows(self) -> None:
        patience = MirrorPatience()
        patience.hurry(None)
        assert (patience.at_end, patience.end_by) == (mirror.AFTER_SIGTERM, None)
        patience.hurry(10.0)
        assert 0 < (patience.end_by or 0.0) - time.monotonic() <= 10.0
        short = MirrorPatience(at_end=1.0)
        short.hurry(None)
        assert short.at_end == 1.0


class TestCopies:
    def test_a_checkpoint_is_copied_once_verified_and_what_is_alike_is_linked(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        target, links = new(), list[str]()

        class Noted(PassedOn):
            def link(self, source: str, to: str) -> None:
                links.append(to)
                super().link(source, to)

        copies = Copies(root, noted := Noted(target.url))
        first, second = save(root, "a"), save(root, "b", {**FILES, "state.json": b"[]"}, sequence=2)
        assert not copies.is_free("a")
        copies.open_target([])
        copies.open_target([])
        assert (copies.is_free("a"), copies.newest, copies.was_listed) == (True, None, True)
        copies.reserve("a")
        assert not copies.is_free("a")
        with caplog.at_level(logging.DEBUG, "ckpt"):
            copies.copy(first)
            copies.copy(first)
            copies.copy(second)
        assert caplog.text.count("copied a to") == 1
        assert links == ["b/model.safetensors"]
        assert is_whole(target, first)
        assert is_whole(target, second)
        newest = copies.newest
        assert newest is not None
        assert newest.name == "b"
        with ExitStack() as stack, pytest.raises(LockedError):
            lock_root(target, stack)
        copies.close()
        with ExitStack() as stack:
            lock_root(target, stack)
        copies.open_target([])
        assert not copies.is_free("b")
        replaced = save(root, "a", {"state.json": b"[7]"}, sequence=3)
        copies.copy(replaced)
        assert is_whole(target, replaced)
        assert keys(target, "a") == keys(root, "a")
        assert progress_of(noted) == 0
        copies.close()

    def test_damage_in_the_source_is_not_copied_and_retention_is_applied_after_a_copy(
        self, root: MemoryStorage
    ) -> None:
        target = new()
        copies = Copies(root, target, keep=ckpt.Keep(last=1))
        for number, name in enumerate(("a", "b", "c")):
            made = save(root, name, {"state.json": f"{number}".encode()}, sequence=number)
            if name == "b":
                root.write("b/state.json", [b"x"])
            copies.open_target([])
            if name == "b":
                with pytest.raises(DamagedError):
                    copies.copy(made)
                assert not find(target, "b").committed
            else:
                copies.copy(made)
        assert [name for name in ("a", "b", "c") if find(target, name).committed] == ["c"]
        copies.close()

    def test_of_a_signed_checkpoint_nothing_is_linked_and_every_byte_is_compared_by_sha256(
        self, root: MemoryStorage, tmp_path: Path
    ) -> None:
        class NoLinks(PassedOn):
            def link(self, source: str, target: str) -> None:
                pytest.fail(f"links {target}")

        new_key(tmp_path / "key")
        key, copies = find_signing_key(tmp_path / "key"), Copies(root, NoLinks(new().url))
        assert key is not None
        copies.open_target([])
        for number, name in enumerate("abc"):
            attempt = replace(attempt_at(root, name), sha256=True)
            signed = key.sign(manifest_of(attempt, begin_and_write(root, attempt), sequence=number))
            attempt.commit(root, signed, {})
            made = Trust((key.id,)).checked(signed)
            if name == "c":
                made = replace(made, files=tuple(replace(file, sha256=("0" * 64,)) for file in made.files))
                with pytest.raises(DamagedError, match="was altered"):
                    copies.copy(made)
            else:
                copies.copy(made)
                assert is_whole(copies.target, made)
        copies.close()

    def test_of_a_copy_that_was_cut_off_what_is_there_with_its_size_is_not_sent_again(
        self, root: MemoryStorage
    ) -> None:
        sent: list[str] = []

        class Noted(PassedOn):
            def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
                sent.append(key)
                super().write(key, pieces, over=over)

        target = new()
        made = save(root, "a", {"x.json": b"1", "y.json": b"2"})
        target.write("a/x.json", [b"1"])
        target.write("a/y.json", [b""])
        copies = Copies(root, Noted(target.url))
        copies.open_target(["a"])
        copies.copy(made)
        assert sent == [f"a/{path}" for path in (MARKER, "y.json", FILE_NAME, COPY_NAME)]
        assert is_whole(target, made)
        copies.close()

    def test_who_does_not_lead_removes_nothing_and_a_removal_that_fails_is_no_error(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Stuck(PassedOn):
            def delete(self, keys: Iterable[str]) -> None:
                raise StorageError("read-only")

        target = new()
        made = [save(root, name, sequence=number) for number, name in enumerate("ab")]
        leader = Copies(root, target)
        leader.open_target([])
        for each in made:
            leader.copy(each)
        leader.close()
        for copies, left in (
            (Copies(root, target, keep=ckpt.Keep(last=1), is_leader=False), ["a", "b"]),
            (Copies(root, Stuck(target.url), keep=ckpt.Keep(last=1)), ["a", "b"]),
            (Copies(root, target, keep=ckpt.Keep(last=1)), ["b"]),
        ):
            copies.open_target([])
            copies.copy(made[1])
            assert [name for name in "ab" if find(target, name).committed] == left
            copies.close()
        assert caplog.text.count("which could not be removed: read-only") == 1

    def test_who_does_not_lead_locks_and_sweeps_nothing_and_sends_its_own_files(self, root: MemoryStorage) -> None:
        target = new()
        begin_and_write(target, attempt_at(target, "cut"))
        follower = Copies(root, target, has_all_files=False, is_leader=False)
        follower.open_target([])
        assert keys(target, "cut")
        with ExitStack() as stack:
            lock_root(target, stack)
        files = {"state.json": b"{}", "model/00000.safetensors": b"0", "model/00001.safetensors": b"1"}
        made = save(root, "a", files)
        root.delete(["a/model/00000.safetensors"])
        follower.copy(made)
        assert keys(target, "a") == {f"a/{MARKER}", "a/model/00001.safetensors"}
        follower.close()
        leader = Copies(root, target)
        leader.open_target([])
        assert not keys(target, "cut")
        leader.close()

    def test_a_copy_that_is_given_up_stops_between_pieces(self, root: MemoryStorage) -> None:
        copies = Copies(root, new(), bandwidth=1e9)
        before = copies.progress
        copies._pause(0.0)
        assert copies.progress > before
        copies.stopping.set()
        with pytest.raises(TransientError, match="the run ended before the copy was complete"):
            copies._pause(5.0)


class Far(PassedOn):
    """A remote storage that honours what it is told to honour."""

    is_local = False

    def __init__(self, url: str, *, lists: bool = True, none_match: bool = True, match: bool = True) -> None:
        super().__init__(url)
        self.is_local, self._lists, self._none_match, self._match = False, lists, none_match, match

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        honoured = self._none_match if over is None else self._match
        super().write(key, pieces, over=over if honoured else ANY)

    def list(self, prefix: str = "") -> Any:
        return super().list(prefix) if self._lists else iter(())


class TestOpening:
    def test_a_remote_storage_is_tried_out_and_nothing_is_left(self, root: MemoryStorage) -> None:
        try_out_tiers(Far(root.url))
        for far, why in (
            (Far(root.url, lists=False), "the server does not list the object"),
            (Far(root.url, none_match=False), "the server ignores If-None-Match, so"),
            (Far(root.url, match=False), "the server ignores If-Match, so"),
            (Far(root.url, none_match=False, match=False), "the server ignores If-None-Match and If-Match, so"),
        ):
            with pytest.raises(UnsupportedError, match=why):
                try_out_tiers(far)
            assert keys(root) == set()

    def test_one_without_conditions_is_taken_where_that_is_allowed(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        far = Far(root.url, match=False)
        far.allow_unconditional = True  # type: ignore[attr-defined]
        try_out_tiers(far)
        assert "Make sure that only one run writes there" in caplog.text

    def test_a_server_that_refuses_conditions_or_does_not_answer(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Refuses(Far):
            error: Exception = StorageError("501")

            def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
                if over != ANY:
                    raise self.error
                super().write(key, pieces, over=over)

        refuses = Refuses(root.url)
        with pytest.raises(UnsupportedError, match=r"refuses conditional writes .* It said: 501"):
            try_out_tiers(refuses)
        refuses.error = TransientError("away")
        with pytest.raises(TransientError):
            try_out_tiers(refuses)
        assert keys(root) == set()
        near = new()
        try_out_tiers(near, refuses)
        assert "can't reach the mirror, so copies wait until the mirror answers: away" in caplog.text
        refuses.error = StorageError("501")
        with pytest.raises(UnsupportedError):
            try_out_tiers(near, refuses)
        try_out_tiers(near, near)

    def test_roots_that_cannot_be_made_and_mirrors_that_are_the_root_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="cannot be created"):
            try_out_tiers(LocalStorage(tmp_path / "file" / "root"))
        try_out_tiers(LocalStorage(tmp_path / "deep" / "root"))
        assert [tier.url for tier in open_tiers(tmp_path)] == [str(tmp_path)]
        assert len(open_tiers(tmp_path / "a", None, tmp_path / "b")) == 2
        with pytest.raises(ConfigError, match="is the same place as the root"):
            open_tiers(tmp_path / "a", None, f"{tmp_path}/b/../a")

    def test_a_checkpoint_is_no_root(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        save(storage, "a")
        refuse_checkpoint(storage)
        inside = LocalStorage(tmp_path / "a")
        with pytest.raises(ConfigError, match=r"is a checkpoint, not a root.*load_state\('a'\)"):
            refuse_checkpoint(inside)
        (tmp_path / "a" / FILE_NAME).write_bytes(b"x")
        with pytest.raises(ConfigError):
            refuse_checkpoint(inside)
        (tmp_path / "a" / "state.json").unlink()
        refuse_checkpoint(inside)
        assert opening._is_checkpoint(storage) is False
        assert "StateManager('/x', ...); manager.load_state('a')" in parent_instead("/x/a")
        assert f"StateManager({os.getcwd()!r}, ...)" in parent_instead("a")
        assert "StateManager('/', ...)" in parent_instead("/a")


class TestPlaces:
    def test_a_folder_knows_its_files_and_names_all_that_are_missing_or_short(self, tmp_path: Path) -> None:
        (tmp_path / "deep").mkdir()
        (tmp_path / "a.bin").write_bytes(b"12345")
        (tmp_path / "deep" / "b.bin").write_bytes(b"1")
        folder = Folder.at(f"{tmp_path}/")
        assert (folder.files, folder.name, folder.prefix) == ({"a.bin": 5, "deep/b.bin": 1}, tmp_path.name, "")
        below = folder.below("deep/")
        assert (below.files, below.prefix, below.where) == ({"b.bin": 1}, "deep/", f"{tmp_path}/deep")
        assert below.document("b.bin") == below.reader("b.bin")() == b"1"
        assert below.opened("b.bin").read(0, 1) == b"1"
        folder.check({"a.bin": 5, "deep/b.bin": 0})
        with pytest.raises(DamagedError, match=r"damaged: a\.bin is .* \(5 bytes\); c is missing\. Copy"):
            folder.check({"c": 1, "a.bin": 6})
        with pytest.raises((DamagedError, AbsentError, StorageError)):
            folder.document("a.bin", most=4)

    def test_options_are_for_urls_alone(self, tmp_path: Path) -> None:
        assert open_url(str(tmp_path), {"nonsense": 1}).url == str(tmp_path)
        with pytest.raises(ConfigError):
            open_url("s3://bucket/x", {"nonsense": 1})

    def test_what_a_path_names(self, tmp_path: Path) -> None:
        save(LocalStorage(tmp_path / "root"), "a")
        (tmp_path / "plain.safetensors").write_bytes(FILES["model.safetensors"])
        (tmp_path / "odd.txt").write_bytes(b"x")
        os.symlink(tmp_path / "plain.safetensors", tmp_path / "link.safetensors")
        ours = Place.at(tmp_path / "root" / "a")
        assert (ours.is_ours, ours.file, ours.where) == (True, "", str(tmp_path / "root" / "a"))
        assert Place.at(tmp_path / "root").is_ours
        for name in ("plain.safetensors", "link.safetensors"):
            place = Place.at(tmp_path / name)
            assert (place.is_ours, place.file) == (False, "plain.safetensors")
            assert place.where == str(tmp_path / "plain.safetensors")
        with pytest.raises(ConfigError, match=r"is only one file of a checkpoint\. Name"):
            Place.at(tmp_path / "root" / "a" / "model.safetensors")
        with pytest.raises(MissingError, match="there is nothing at"):
            Place.at(tmp_path / "none")
        (tmp_path / "root" / "a" / FILE_NAME).rename(tmp_path / "root" / FILE_NAME)  # or of the folder around it
        with pytest.raises(ConfigError, match=rf"Name the checkpoint itself: {tmp_path}/root\."):
            Place.at(tmp_path / "root" / "a" / "model.safetensors")
        file = tmp_path / "plain.safetensors"
        assert (Place.at(file, format="hf").format, Place.at(file, format="torch", must=False).format) == (HF, HF)
        with pytest.raises(ConfigError, match=r"plain\.safetensors is not in the format torch: it was written by"):
            Place.at(file, format="torch")
        os.symlink(tmp_path / "odd.txt", tmp_path / "named.pt")  # its own name says what it holds
        assert Place.at(tmp_path / "named.pt").where == str(tmp_path / "named.pt")
        assert single_file(tmp_path / "root", None) is None
        assert single_file(tmp_path / "none.safetensors", None) is None
        assert not is_foreign(LocalStorage(tmp_path / "root"), "a")

    def test_of_a_root_the_newest_whose_files_are_there_is_taken(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        storage = LocalStorage(tmp_path)
        storage.write("notes.txt", [b"x"])
        for number, name in enumerate("abc"):
            save(storage, name, sequence=number)
        for damaged, taken, skipped in (("", "c", ""), ("c", "b", "c"), ("b", "a", "cb"), ("a", "c", "ba")):
            if damaged:
                os.truncate(tmp_path / damaged / "state.json", 1)
            found = Place.at(tmp_path).checkpoint(Trust())
            assert (found.url, found.is_newest, "".join(found.skipped)) == (f"{tmp_path}/{taken}", True, skipped)
            assert all("state.json" in why for why in found.skipped.values())
            caplog.clear()
            found.tell()
            named = [record.getMessage().partition(":")[0].split()[-1] for record in caplog.records]
            assert named == list(skipped)
        one = Place.at(tmp_path / "b").checkpoint(Trust())
        assert (one.name, one.skipped, one.is_newest) == ("b", {}, False)


def test_what_nobody_has_said(root: MemoryStorage, tmp_path: Path) -> None:
    record = hashed(FilePlan.of("x", b"1"), "x", lambda size: None)
    assert record.sha256 == ()
    assert (EarlierFile("a", record).was_read, WrittenFile(record).linked, WrittenFile(record).receipt) == (
        True,
        False,
        None,
    )
    attempt = Attempt("a")
    assert (attempt.sha256, attempt.sequence, attempt.expected_version, attempt.replaces) == (False, 0, None, ())
    assert [attempt.amends] == [False]
    assert Attempt("a").id != attempt.id
    copies = Copies(root, root)
    assert (copies.has_all_files, copies.is_leader, copies.was_listed, copies.progress) == (True, True, False, (0, 0))
    assert (Seal().sha256, Seal(with_sha256=True).sha256, Trust().required, SaveMarker(()).removing) == (
        False, True, False, False
    )  # fmt: skip
    assert not VerifiedFile.of(root, "a", record).sha256
    summary = Summary(name="a", id="i", sequence=1, created="", run="r")
    assert (summary.step, summary.world_size, summary.size, summary.contents) == (0, 1, 0, "")
    assert {each.name for each in fields(MirrorPatience) if not each.init} == {"_spent"}
    keep = ckpt.Keep()
    assert (keep.last, keep.best, keep.metric, keep.mode, keep.every) == (1, 0, None, "min", None)
    new_key(tmp_path / "key")
    key = find_signing_key(tmp_path / "key")
    assert key is not None
    assert repr(key) == f"SigningKey(id={key.id!r})"


class TestDeleting:
    def test_a_sweep_mends_manifests_and_copies_and_says_what_is_there(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        for number, name in enumerate(("a", "b", "c")):
            save(root, name, sequence=number)
        whole = {key: root.read(key) for key in keys(root)}
        root.delete([f"a/{FILE_NAME}", f"b/{COPY_NAME}"])
        root.write(f"c/{COPY_NAME}", [whole[f"c/{COPY_NAME}"][:-1] + b"x"])  # of the same size
        found = sweep(root)
        assert [summary.name for summary in found.committed] == ["c", "b", "a"]
        assert {key: root.read(key) for key in keys(root)} == whole
        assert caplog.text.count("from its copy") == 1
        listed = sweep(root)
        assert sweep(root, listed=listed) is listed
        root.write(f"c/{COPY_NAME}", [whole[f"c/{COPY_NAME}"][:-1] + b"x"])
        far = PassedOn(root.url)
        far.is_local = False
        sweep(far)  # reads no copy there: a request for each
        assert root.read(f"c/{COPY_NAME}") != whole[f"c/{COPY_NAME}"]

    def test_a_sweep_mends_beside_readers_and_not_beside_who_removes_or_replaces(self, root: MemoryStorage) -> None:
        save(root, "a")
        root.delete([f"a/{COPY_NAME}"])
        for shared in (False, True):
            with root.lock("a", shared=shared):
                sweep(root)
            assert (f"a/{COPY_NAME}" in keys(root)) == shared

    def test_a_sweep_takes_unfinished_files_of_any_folder_unless_they_are_too_young(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        save(storage, "a")
        left = tmp_path / "a" / ".x.json.0.ckpt-tmp"
        left.touch()
        sweep(storage, age=DAY)
        assert left.exists()
        sweep(storage)
        assert not left.exists()

    def test_where_others_write_too_young_leftovers_and_those_that_are_resumed_stay(self, root: MemoryStorage) -> None:
        for name in ("young", "old", "spared"):
            begin_and_write(root, attempt_at(root, name))
        marker = json.loads(root.read(f"old/{MARKER}"))
        marker["since"] = (datetime.now(timezone.utc) - timedelta(days=2)).isoformat()
        root.write(f"old/{MARKER}", [json.dumps(marker).encode()])
        probe = f".try-{'0' * 32}/probe"
        root.write(probe, [b"x"])
        sweep(root, spared=["spared"], age=DAY)
        assert {key.partition("/")[0] for key in keys(root)} == {"young", "spared", probe.partition("/")[0]}
        sweep(root, spared=["spared"])
        assert {key.partition("/")[0] for key in keys(root)} == {"spared"}

    def test_a_checkpoint_is_removed_unless_something_speaks_against_it(self, root: MemoryStorage) -> None:
        made = save(root, "a")
        summary = Summary.of(made)
        for what in (made, summary):
            with root.lock("a", shared=True):
                assert remove(root, what) == "is being read"
            assert remove(root, replace(what, id="other")) == "was saved again in the meantime"
        assert is_whole(root, made)
        kept = {key: root.read(key) for key in keys(root)}
        for name in (FILE_NAME, COPY_NAME):
            root.write(f"a/{name}", [b"x"])
        assert remove(root, summary).startswith("has a manifest that ckpt can't read")
        for key, data in kept.items():
            root.write(key, [data])
        mark_save(root, "a", ["new"], [], "of a save")
        assert remove(root, made).startswith("is being saved again, or such a save was interrupted")
        mark_save(root, "b", [], [], "x")
        root.delete([f"a/{MARKER}", f"b/{MARKER}"])
        root.write("a/left", [b"x"])
        mark_save(root, "a", [], ["left"], made.id)
        assert remove_all(root, [made, replace(made, name="none")]) == {"a": "", "none": ""}
        assert keys(root) == set()

    def test_retention_keeps_what_it_cannot_judge_and_stores_the_history_first(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        listed = [Summary.of(save(root, name, sequence=number)) for number, name in enumerate("abc")][::-1]
        for name in (FILE_NAME, COPY_NAME):
            root.write(f"a/{name}", [b"x"])
        left = apply_retention(ckpt.Keep(last=1), root, listed, ())
        assert [summary.name for summary in left] == ["c", "a"]
        assert "a, which has a manifest that ckpt can't read" in caplog.text
        assert {past.summary.name for past in History.of(root).saves} == {"a", "b", "c"}
        caplog.clear()
        apply_retention(ckpt.Keep(last=1), root, left, ())
        assert "ckpt left" not in caplog.text  # said once

    def test_what_cannot_be_ranked_is_said_once_when_it_matters(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        one, two = (Summary.of(save(root, name, sequence=number)) for number, name in enumerate("ab"))
        keep = ckpt.Keep(last=1, best=1, metric="loss")
        apply_retention(keep, root, [one], ())
        assert "can't rank checkpoints" not in caplog.text
        for _ in range(2):
            assert apply_retention(keep, root, [two, one], ()) == [two, one]
        assert caplog.text.count("can't rank checkpoints: no checkpoint has a metric 'loss'") == 1
        other = new()
        apply_retention(keep, other, [replace(one, metrics={"los": 1.0})], ())
        assert caplog.text.count("can't rank checkpoints") == 2

    def test_folders_of_saves_that_were_cut_off_are_set_aside(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        storage = LocalStorage(tmp_path)
        assert set_aside_uncommitted(storage) == set_aside_uncommitted(new()) == []
        save(storage, "step-1", sequence=1)
        assert not was_cut_off(storage, "step-1")
        assert not was_cut_off(storage, "step-2")
        assert set_aside_uncommitted(storage) == []
        assert not (tmp_path / ".lock").exists()  # nothing was to be done
        (tmp_path / "step-2").mkdir()
        assert was_cut_off(storage, "step-2")
        (tmp_path / "step-2" / "hook.txt").write_text("x")
        (tmp_path / "notes").mkdir()
        begin_and_write(storage, attempt_at(storage, "cut"))
        assert was_cut_off(storage, "cut")
        assert was_cut_off(storage, "step-2")
        assert not was_cut_off(storage, "notes")
        assert not was_cut_off(storage, "none")
        assert set_aside_uncommitted(storage) == ["cut", "step-2"]
        assert sorted(path.name for path in tmp_path.iterdir() if "lock" not in path.name) == [
            ".step-2.uncommitted", "notes", "step-1"
        ]  # fmt: skip
        assert "moved other programs' files from that folder to .step-2.uncommitted" in caplog.text
        assert was_cut_off(storage, "step-2")
        (tmp_path / "step-2").mkdir()
        (tmp_path / "step-2" / "hook.txt").write_text("x")
        set_aside_uncommitted(storage)
        assert (tmp_path / ".step-2.uncommitted-1").is_dir()
        (tmp_path / "step-0").mkdir()  # no higher number: somebody else's
        with storage.lock(".lock"):
            (tmp_path / "step-3").mkdir()
            assert set_aside_uncommitted(storage) == []
        assert set_aside_uncommitted(storage) == ["step-3"]
        assert (tmp_path / "step-0").is_dir()
        (tmp_path / "step-9").symlink_to(tmp_path / "notes")
        assert set_aside_uncommitted(storage) == []

    @pytest.mark.parametrize(
        ("name", "made", "is_cut_off"),
        [
            ("step-7", ("step-1", "step-5", "step-7"), True),
            ("step-7", ("step-5", "step-1", "step-7"), True),
            ("step-7", ("step-1", "step-7", "step-5"), False),
            ("step-7", ("step-5", "step-7", "step-1"), False),
            ("step-7", ("step-7", "step-1", "step-5"), False),
            ("step-3", ("step-1", "step-5", "step-3"), False),
            ("step-05", ("step-1", "step-5", "step-05"), False),
        ],
    )
    def test_a_folder_without_a_word_of_ckpt_is_set_aside_if_its_number_is_the_highest_and_it_is_the_youngest(
        self, tmp_path: Path, name: str, made: tuple[str, ...], is_cut_off: bool
    ) -> None:
        storage, last = LocalStorage(tmp_path), 0.0
        for number, one in enumerate(("step-1", "step-5")):
            save(storage, one, sequence=number)
        (tmp_path / name).mkdir()
        for folder in (tmp_path / one for one in made):
            while folder.stat().st_ctime <= last:
                os.utime(folder)
            last = folder.stat().st_ctime
        assert set_aside_uncommitted(storage) == ([name] if is_cut_off else [])


class TestTheWorker:
    def test_it_copies_in_order_and_drops_the_oldest_beyond_its_backlog(self, root: MemoryStorage) -> None:
        target, begun, gate, copied = new(), threading.Event(), threading.Event(), list[str]()

        class Gated(PassedOn):
            def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
                if key.startswith("a/"):
                    begun.set()
                    assert gate.wait(20)
                super().write(key, pieces, over=over)

        worker = MirrorWorker(Copies(root, Gated(target.url)), on_copied=copied.append)
        assert (worker.backlog, worker.newest, worker.is_copying, worker.error) == (2, None, False, None)
        worker.start([])
        made = {name: save(root, name, sequence=number) for number, name in enumerate("abcd")}
        worker.enqueue(made["a"])
        assert begun.wait(20)
        for name in "bcd":
            worker.enqueue(made[name])
        assert worker.is_copying
        assert not worker.is_free("d")
        gate.set()
        worker.close()
        assert copied == [made[name].id for name in "acd"]
        assert [name for name in "abcd" if find(target, name).committed] == ["a", "c", "d"]
        assert worker.error is None
        with ExitStack() as stack:
            lock_root(target, stack)

    def test_what_the_last_run_has_not_copied_is_copied_by_the_next(self, root: MemoryStorage) -> None:
        target = new()
        made = [save(root, name, sequence=number) for number, name in enumerate("abc", 1)]
        save(target, "a", sequence=1)
        worker = MirrorWorker(Copies(root, target))
        worker.start([Summary.of(each) for each in reversed(made)])
        worker.close()
        assert [name for name in "abc" if find(target, name).committed] == ["a", "b", "c"]
        newer = save(root, "d", sequence=9)
        again = MirrorWorker(Copies(root, target))
        again.start([replace(Summary.of(newer), id="another")])
        again.close()
        assert not find(target, "d").committed

    def test_a_failure_is_kept_until_a_copy_succeeds(
        self, root: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        target = new()
        worker = MirrorWorker(Copies(root, target))
        worker.start([])
        bad = save(root, "a", {"x": b"1"}, sequence=1)
        root.write("a/x", [b"2"])
        worker.enqueue(bad)
        worker.close()
        assert [worker.error is None] == [False]
        assert "a is not copied" in caplog.text
        good = save(root, "b", sequence=2)
        worker.enqueue(good)
        worker.close()
        assert [worker.error is None] == [True]
        assert find(target, "b").committed

    def test_the_rate_is_limited_by_pauses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock, paused = [0.0], list[float]()
        monkeypatch.setattr(mirror, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        throttle, sizes = Throttle(10.0, paused.append), list[float]()
        pieces = [memoryview(b"x" * 20), memoryview(b"x" * 10)]
        assert list(throttle.limit(pieces, sizes.append)) == pieces
        assert (sizes, paused) == ([20, 10], [2.0, 3.0])
        clock[0] = 2.5
        throttle.passed(0)
        clock[0] = 9.0
        throttle.passed(0)
        assert paused[2:] == [0.5, 0.0]
        Throttle(None, paused.append).passed(100)
        assert paused[-1] == 0.0
