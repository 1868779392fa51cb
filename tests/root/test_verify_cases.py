"""Verifying case by case: which bytes are compared before anybody gets them, and what is said of others."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.errors import (
    ConfigError,
    DamagedError,
    LockedError,
    TransientError,
    TruncatedError,
    UntrustedError,
)
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, BlockHasher, FileRecord, Host, Manifest, digest, sha256
from ckpt.root import catalog, signing
from ckpt.root import verify as verifying
from ckpt.root.catalog import MARKER, Overview, find, mark_save
from ckpt.root.retention import Keep
from ckpt.root.signing import Head, Seal, Trust, find_signing_key, find_verify_keys, new_key, open_trust
from ckpt.root.verify import (
    COMPLETE,
    DAMAGED,
    INTACT,
    REMOVED,
    UNCOMMITTED,
    UNDER_WAY,
    UNREADABLE,
    UNTRUSTED,
    AuthenticFile,
    StoredFile,
    VerifiedFile,
    condition,
    files_on_other_hosts,
    find_whole_files,
    header_problems,
    lock_patiently,
    problems,
    reader_threads,
    reading,
    repair,
    size_problems,
    verify_checkpoint,
    without_other_hosts,
)
from ckpt.storage import Entry, MemoryStorage
from ckpt.util.console import progress_bar
from tests.helpers.byte_checkpoints import FILES, MOMENT, attempt_at, begin_and_write, save, tensor_file
from tests.helpers.places import PassedOn

DATA = bytes(range(65, 90))  # three blocks of ten, the last of them half full
HEAD = 7
_numbers = itertools.count()


@pytest.fixture
def root() -> MemoryStorage:
    return MemoryStorage(f"verify-{next(_numbers)}")


def record_of(data: bytes, *, block: int = 10, head: int = 0, hashed: bool = True) -> FileRecord:
    hasher = BlockHasher(block, sha256=True)
    hasher.update(memoryview(data))
    return FileRecord(
        name="x",
        path="x",
        size=len(data),
        blocks=hasher.digests,
        block_size=block,
        head=(head, digest(data[:head])) if head else None,
        sha256=hasher.sha256_digests if hashed else (),
        head_sha256=sha256(data[:head]) if head and hashed else "",
    )


def altered(at: int) -> bytes:
    return DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :]


class Counted(PassedOn):
    """Notes what is read, as from and to."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.reads: list[tuple[int, int]] = []
        self.locks = 0

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        found = super().read(key, start, stop)
        self.reads.append((start, start + len(found)))
        return found

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        self.reads.append((start, start + sum(map(len, buffers))))
        super().read_into(key, start, *buffers, again=again)

    def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
        self.locks += 1
        return super().lock(key, shared=shared, note=note)


class TestAFile:
    @pytest.mark.parametrize("with_sha256", [False, True])
    @pytest.mark.parametrize("head", [0, HEAD])
    def test_gives_away_just_the_bytes_that_are_asked_for_and_none_of_an_altered_block(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch, head: int, with_sha256: bool
    ) -> None:
        monkeypatch.setattr(verifying, "WINDOW", 4)
        record = record_of(DATA, head=head)
        ranges = [(0, 1), (0, 7), (0, 8), (3, 7), (9, 10), (9, 11), (10, 20), (19, 25), (24, 30), (0, 25), (25, 25)]
        for at in (None, 0, 6, 7, 9, 10, 19, 20, 24):
            root.write("a/x", [DATA if at is None else altered(at)])
            for start, stop in ranges:
                file = VerifiedFile.of(root, "a", record, sha256=with_sha256)
                if head and stop <= head:
                    bad = at is not None and at < head
                else:
                    bad = at is not None and start // 10 <= at // 10 < -(-min(stop, 25) // 10)
                if bad:
                    with pytest.raises(DamagedError, match=r"^a is damaged: x was altered \(bytes \d+ to \d+\)\.$"):
                        file.read(start, stop)
                else:
                    assert file.read(start, stop) == DATA[start:stop], (at, start, stop)
            file = VerifiedFile.of(root, "a", record, sha256=with_sha256)
            read: list[bytes] = []
            if at is None:
                assert b"".join(map(bytes, file.pieces())) == file.read_all() == DATA
                continue
            with pytest.raises(DamagedError, match=rf"bytes {at // 10 * 10} to {min(25, at // 10 * 10 + 10)}\)"):
                read.extend(bytes(piece) for piece in file.pieces())
            assert len(b"".join(read)) == min(25, at // 10 * 10 + 10)
            assert max(map(len, read)) == 4

    def test_verifies_a_block_once_where_it_is_believed_and_reads_it_once_where_it_is_not(
        self, root: MemoryStorage
    ) -> None:
        root.write("a/x", [DATA])
        counted = Counted(root.url)
        file = VerifiedFile.of(counted, "a", record_of(DATA, head=HEAD))
        assert file.read(0, 3) + file.read(3, 7) == DATA[:7]
        assert counted.reads == [(0, 7)]
        counted.reads.clear()
        assert file.read(2, 12) == file.read(2, 12) == DATA[2:12]
        assert counted.reads == [(0, 10), (10, 20), (2, 12), (2, 12)]
        counted.reads.clear()
        file = VerifiedFile.of(counted, "a", record_of(DATA), sha256=True)
        assert file.read(2, 12) == DATA[2:12]
        assert counted.reads == [(0, 20)]

    def test_compares_sha256_only_if_it_is_asked_to(self, root: MemoryStorage) -> None:
        root.write("a/x", [DATA])
        good = record_of(DATA, head=HEAD)
        wrong = replace(good, sha256=("0" * 64, *good.sha256[1:]))
        assert VerifiedFile.of(root, "a", wrong).read(0, 10) == DATA[:10]
        with pytest.raises(DamagedError, match="bytes 0 to 10"):
            VerifiedFile.of(root, "a", wrong, sha256=True).read(0, 10)
        assert VerifiedFile.of(root, "a", wrong, sha256=True).read(10, 20) == DATA[10:20]
        wrong = replace(good, head_sha256="0" * 64)
        assert VerifiedFile.of(root, "a", wrong).read(0, 7) == DATA[:7]
        with pytest.raises(DamagedError, match=r"bytes 0 to 7\): its SHA-256 differs"):
            VerifiedFile.of(root, "a", wrong, sha256=True).read(0, 7)
        unhashed_head = replace(good, head=(HEAD, "wrong"), head_sha256="")
        assert VerifiedFile.of(root, "a", unhashed_head, sha256=True).read(0, 7) == DATA[:7]  # by its block

    def test_says_what_is_wrong_with_a_block_and_how_far_it_is(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root.write("a/x", [altered(21)])
        file, sizes = VerifiedFile.of(root, "a", record_of(DATA)), list[float]()
        assert [file.span(index) for index in range(3)] == [(0, 10), (10, 20), (20, 25)]
        found = [file.verify_block(index, memoryview(bytearray(4)), sizes.append) for index in range(3)]
        assert found == [None, None, "x was altered (bytes 20 to 25)"]
        assert sizes == [4, 4, 2, 4, 4, 2, 4, 1]
        root.write("a/x", [DATA[:22]])
        with pytest.raises(DamagedError, match=r"x is missing or cut short: .*[^.]\.$"):
            file.verify_block(2, memoryview(bytearray(4)))
        root.delete(["a/x"])
        with pytest.raises(DamagedError, match="x is missing or cut short"):
            file.verify_block(0, memoryview(bytearray(4)))

    def test_that_is_signed_keeps_one_block_and_ends_where_it_ends(self, root: MemoryStorage) -> None:
        for data in (DATA, DATA[:20]):
            root.write("a/x", [data])
            counted, last = Counted(root.url), dict[tuple[str, int], memoryview]()
            file = AuthenticFile(VerifiedFile.of(counted, "a", record_of(data), sha256=True), last)
            assert (file.read(3, 9), file.read(2, 13), file.read(12, 99)) == (data[3:9], data[2:13], data[12:])
            assert (file.read(len(data), 99), file.read(99, 100)) == (b"", b"")
            assert len(last) == 1
            one, two = bytearray(3), bytearray(9)
            file.read_into(1, memoryview(one), memoryview(two))
            assert bytes(one + two) == data[1:13]
            counted.reads.clear()
            assert file.read(11, 14) == data[11:14]
            assert counted.reads == []  # of the block that was read last
            with pytest.raises(TruncatedError, match="a/x is 2 bytes too short"):
                file.read_into(len(data) - 1, memoryview(bytearray(3)))
        root.write("a/x", [altered(3)])
        last.clear()
        with pytest.raises(DamagedError):
            file.read(0, 3)


def manifest_with(*names: str, hosts: tuple[Host, ...] = ()) -> Manifest:
    files = tuple(replace(record_of(DATA), name=name, path=name) for name in names)
    return Manifest(name="a", id="id", sequence=1, created=MOMENT, run="run", files=files, hosts=hosts)


class TestFilesOfACheckpoint:
    def test_are_compared_by_size_first_and_then_by_every_byte_and_header(self, root: MemoryStorage) -> None:
        listed = manifest_with("x", "y")
        root.write("a/x", [DATA])
        assert size_problems(root, listed) == problems(root, listed) == ["y is missing"]
        root.write("a/y", [DATA + b"!"])
        (found,) = size_problems(root, listed)
        assert found.endswith("(26 bytes)")
        assert size_problems(root, listed, {"x": 25, "y": 25}) == []
        root.write("a/x", [altered(12)])
        root.write("a/y", [DATA])
        assert size_problems(root, listed) == []
        assert problems(root, listed, threads=1) == ["x was altered (bytes 10 to 20)"]
        root.write("a/x", [DATA])
        assert problems(root, listed) == []
        wrong = replace(record_of(DATA), name="x.safetensors")
        (found,) = problems(root, replace(listed, files=(wrong,)))
        assert found.startswith("a/x ")
        assert not found.endswith(".")
        assert header_problems([VerifiedFile.of(root, "a", record_of(DATA))]) == []

    def test_of_other_hosts_are_not_missed_here_unless_none_is_here(self, root: MemoryStorage) -> None:
        names = ("model/00000.safetensors", "model/00001.safetensors", "state.json")
        hosts = (Host("one", (0,)), Host("two", (1, 2)))
        listed = manifest_with(*names, hosts=hosts)
        assert files_on_other_hosts(root, listed) == {}
        assert size_problems(root, listed) == [
            f"{names[0]} is missing (one saved it)", f"{names[1]} is missing (two saved it)", "state.json is missing"
        ]  # fmt: skip
        root.write("a/state.json", [DATA])
        assert files_on_other_hosts(root, listed) == {}
        root.write(f"a/{names[1]}", [DATA])
        assert files_on_other_hosts(root, listed) == {names[0]: "one"}
        assert [file.path for file in without_other_hosts(root, listed).files] == [names[1], "state.json"]
        shared = replace(listed, hosts=())
        assert files_on_other_hosts(root, shared) == {}
        assert without_other_hosts(root, shared) == shared
        assert size_problems(root, shared) == [f"{names[0]} is missing"]

    def test_are_read_by_more_threads_where_any_is_far_away(self, root: MemoryStorage) -> None:
        far = PassedOn(root.url)
        far.is_local = False
        assert reader_threads([root, root]) == verifying._THREADS
        assert reader_threads([root, far]) == verifying._MOST_THREADS


class TestStates:
    @pytest.fixture(autouse=True)
    def _impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verifying, "_PAUSE", 0.0)

    def test_one_that_is_final_is_found_at_the_first_look(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counted = Counted(root.url)

        def state(trust: Trust = signing.BELIEVES_ALL) -> tuple[str, bool, int]:
            counted.locks = 0
            found = verify_checkpoint(counted, "a", trust)
            assert bool(found.problems) == (found.state != INTACT)
            return found.state, found.is_fault, counted.locks

        assert state() == (REMOVED, False, 1)
        saved = save(root, "a")
        assert state() == (INTACT, False, 1)
        assert verify_checkpoint(root, "a").manifest == saved
        assert state(Trust(("ab" * 32,), required=True)) == (UNTRUSTED, True, 1)
        root.write("a/state.json", [b"[]"])
        assert state() == (DAMAGED, True, 1)
        root.write("a/state.json", [FILES["state.json"]])
        root.write(f"a/{COPY_NAME}", [b"x"])
        assert state() == (DAMAGED, True, 1)
        root.delete([f"a/{COPY_NAME}", f"a/{FILE_NAME}"])
        assert state() == (DAMAGED, True, 1)
        mark_save(root, "a", [], [], "id")
        assert state() == (UNDER_WAY, False, 1)
        root.write(f"a/{FILE_NAME}", [b"x"])  # it was committed: that a save is under way does not excuse it
        assert state() == (DAMAGED, True, 1)
        root.delete([f"a/{FILE_NAME}"])
        root.write(f"a/{MARKER}", [b'{"files": [], "replaces": []}'])
        assert state() == (DAMAGED, True, 1)
        save(root, "a")
        with monkeypatch.context() as patch:

            def away(*args: object, again: bool = False) -> None:
                raise TransientError("no answer")

            patch.setattr(counted, "read_into", away)
            assert state() == (UNREADABLE, True, 1)
            assert isinstance(verify_checkpoint(counted, "a").error, TransientError)

    def test_one_that_another_process_holds_is_looked_at_again_for_a_while(
        self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Held(Counted):
            until = 3

            def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
                assert shared
                if self.locks + 1 < self.until:
                    self.locks += 1
                    raise LockedError("process 7")
                return super().lock(key, shared=shared, note=note)

        saved = save(root, "a")
        held = Held(root.url)
        assert verify_checkpoint(held, "a").state == INTACT
        assert held.locks == 3
        held.locks = 0
        with reading(held, "a") as found:
            assert found == saved
            with pytest.raises(LockedError):
                root.lock("a").__enter__()
        assert held.locks == 3
        held.locks, held.until = 0, 99
        monkeypatch.setattr(verifying, "_PATIENCE", -1.0)
        assert verify_checkpoint(held, "a").state == UNDER_WAY
        with ExitStack() as stack, pytest.raises(LockedError):
            lock_patiently(held, "a", stack)
        assert held.locks == 2

    def test_progress_is_shown_where_somebody_waits(self, root: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
        shown: list[bool] = []

        def noted(*args: Any, show: bool, **options: Any) -> Any:
            shown.append(show)
            return progress_bar(*args, show=False, **options)

        monkeypatch.setattr(verifying, "progress_bar", noted)
        saved = save(root, "a")
        problems(root, saved)
        find_whole_files([root], "a")
        assert shown == [False, False]
        verify_checkpoint(root, "a")
        repair(root, "a")
        listed = Overview.of(root)
        condition(listed, listed.checkpoints[0], verify=True)
        assert shown[2:] == [True, True, True]

    def test_one_that_is_not_there_is_read_as_none(self, tmp_path: Path) -> None:
        storage = ckpt.storage.open_storage(tmp_path)
        with reading(storage, "none") as found:
            assert found is None

    def test_one_that_is_replaced_or_removed_meanwhile_is_looked_at_again(self, root: MemoryStorage) -> None:
        class Changed(Counted):
            """After the first look at its files, it is saved anew, or its manifests are removed."""

            removes = False

            def list(self, prefix: str = "") -> Iterator[Entry]:
                found = list(super().list(prefix))
                if self.locks == 1:
                    self.locks += 1
                    if self.removes:
                        root.delete([entry.key for entry in root.list("a")])
                    else:
                        save(root, "a", {"state.json": b"[1]"}, sequence=2)
                        root.delete([f"a/{path}" for path in FILES])
                return iter(found)

        save(root, "a")
        found = verify_checkpoint(Changed(root.url), "a")
        assert (found.state, found.manifest and found.manifest.sequence) == (INTACT, 2)
        removed = Changed(root.url)
        removed.removes = True
        assert verify_checkpoint(removed, "a").state == REMOVED

    def test_the_condition_says_how_much_of_it_was_read(self, root: MemoryStorage) -> None:
        def found(*, verify: bool = False) -> tuple[str, int, bool]:
            listed = Overview.of(root)
            told = condition(listed, listed.checkpoints[0], verify=verify)
            return told.state, len(told.problems), told.is_sound

        begin_and_write(root, attempt_at(root, "a"))
        assert found() == (UNCOMMITTED, 1, False)
        save(root, "a")
        assert (found(), found(verify=True)) == ((COMPLETE, 0, True), (INTACT, 0, True))
        path = next(entry.key for entry in root.list("a") if "state" in entry.key)
        data = root.read(path)
        root.write(path, [b"[]"])
        assert (found(), found(verify=True)) == ((COMPLETE, 0, True), (DAMAGED, 1, False))
        root.write(path, [b"[1]"])
        assert (found(), found(verify=True)) == ((DAMAGED, 1, False), (DAMAGED, 1, False))
        root.write(path, [data])
        root.write("a/notes.txt", [b"mine"])
        assert found() == (COMPLETE, 0, True)
        root.write(f"a/{FILE_NAME}", [b"x"])
        assert (found(), found(verify=True)) == ((DAMAGED, 1, False), (DAMAGED, 1, False))
        root.write(f"a/{COPY_NAME}", [b"x"])
        assert found() == (DAMAGED, 1, False)

    def test_a_storage_that_does_not_answer_shows_no_damage(self, root: MemoryStorage) -> None:
        class Away(PassedOn):
            away = False

            def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
                if self.away:
                    raise TransientError("no answer")
                return super().read(key, start, stop)

        save(root, "a")
        away = Away(root.url)
        listed = Overview.of(away)
        away.away = True
        assert condition(listed, listed.checkpoints[0], verify=True).state == UNREADABLE
        root.delete([f"a/{FILE_NAME}", f"a/{COPY_NAME}"])
        away.away = False
        assert condition(listed, listed.checkpoints[0], verify=True).state == DAMAGED
        root.delete([entry.key for entry in root.list("a")])
        assert condition(listed, listed.checkpoints[0], verify=True).state == DAMAGED


class TestRepair:
    def test_takes_what_is_whole_from_the_first_that_has_it_and_from_other_checkpoints_last(
        self, root: MemoryStorage
    ) -> None:
        other = MemoryStorage(f"verify-{next(_numbers)}")
        weights = {"model.safetensors": tensor_file(b"weights"), "state.json": b"{}"}
        for storage in (root, other):
            save(storage, "a", weights)
        twin = save(root, "twin", weights, sequence=2)
        assert find_whole_files([root, other], "a").elsewhere == {}
        root.write("a/state.json", [b"[]"])
        found = find_whole_files([root, other], "a")
        assert {path: (place.home, place.key) for path, place in found.elsewhere.items()} == {
            "state.json": (1, "a/state.json")
        }
        assert (found.manifest_home, found.lost) == (0, ())
        other.delete(["a/state.json"])
        found = find_whole_files([root, other], "a")
        assert {path: (place.home, place.key) for path, place in found.elsewhere.items()} == {
            "state.json": (0, "twin/state.json")
        }
        assert find_whole_files([root, other], "a", links=False).lost == ("state.json",)
        assert repair(root, "a", [other]).written == {"state.json": f"{root.url}/twin/state.json"}
        assert not problems(root, twin)
        assert verify_checkpoint(root, "a").state == INTACT

    def test_takes_the_manifest_from_another_home_and_names_all_where_none_has_it(self, root: MemoryStorage) -> None:
        other = MemoryStorage(f"verify-{next(_numbers)}")
        for storage in (root, other):
            save(storage, "a")
        root.delete([f"a/{COPY_NAME}"])
        root.write(f"a/{FILE_NAME}", [b"x"])
        done = repair(root, "a", [other])
        assert done.written[FILE_NAME] == f"{other.url}/a/{FILE_NAME}"
        assert verify_checkpoint(root, "a").state == INTACT
        for storage in (root, other):
            for name in (FILE_NAME, COPY_NAME):
                storage.write(f"a/{name}", [b"x"])
        with pytest.raises(DamagedError, match=f"a has no intact manifest in {root.url} or {other.url}: "):
            find_whole_files([root, other], "a")

    def test_a_home_that_does_not_answer_for_its_manifest_is_an_error(self, root: MemoryStorage) -> None:
        class Away(PassedOn):
            def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
                raise TransientError("no answer")

        save(root, "a")
        with pytest.raises(TransientError):
            find_whole_files([Away(root.url), root], "a")


class TestTrust:
    @pytest.fixture
    def keys(self, tmp_path: Path) -> tuple[str, str]:
        for name in ("one", "two"):
            new_key(tmp_path / name)
        return str(tmp_path / "one"), str(tmp_path / "two")

    def test_whom_to_believe(self, keys: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
        one = find_signing_key(keys[0])
        assert one is not None
        mine, theirs = find_verify_keys(f"{keys[0]}.pub"), find_verify_keys(f"{keys[1]}.pub")
        assert mine == (one.id,)
        hashed = manifest_with("x")
        signed = Seal(key=one).sealed(hashed)
        refused = UntrustedError
        renamed, unhashed = replace(signed, name="b"), replace(hashed, files=(record_of(DATA, hashed=False),))
        assert signed.signature is not None
        forged = replace(signed, signature=replace(signed.signature, value="0" * 128))
        for trust, manifest, result in (
            (Trust(), hashed, False),
            (Trust(), signed, False),
            (Trust(mine), signed, True),
            (Trust(mine), hashed, False),
            (Trust(theirs), signed, False),
            (Trust((*theirs, *mine), required=True), signed, True),
            (Trust(mine, required=True), hashed, refused),
            (Trust(theirs, required=True), signed, refused),
            (Trust(mine), renamed, refused),
            (Trust(mine), forged, refused),
            (Trust(theirs), forged, False),
            (Trust(mine), Seal(key=one).sealed(unhashed), refused),
        ):
            caplog.clear()
            if result is refused:
                with pytest.raises(UntrustedError, match="refuses"):
                    trust.accepted(manifest)
                continue
            assert trust.checked(manifest).is_authentic is result
            assert not caplog.records
            assert trust.accepted(manifest).is_authentic is result
            assert ("is not signed by a key that is trusted here" in caplog.text) == (bool(trust.keys) and not result)
            assert (f", but by {one.id[:4]}" in caplog.text) == (
                manifest.signature is not None and bool(caplog.records)
            )

    def test_a_place_without_a_manifest_is_refused_or_warned_of(self, caplog: pytest.LogCaptureFixture) -> None:
        Trust().refuse_unsigned("x")
        assert not caplog.records
        Trust(("k",)).refuse_unsigned("x")
        assert "x has no manifest, so nothing in it is signed" in caplog.text
        with pytest.raises(UntrustedError, match=r"ckpt refuses .*x: you require a signature, but it has no manifest"):
            Trust(("k",), required=True).refuse_unsigned("x")

    def test_where_keys_are_looked_for(self, keys: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        for name in (signing.SIGN_VARIABLE, signing.VERIFY_VARIABLE):
            monkeypatch.delenv(name, raising=False)
        assert find_signing_key(None) is find_signing_key(False) is None
        with pytest.raises(ConfigError, match="CKPT_SIGN_KEY is not set"):
            find_signing_key(True)
        assert find_verify_keys(None) == ()
        assert open_trust(None) == Trust()
        with pytest.raises(ConfigError, match="you require signatures, but gave no key"):
            open_trust(None, required=True)
        monkeypatch.setenv(signing.SIGN_VARIABLE, keys[0])
        monkeypatch.setenv(signing.VERIFY_VARIABLE, Path(f"{keys[1]}.pub").read_text())
        one = find_signing_key(True)
        assert one is not None
        assert str(one) == str(find_signing_key(None))
        assert find_signing_key(False) is None
        two = find_verify_keys(None)
        assert two == find_verify_keys(keys[1])  # the private half stands for the public one
        assert open_trust(None, required=True, own=one) == Trust((*two, one.id), True)
        assert open_trust(keys[0], own=one) == Trust((one.id,))
        both = Path(f"{keys[0]}.pub").read_text() + Path(keys[1]).read_text()
        assert find_verify_keys(both) == (one.id, *two)
        for wrong, why in (
            ("", "could not read it"),
            ("-----BEGIN x", "is not a PEM key of the right kind"),
            (f"{keys[0]}.none", "could not read it"),
        ):
            with pytest.raises(ConfigError, match=why):
                find_verify_keys(wrong)
        with pytest.raises(ConfigError, match="is not a PEM key of the right kind"):
            find_signing_key(Path(f"{keys[0]}.pub").read_text())
        Path(keys[0] + ".empty").touch()
        with pytest.raises(ConfigError, match="contains no key"):
            find_verify_keys(keys[0] + ".empty")

    def test_a_head_is_a_run_with_or_without_a_number(self, tmp_path: Path) -> None:
        run, path = "0a" * 16, tmp_path / "head"
        assert Head.parse(run) == Head(run, 0)
        assert Head.parse(f"{run}:17\n", "x") == Head(run, 17, "x")
        assert Head.remembered(path) == Head(path=str(path))
        path.write_text(f"{run}:3\n")
        assert Head.remembered(path) == Head(run, 3, str(path))
        for wrong, where in (("run", ""), (f"{run}:x", "head"), (f"{run[1:]}", "head")):
            with pytest.raises(ConfigError, match=f"{where or 'the run that is required'} must be RUN or RUN:NUMBER"):
                Head.parse(wrong, where)
        with pytest.raises(ConfigError, match=r"could not read .*, which records the number"):
            Head.remembered(tmp_path)

    @pytest.mark.parametrize(
        ("head", "run", "number", "problem"),
        [
            (Head(), "run", 1, ""),
            (Head("run"), "run", 1, ""),
            (Head("run", 7), "run", 7, ""),
            (Head("run", 7), "run", 8, ""),
            (Head("run", 7), "run", 6, r"had reached number 7: .* To go back on purpose, require the run without a"),
            (Head("run", 7, "head"), "run", 6, r"To go back on purpose, name a checkpoint, .*, remove head"),
            (Head("run", 7), "other", 8, "it belongs to run other, not to run"),
        ],
    )
    def test_what_is_of_another_run_or_older_than_the_head_is_refused(
        self, head: Head, run: str, number: int, problem: str
    ) -> None:
        found = head.problem(replace(manifest_with("x"), run=run, sequence=number))
        assert bool(found) == bool(problem)
        assert re.search(problem, found)
        if head.run in ("", run):
            head.refuse_other(run, "root")
        else:
            with pytest.raises(UntrustedError, match="root had checkpoints of run run, up to number 7"):
                head.refuse_other(run, "root")

    @pytest.mark.parametrize(
        ("known", "run", "number", "remembered"),
        [
            (("", 0), "run", 1, "run:1"),
            (("run", 7), "run", 8, "run:8"),
            (("run", 7), "run", 7, ""),
            (("run", 7), "run", 6, ""),
            (("run", 7), "other", 8, ""),
        ],
    )
    def test_a_head_goes_forward_alone(
        self,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        known: tuple[str, int],
        run: str,
        number: int,
        remembered: str,
    ) -> None:
        saved = replace(manifest_with("x"), run=run, sequence=number)
        head = Head(*known, str(tmp_path / "head"))
        head.advance(saved)
        assert (f"{head.run}:{head.number}" if remembered else "") == remembered
        assert ((tmp_path / "head").read_text() if remembered else "") == (f"{remembered}\n" if remembered else "")
        assert (tmp_path / "head").exists() == bool(remembered)
        nowhere = Head(*known)
        nowhere.advance(saved)
        assert nowhere == Head(*known)
        (tmp_path / "file").touch()
        stuck = Head(*known, str(tmp_path / "file" / "head"))
        stuck.advance(saved)
        assert ("which records the number of the newest checkpoint" in caplog.text) == bool(remembered)

    def test_a_private_key_that_others_may_read_is_refused_and_none_is_overwritten(self, keys: tuple[str, str]) -> None:
        assert os.stat(keys[0]).st_mode & 0o777 == 0o600
        os.chmod(f"{keys[0]}.pub", 0o644)
        find_verify_keys(f"{keys[0]}.pub")
        for mode in (0o640, 0o604, 0o620):
            os.chmod(keys[0], mode)
            for find_key in (find_signing_key, find_verify_keys):
                with pytest.raises(ConfigError, match=f"other users can read or write .*mode {mode:04o}"):
                    find_key(keys[0])
        with pytest.raises(ConfigError, match="already exists"):
            new_key(keys[1])
        os.remove(f"{keys[1]}.pub")
        with pytest.raises(ConfigError, match=r"could not write .*: File exists"):
            new_key(keys[1])
        assert not os.path.exists(f"{keys[1]}.pub")


class TestKeep:
    def listed(self, *steps: int, **losses: float) -> list[Manifest]:
        """Newest first, with the step as the sequence too."""
        return [
            Manifest(
                name=f"s{step}", id=str(step), sequence=step, created=MOMENT, run="run", files=(),
                progress={"step": step}, metrics={"loss": losses[f"s{step}"]} if f"s{step}" in losses else {},
            )
            for step in sorted(steps, reverse=True)
        ]  # fmt: skip

    def test_which_may_be_removed(self) -> None:
        all_five, nan = self.listed(1, 2, 3, 4, 5, s1=3.0, s2=1.0, s3=2.0, s4=2.0), float("nan")
        for keep, listed, damaged, removable in (
            (Keep(), [], (), []),
            (Keep(), all_five[:1], (), []),
            (Keep(), all_five, (), ["s4", "s3", "s2", "s1"]),
            (Keep(last=2), all_five, (), ["s3", "s2", "s1"]),
            (Keep(last=5), all_five, (), []),
            (Keep(last=9), all_five, (), []),
            (Keep(last=1, every=2), all_five, (), ["s3", "s1"]),
            (Keep(last=1, best=1, metric="loss"), all_five, (), ["s4", "s3", "s1"]),
            (Keep(last=1, best=2, metric="loss"), all_five, (), ["s3", "s1"]),  # of equal ones, the newer
            (Keep(last=1, best=1, metric="loss", mode="max"), all_five, (), ["s4", "s3", "s2"]),
            (Keep(last=1, best=1, metric="other"), all_five, (), []),
            (Keep(last=1, best=1, metric="loss"), self.listed(1, 2, 3, s1=nan, s2=nan), (), []),
            (Keep(last=2), all_five, ("s5", "s3"), ["s1"]),
            (Keep(last=1), all_five, ("s5",), ["s3", "s2", "s1"]),
            (Keep(last=1), all_five, ("s1", "s2", "s3", "s4", "s5"), []),
            (Keep(last=1, best=1, metric="loss"), all_five, ("s2",), ["s3", "s2", "s1"]),
        ):
            assert keep.removable(listed, damaged) == removable, (keep, damaged)

    def test_why_the_best_are_not_known(self) -> None:
        listed = self.listed(1, 2, s1=1.0)
        assert Keep().cannot_rank(listed) == Keep(best=1, metric="x").cannot_rank([]) == ""
        assert Keep(best=1, metric="loss").cannot_rank(listed) == ""
        assert Keep(best=1, metric="x").cannot_rank(listed) == "no checkpoint has a metric 'x'; there are: loss"
        assert Keep(best=1, metric="x").cannot_rank(self.listed(1)).endswith("there are: none")

    def test_a_metric_that_cannot_rank_is_refused_before_a_save(self) -> None:
        keep, nan = Keep(best=1, metric="loss"), float("nan")
        for metrics in ({}, {"loss": 1.0}, {"other": nan}, {"loss": float("inf")}):
            keep.check(metrics, "step 3")
        with pytest.raises(ckpt.MetricError, match="'loss' is NaN at step 3"):
            keep.check({"loss": nan}, "step 3")
        Keep().check({"loss": nan}, "step 3")

    def test_what_contradicts_itself_is_refused(self) -> None:
        for options, why in (
            ({"best": 1}, "best=1 needs metric="),
            ({"metric": "loss"}, "metric='loss' needs best=1 or more"),
            ({"last": 0}, "1 or more"),
            ({"best": -1}, "0 or more"),
        ):
            with pytest.raises(ConfigError, match=why) as raised:
                Keep(**options)
            assert ("needs" in str(raised.value)) == ("needs" in why)
        wrong: list[dict[str, Any]] = [{"best": -1, "metric": None}, {"metric": 3}, {"best": 2, "metric": 3}]
        for each in wrong:
            with pytest.raises(ConfigError) as raised:
                Keep(**each)
            assert "needs" not in str(raised.value)  # said of what is right in itself alone


def test_stored_files_are_read_as_they_are(root: MemoryStorage) -> None:
    root.write("a/x", [DATA])
    file = StoredFile(root, "a/x")
    buffer = bytearray(3)
    file.read_into(2, memoryview(buffer))
    assert (file.read(1, 4), bytes(buffer)) == (DATA[1:4], DATA[2:5])
    assert find(root, "a").problem is not None
    assert catalog.was_committed(find(root, "a").problem)
