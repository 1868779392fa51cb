"""What the parts of a storage do, each by itself: files and their rights, locks, ranges, parts of uploads."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
import random
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import (
    AbsentError,
    ConfigError,
    DamagedError,
    DeniedError,
    FullError,
    LockedError,
    NotDurableError,
    StorageError,
    TransientError,
    TruncatedError,
)
from ckpt.storage import Buffer, LocalStorage, MemoryStorage, Patched, Place, StablePieces, Tiers
from ckpt.storage.base import LostError, below, check_key, read_document
from ckpt.storage.local import files, locks, volatile
from ckpt.storage.local import storage as local_storage
from ckpt.storage.local.files import BLOCK, NotRegularError, is_mostly_holes, open_regular, translated, write_durably
from ckpt.storage.local.locks import LocalLocks
from ckpt.storage.local.storage import OneFolder, read_scattered
from ckpt.storage.local.volatile import VolatileStorage
from ckpt.storage.multipart import Body, scatter, split_into_parts
from ckpt.storage.object_storage import ObjectStorage
from ckpt.storage.retry import SMALL_AT_ONCE, Requests, RetryPolicy
from ckpt.util.aligned_memory import address_of, copy_bytes
from ckpt.util.aligned_memory import make_resident as make_resident_pages
from tests.helpers.storage_contract import sizes

KIB = 1 << 10


class TestRights:
    def test_new_files_have_the_rights_that_the_umask_leaves(self, tmp_path: Path) -> None:
        storage, before = LocalStorage(tmp_path), os.umask(0)
        try:
            storage.write("alone", [b"x"])
            storage.write("stream", iter([b"x"]))
            with storage.grouped():
                storage.write("together", [b"x"])
            os.close(open_regular(tmp_path / "opened", os.O_CREAT | os.O_WRONLY))
        finally:
            os.umask(before)
        assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {
            "alone": 0o666, "stream": 0o666, "together": 0o666, "opened": 0o666,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("folder", "file"), [(0o755, 0o600), (0o775, 0o660), (0o777, 0o666), (0o702, 0o606), (0o1777, 0o600)]
    )
    def test_whoever_may_write_to_a_folder_may_lock_in_it(self, tmp_path: Path, folder: int, file: int) -> None:
        (tmp_path / "root").mkdir()
        (tmp_path / "root").chmod(folder)
        with LocalStorage(tmp_path / "root").lock(".lock", note="me"):
            assert stat.S_IMODE((tmp_path / "root/.lock").stat().st_mode) == file

    def test_the_rights_of_a_lock_file_with_a_second_name_stay(self, tmp_path: Path) -> None:
        (tmp_path / "theirs").touch(mode=0o640)
        (tmp_path / ".lock").hardlink_to(tmp_path / "theirs")
        with LocalStorage(tmp_path).lock(".lock"):
            assert stat.S_IMODE((tmp_path / "theirs").stat().st_mode) == 0o640


class TestLinksInside:
    """Links that stay below the root are followed, those of folders and those of files."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> LocalStorage:
        storage = LocalStorage(tmp_path / "root")
        storage.write("real/inner/object", [b"bytes"])
        (tmp_path / "root/alias").symlink_to("real")
        (tmp_path / "root/real/file").symlink_to("inner/object")
        return storage

    def test_what_is_behind_them_is_there(self, storage: LocalStorage, tmp_path: Path) -> None:
        for key in ("alias/inner/object", "real/file", "alias/file"):
            assert storage.read(key) == b"bytes"
            assert storage.version(key) == storage.version("real/inner/object")
        assert sizes(storage, "alias/inner") == {"alias/inner/object": 5}
        assert sizes(storage) == {"real/inner/object": 5, "real/file": 5}  # no folder is entered through a link
        storage.write("alias/inner/new", [b"new"])
        storage.link("alias/file", "copy")
        assert (tmp_path / "root/real/inner/new").read_bytes() == b"new"
        assert (tmp_path / "root/copy").samefile(tmp_path / "root/real/inner/object")
        assert not (tmp_path / "root/copy").is_symlink()

    def test_one_that_leads_nowhere_is_listed_as_itself(self, storage: LocalStorage, tmp_path: Path) -> None:
        (tmp_path / "root/lost").symlink_to("nowhere")
        assert sizes(storage)["lost"] == len("nowhere")
        assert storage.version("lost") is None
        with pytest.raises(AbsentError):
            storage.read("lost")


@pytest.mark.parametrize(
    ("code", "verb", "kind", "text"),
    [
        (errno.ENOENT, "read", AbsentError, "where does not exist."),
        (errno.ELOOP, "read", AbsentError, "where is no object: Too many levels"),
        (errno.ENAMETOOLONG, "list", AbsentError, "where is no object: File name too long"),
        (errno.ENOTDIR, "write", StorageError, "could not write where: Not a directory."),
        (errno.ENOSPC, "write", FullError, "GB is free there. Free some space"),
        (errno.EDQUOT, "write", FullError, "GB is free there. Free some space"),
        (errno.EACCES, "read", DeniedError, "Make shown readable"),
        (errno.EPERM, "list", DeniedError, "Make shown readable"),
        (errno.EROFS, "write", DeniedError, "Make shown writable"),
        (errno.EACCES, "delete", DeniedError, "Make shown writable"),
        (errno.EIO, "read", TransientError, "could not read where: Input/output error."),
        (errno.ESTALE, "write", TransientError, "could not write where"),
        (errno.EISDIR, "write", StorageError, "could not write where: Is a directory."),
        (errno.EXDEV, "read", StorageError, "could not read where"),
    ],
)
def test_an_error_of_the_system_is_the_storage_error_that_says_what_to_do(
    tmp_path: Path, code: int, verb: str, kind: type[StorageError], text: str
) -> None:
    found = translated(OSError(code, os.strerror(code)), verb, "where", tmp_path, "shown")
    assert type(found) is kind
    assert text in str(found)


def test_a_disk_without_inodes_is_said_to_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, full = os.statvfs(tmp_path), OSError(errno.ENOSPC, "full")

    def told(**fields: int) -> str:
        class Status:
            f_files, f_favail, f_bavail, f_frsize = real.f_files, 1, 3_000_000, 1000

        for name, value in fields.items():
            setattr(Status, name, value)
        monkeypatch.setattr(os, "statvfs", lambda _: Status)
        return str(translated(full, "write", "where", tmp_path, "shown"))

    assert "No inodes are left there" in told(f_files=10, f_favail=0)
    assert "3.00 GB is free there" in told(f_files=10, f_favail=1)
    assert "3.00 GB is free there" in told(f_files=0, f_favail=0)  # a filesystem that counts none
    monkeypatch.undo()
    assert "Free some space, then save again." in str(translated(full, "write", "where", tmp_path / "gone", "shown"))


@pytest.mark.parametrize("name", ["pipe", "link", "folder", "file", "absent"])
def test_only_a_regular_file_is_opened(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    before = os.listdir("/proc/self/fd")
    if name == "file":
        os.close(open_regular(tmp_path / name, os.O_RDONLY | os.O_NOFOLLOW))
    else:
        kinds: dict[str, tuple[type[OSError], str]] = {
            "pipe": (NotRegularError, "it is a named pipe in place of a file"),
            "link": (NotRegularError, "it is a symbolic link in place of a file"),
            "folder": (IsADirectoryError, "Is a directory"),
            "absent": (FileNotFoundError, "No such file"),
        }
        with pytest.raises(kinds[name][0], match=kinds[name][1]):
            open_regular(tmp_path / name, os.O_RDONLY | os.O_NOFOLLOW)
    assert os.listdir("/proc/self/fd") == before


def test_where_a_large_file_has_holes_its_data_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = 64 * KIB
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(64 * page)
        for at in (1, 2, 40):
            os.pwrite(file.fileno(), b"x" * page, at * page)
        descriptor = file.fileno()
        assert not is_mostly_holes(descriptor, 0, 64 * page)  # too small to matter
        monkeypatch.setattr(files, "_LARGE", 8 * page)
        found = {
            (start, stop): is_mostly_holes(descriptor, start * page, stop * page)
            for start, stop in ((0, 64), (0, 24), (0, 16), (0, 17), (3, 60), (33, 41), (0, 7))
        }
        assert found == {
            (0, 64): True, (0, 24): True, (0, 16): False, (0, 17): True, (3, 60): True, (33, 41): False, (0, 7): False,
        }  # fmt: skip
        monkeypatch.setattr(files, "_MOST_EXTENTS", 1)
        assert not is_mostly_holes(descriptor, 0, 64 * page)  # so scattered that it is not looked at to the end


class TestDirectWrites:
    @pytest.fixture
    def writes(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """The start and the length of every write of a block, as they are made."""
        found: list[tuple[int, int]] = []
        real = os.pwrite

        def noted(descriptor: int, data: memoryview, start: int) -> int:
            found.append((start, len(data)))
            return real(descriptor, data, start)

        monkeypatch.setattr(os, "pwrite", noted)
        return found

    @pytest.mark.parametrize("aligned", [True, False])
    def test_all_blocks_but_the_last_are_whole_and_begin_at_a_multiple_of_their_size(
        self, tmp_path: Path, writes: list[tuple[int, int]], aligned: bool
    ) -> None:
        memory = mmap.mmap(-1, 2 * BLOCK + 4096)
        memory[:] = random.Random(1).randbytes(len(memory))
        view = memoryview(memory)
        pieces: list[Buffer] = [view if aligned else view[1:], b"between", view]
        with open(tmp_path / "file", "xb", buffering=0) as file:
            write_durably(file.fileno(), pieces)
        assert (tmp_path / "file").read_bytes() == b"".join(pieces)
        size = sum(map(len, pieces))
        whole = {(start, BLOCK) for start in range(0, size - BLOCK, BLOCK)}
        last = size // BLOCK * BLOCK
        assert set(writes) == whole | {(last, size - last)}

    @pytest.mark.parametrize("aligned", [True, False])
    def test_memory_at_a_page_is_written_without_a_copy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aligned: bool
    ) -> None:
        copied, real = list[int](), copy_bytes

        def noted(source: memoryview, target: memoryview) -> None:
            copied.append(len(source))
            real(source, target)

        monkeypatch.setattr(files, "copy_bytes", noted)
        memory = memoryview(mmap.mmap(-1, BLOCK + 8192))
        for at, size in ((0, BLOCK), (4096, BLOCK), (0, BLOCK + 3)) if aligned else ((1, BLOCK), (4097, BLOCK)):
            copied.clear()
            with open(tmp_path / f"{at}-{size}", "xb", buffering=0) as file:
                write_durably(file.fileno(), [memory[at : at + size]])
            assert sum(copied) == (size % BLOCK if aligned else size)
            assert (tmp_path / f"{at}-{size}").stat().st_size == size

    def test_a_stream_is_reserved_in_steps_and_no_more_is_kept_than_was_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[tuple[int, int]] = []

        def reserved(_: int, start: int, size: int) -> bool:
            asked.append((start, size))
            return True

        monkeypatch.setattr(files, "_RESERVED", 2 * BLOCK)
        monkeypatch.setattr(files, "reserve", reserved)
        given: list[tuple[str, Iterable[bytes]]] = [
            ("stream", iter([b"x" * BLOCK] * 3)),
            ("known", [b"x" * (5 * BLOCK + 1)]),
        ]
        for name, pieces in given:
            asked.append((-1, -1))
            with open(tmp_path / name, "xb", buffering=0) as file:
                write_durably(file.fileno(), pieces)
        assert asked == [
            (-1, -1), (0, 2 * BLOCK), (2 * BLOCK, 2 * BLOCK),
            (-1, -1), (0, 2 * BLOCK), (2 * BLOCK, 2 * BLOCK), (4 * BLOCK, BLOCK + 1),
        ]  # fmt: skip
        assert (tmp_path / "stream").stat().st_size == 3 * BLOCK
        assert (tmp_path / "known").stat().st_size == 5 * BLOCK + 1

    def test_room_that_is_missing_ends_a_write_of_known_size_and_not_that_of_a_stream(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def full(descriptor: int, start: int, size: int) -> bool:
            asked.append(start)
            raise OSError(errno.ENOSPC, "no room for that much")

        monkeypatch.setattr(files, "reserve", full)
        monkeypatch.setattr(files, "_RESERVED", BLOCK)
        storage = LocalStorage(tmp_path)
        storage.write("stream", iter([b"x" * BLOCK, b"y" * BLOCK]))
        assert sizes(storage) == {"stream": 2 * BLOCK}
        assert asked == [0]  # and not again
        with pytest.raises(FullError):
            storage.write("known", [b"x" * BLOCK])
        assert sizes(storage) == {"stream": 2 * BLOCK}

    def test_no_room_is_reserved_where_the_system_has_none(self, tmp_path: Path) -> None:
        with open(tmp_path / "file", "xb", buffering=0) as file:
            assert files.reserve(file.fileno(), 0, 8 * KIB)
            assert os.fstat(file.fileno()).st_size == 8 * KIB
            with pytest.raises(OSError, match="File too large"):
                files.reserve(file.fileno(), 1 << 62, 1 << 62)
        read, write = os.pipe()
        try:
            assert not files.reserve(write, 0, 8 * KIB)
        finally:
            os.close(read)
            os.close(write)


class TestScatteredReads:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Iterator[tuple[int, bytes]]:
        data = random.Random(3).randbytes((9 << 20) + 77)
        (tmp_path / "file").write_bytes(data)
        descriptor = os.open(tmp_path / "file", os.O_RDONLY)
        yield descriptor, data
        os.close(descriptor)

    def test_no_more_is_read_past_the_cache_than_the_pages_of_what_is_wanted(
        self, file: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        descriptor, data = file
        asked: list[tuple[int, int]] = []
        real = os.preadv

        def noted(which: int, buffers: list[memoryview], start: int) -> int:
            asked.append((start, sum(map(len, buffers))))
            return real(which, buffers, start)

        monkeypatch.setattr(local_storage, "_is_cached", lambda *_: False)
        monkeypatch.setattr(os, "preadv", noted)
        buffers = [bytearray(300_000), bytearray(100)]
        assert read_scattered(descriptor, 5000, [memoryview(buffer) for buffer in buffers]) == 0
        assert b"".join(buffers) == data[5000:305_100]
        assert asked == [(4096, 303_104)]

    def test_the_kernel_is_asked_what_is_cached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[int, ...]] = []
        answers: list[tuple[int, int]] = []

        class Kernel:
            def syscall(self, number: int, descriptor: int, span: Any, found: Any, flags: int) -> int:
                asked.append((number, descriptor, span._obj.start, span._obj.size, flags))
                answer, found._obj.cached = answers.pop()
                return answer

        monkeypatch.setattr(local_storage, "_libc", Kernel())
        for *answer, expected in ((0, 0, False), (0, 50, False), (0, 51, True), (0, 100, True), (-1, 0, True)):
            answers.append((answer[0], answer[1]))
            assert local_storage._is_cached(7, 4096, 100 * mmap.PAGESIZE) == expected
        assert set(asked) == {(451, 7, 4096, 100 * mmap.PAGESIZE, 0)}

    def test_little_and_what_is_wanted_again_is_read_through_the_cache(
        self, file: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        descriptor, data = file
        past: list[int] = []

        def past_cache(_: int, start: int, left: list[memoryview]) -> tuple[int, list[memoryview]]:
            past.append(sum(map(len, left)))
            return start, left

        monkeypatch.setattr(local_storage, "_past_cache", past_cache)
        for cached in (True, False):
            monkeypatch.setattr(local_storage, "_is_cached", lambda *_, cached=cached: cached)
            for size in (256 * KIB - 1, 256 * KIB):
                for again in (True, False):
                    buffer = bytearray(size)
                    assert read_scattered(descriptor, 3, [memoryview(buffer)], cached=again) == 0
                    assert buffer == data[3 : 3 + size]
        assert past == [256 * KIB]

    def test_one_call_takes_a_gigabyte_and_as_many_buffers_as_the_system_does(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(local_storage, "_BYTES_AT_ONCE", 100)
        monkeypatch.setattr(local_storage, "_BUFFERS_AT_ONCE", 4)

        def taken(*lengths: int) -> list[int]:
            return [len(part) for part in local_storage._at_once([memoryview(bytes(length)) for length in lengths])]

        assert taken(60, 60, 60) == [60, 40]
        assert taken(100, 1) == [100]
        assert taken(1, 1, 1, 1, 1) == [1, 1, 1, 1]

    @pytest.mark.parametrize("refused", [errno.EINVAL, errno.EPERM, errno.EIO])
    def test_what_direct_reads_refuse_the_cache_serves_and_a_broken_disk_is_an_error(
        self, file: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch, refused: int
    ) -> None:
        descriptor, data = file
        real, before = os.preadv, os.listdir("/proc/self/fd")

        def broken(which: int, buffers: list[memoryview], start: int) -> int:
            if fcntl.fcntl(which, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(refused, os.strerror(refused))
            return real(which, buffers, start)

        monkeypatch.setattr(local_storage, "_is_cached", lambda *_: False)
        monkeypatch.setattr(os, "preadv", broken)
        buffer = bytearray(300_000)
        if refused == errno.EIO:
            with pytest.raises(OSError, match="Input/output error"):
                read_scattered(descriptor, 1, [memoryview(buffer)])
        else:
            assert read_scattered(descriptor, 1, [memoryview(buffer)]) == 0
            assert buffer == data[1:300_001]
        assert os.listdir("/proc/self/fd") == before


class TestLocks:
    def test_a_holder_without_a_note_is_named_with_its_user_and_its_start(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        with storage.lock("object"), pytest.raises(LockedError) as caught, storage.lock("object"):
            pass
        found = re.search(r"object is held: by process (\d+) of user (\S+), running since (\S+)\.", str(caught.value))
        assert found is not None
        assert int(found.group(1)) == os.getpid()
        began = time.mktime(time.strptime(found.group(3), "%Y-%m-%dT%H:%M:%SZ")) - time.timezone
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
        assert began == pytest.approx(time.time() - age, abs=5)

    def test_several_holders_are_all_named(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        storage.write("object", [b"x"])
        with (
            storage.lock("object", shared=True),
            storage.lock("object", shared=True),
            pytest.raises(LockedError) as caught,
            storage.lock("object"),
        ):
            pass
        assert str(caught.value).count(f"process {os.getpid()} of user") == 2
        assert " and process " in str(caught.value)

    def test_the_note_in_a_file_with_a_second_name_is_shown_to_nobody(self, tmp_path: Path) -> None:
        (tmp_path / "theirs").write_bytes(b"a secret")
        (tmp_path / ".lock").hardlink_to(tmp_path / "theirs")
        storage = LocalStorage(tmp_path)
        with storage.lock(".lock", note="me"), pytest.raises(LockedError, match="by process"), storage.lock(".lock"):
            pass
        assert (tmp_path / "theirs").read_bytes() == b"a secret"

    def test_a_shorter_note_leaves_nothing_of_a_longer_one(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        (tmp_path / ".lock").write_text("somebody with a long note, who was killed")
        with storage.lock(".lock", note="me"):
            assert (tmp_path / ".lock").read_text() == "me"
        assert (tmp_path / ".lock").read_text() == ""
        with storage.lock(".lock", shared=True, note="a reader"):
            assert (tmp_path / ".lock").read_text() == ""

    def test_what_is_locked_must_be_there_for_readers_and_is_made_for_a_writer(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path / "root")
        for key in (".lock", "object", "folder/object"):
            with pytest.raises(AbsentError), storage.lock(key, shared=True):
                pass
            assert not (tmp_path / "root").exists()
        with storage.lock("folder/.lock", note="me"):
            assert (tmp_path / "root/folder/.lock").read_text() == "me"

    def test_a_folder_whose_name_begins_with_a_dot_is_locked_beside_it(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        storage.write(".cache/object", [b"x"])
        with storage.lock(".cache", note="me"), pytest.raises(LockedError), storage.lock(".cache"):
            assert sorted(os.listdir(tmp_path)) == [".cache", "..cache.ckpt-lock"]
        assert os.listdir(tmp_path) == [".cache"]

    def test_one_that_waits_for_the_right_to_rename_gives_up_and_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckpt.storage.local.locks._PATIENCE", 0.05)
        storage = LocalStorage(tmp_path)
        storage.write("object", [b"old"])
        with storage._locks.renaming():
            began = time.monotonic()
            with pytest.raises(
                StorageError, match=r"waited 0 s for it\. Nothing was changed\. End that process"
            ) as caught:
                storage.write("object", [b"new"], over=storage.version("object"))
            assert time.monotonic() - began >= 0.05
            assert not isinstance(caught.value, LockedError)
            storage.write("other", [b"any version may be replaced without it"])
        assert storage.read("object") == b"old"
        storage.write("object", [b"new"], over=storage.version("object"))
        assert sorted(os.listdir(tmp_path)) == ["object", "other"]

    def test_no_child_is_forked_while_a_lock_is_taken_or_released(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        free: list[tuple[str, bool]] = []

        def noted(name: str) -> None:
            real = getattr(LocalLocks, name)

            def call(*given: Any, **named: Any) -> Any:
                def ask() -> None:
                    taken = locks.no_fork.acquire(blocking=False)
                    free.append((name, taken))
                    if taken:
                        locks.no_fork.release()

                asking = threading.Thread(target=ask)
                asking.start()
                asking.join()
                return real(*given, **named)

            monkeypatch.setattr(LocalLocks, name, call)

        noted("_locked")
        noted("_leave")
        with LocalStorage(tmp_path).lock("object"):
            pass
        assert free == [("_locked", False), ("_leave", False)]

    def test_a_child_has_no_lock_of_its_parent(self, tmp_path: Path) -> None:
        assert not locks._held
        descriptor = os.open(tmp_path, os.O_RDONLY)
        locks._held.add(descriptor)
        locks.no_fork.acquire()  # as before a fork
        locks._release_in_child()
        assert not locks._held
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        free: list[bool] = []

        def ask() -> None:
            free.append(locks.no_fork.acquire(blocking=False))
            locks.no_fork.release()

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join()
        assert free == [True]

    def test_a_filesystem_without_locks_has_nothing_left_of_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_locks(descriptor: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", no_locks)
        before, storage = os.listdir("/proc/self/fd"), LocalStorage(tmp_path)
        with storage.lock("object"), storage.lock("object"):
            assert os.listdir(tmp_path) == []
        assert os.listdir("/proc/self/fd") == before

    def test_one_that_waits_asks_less_and_less_often(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pauses, storage = list[float](), LocalStorage(tmp_path)

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 10:
                held.__exit__(None, None, None)

        held = storage._locks.renaming()
        held.__enter__()
        monkeypatch.setattr("time.sleep", sleep)
        with storage._locks.renaming():
            pass
        assert pauses == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.05, 0.05, 0.05, 0.05]


class TestVolatile:
    """Files in memory: their pages are used again, and those that another process holds are followed."""

    LARGE = 64 << 10

    def test_a_file_over_a_longer_one_has_its_own_length(self, tmp_path: Path) -> None:
        storage = VolatileStorage(tmp_path)
        for size in (5 * self.LARGE, 2 * self.LARGE, 3 * self.LARGE + 1):
            storage.write("object", [os.urandom(size)])
            inode = (tmp_path / "object").stat().st_ino
            storage.delete(["object"])
            data = os.urandom(size - 1)
            storage.write("other", [data])
            assert storage.read("other") == data
            assert (tmp_path / "other").stat().st_ino == inode
            assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o600
            storage.delete(["other"])

    def test_the_spare_of_the_nearest_size_is_taken(self, tmp_path: Path) -> None:
        storage = VolatileStorage(tmp_path)
        inodes = {}
        for size in (2, 4, 8):
            storage.write(str(size), [bytes(size * self.LARGE)])
            inodes[size] = (tmp_path / str(size)).stat().st_ino
        storage.delete(["2", "4", "8"])
        for wanted, nearest in ((5, 4), (7, 8), (9, 2)):
            storage.write("object", [bytes(wanted * self.LARGE)])
            assert (tmp_path / "object").stat().st_ino == inodes[nearest]
            os.rename(tmp_path / "object", tmp_path / f"kept-{wanted}")
        storage.write("small", [bytes(self.LARGE - 1)])
        storage.delete(["small"])
        assert [name for name in os.listdir(tmp_path) if name.startswith(".spare")] == []
        storage.trim()

    def test_another_process_holds_what_is_large_or_of_unknown_size(self, tmp_path: Path) -> None:
        held: list[str] = []

        def hold(path: Path) -> int:
            held.append(path.name)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

        storage = VolatileStorage(tmp_path, hold)
        for key, pieces, expected in (
            ("small", [bytes(self.LARGE - 1)], 0), ("large", [bytes(self.LARGE)], 1), ("stream", iter([b"x"]), 2),
        ):  # fmt: skip
            storage.write(key, pieces)
            assert len(held) == expected
        before = os.umask(0)
        try:
            VolatileStorage(tmp_path).write("plain", [b"x"])
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "plain").stat().st_mode) == 0o600

    def test_a_link_to_held_memory_is_followed_until_its_holder_ends(self, tmp_path: Path) -> None:
        storage, memory = VolatileStorage(tmp_path), os.memfd_create("ckpt")
        os.write(memory, b"bytes")
        (tmp_path / "object").symlink_to(f"/proc/self/fd/{memory}")
        before = len(os.listdir("/proc/self/fd"))
        assert storage.read("object") == b"bytes"
        assert sizes(storage) == {"object": 5}
        assert storage.version("object") is not None
        storage.link("object", "again")
        assert storage.read("again") == b"bytes"
        with pytest.raises(AbsentError):
            storage.read("object/below")
        assert len(os.listdir("/proc/self/fd")) == before
        os.close(memory)
        with pytest.raises(AbsentError):
            storage.read("object")
        assert storage.version("object") is None
        (tmp_path / "outside").symlink_to("/etc/hostname")
        with pytest.raises(AbsentError):
            storage.read("outside")
        assert len(os.listdir("/proc/self/fd")) == before - 1

    def test_held_memory_with_another_name_is_not_used_again(self, tmp_path: Path) -> None:
        storage, memory = VolatileStorage(tmp_path), os.memfd_create("ckpt")
        os.write(memory, bytes(self.LARGE))
        holder = tmp_path / "holder"
        holder.mkdir()
        (holder / "token").symlink_to(f"/proc/self/fd/{memory}")
        for name in ("one", "two"):
            os.link(holder / "token", tmp_path / name, follow_symlinks=False)
        storage.delete(["one"])
        assert sorted(os.listdir(tmp_path)) == ["holder", "two"]
        storage.delete(["two"])
        assert len([name for name in os.listdir(tmp_path) if name.startswith(".spare-65536-")]) == 1
        storage.write("new", [b"x" * self.LARGE])
        assert os.pread(memory, 3, 0) == b"xxx"
        os.close(memory)

    def test_a_reserved_file_becomes_the_object_if_it_is_what_it_was(self, tmp_path: Path) -> None:
        storage = VolatileStorage(tmp_path / "root")
        for change in ("", "swept", "linked", "another"):
            descriptor, file = storage.reserve(self.LARGE)
            assert os.fstat(descriptor).st_size == self.LARGE
            os.pwrite(descriptor, b"y" * self.LARGE, 0)
            if change in ("swept", "another"):
                os.unlink(file.path)
            if change == "linked":
                os.link(file.path, tmp_path / "second name")
            if change == "another":
                Path(file.path).write_bytes(b"z" * self.LARGE)
            arrived: list[bool] = []

            def pieces(arrived: list[bool] = arrived) -> Iterator[memoryview]:
                arrived.append(True)
                yield memoryview(b"y" * self.LARGE)

            storage.write("object", StablePieces(self.LARGE, pieces, file))
            same = (tmp_path / "root/object").stat().st_ino == os.fstat(descriptor).st_ino
            assert same == (change == "")
            assert storage.read("object") == b"y" * self.LARGE
            assert arrived
            storage.give_up(file)
            os.close(descriptor)
        assert (tmp_path / "second name").read_bytes() == b"y" * self.LARGE

    def test_chunks_are_given_their_pages_from_a_page_on_and_these_are_forgotten(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(volatile, "_CHUNK", 10_000)
        resident, forgotten = set[tuple[int, int]](), set[tuple[int, int]]()
        real = make_resident_pages
        answers = [True]

        def make_resident(view: memoryview) -> bool:
            assert address_of(view) % mmap.PAGESIZE == 0
            resident.add((address_of(view), len(view)))
            return answers[0] and real(view)

        monkeypatch.setattr(volatile, "make_resident", make_resident)
        monkeypatch.setattr(volatile, "forget_pages", lambda view: forgotten.add((address_of(view), len(view))))
        data = os.urandom(33_333)
        for answers in ([True], [False]):
            resident.clear()
            forgotten.clear()
            with open(tmp_path / "file", "w+b") as file:
                volatile.overwrite(file.fileno(), [data[:11_111], data[11_111:]])
            assert (tmp_path / "file").read_bytes() == data
            assert len(resident) == 5
            assert forgotten == (resident if answers[0] else set())


class TestRequests:
    def test_while_it_is_given_up_nothing_is_asked_and_afterwards_it_is_again(self) -> None:
        requests, asked = Requests(RetryPolicy(), "the store"), list[int]()

        def attempt() -> int:
            asked.append(1)
            return 7

        assert (requests.progress, requests.make(attempt), requests.progress) == (0, 7, 1)
        with requests.giving_up():
            with pytest.raises(TransientError, match=r"given up: the server of the store did not answer\."):
                requests.make(attempt)
            with requests.giving_up():
                pass
            with pytest.raises(TransientError, match="given up"):
                requests.make(attempt)
        assert (requests.make(attempt), len(asked), requests.progress) == (7, 2, 2)

    def test_a_request_under_way_is_not_made_again_once_it_is_given_up(self) -> None:
        requests, tries = Requests(RetryPolicy(first_pause=60.0, longest_pause=60.0), "the store"), list[int]()
        failed, ended = threading.Event(), list[str]()

        def attempt() -> None:
            tries.append(1)
            failed.set()
            raise TransientError("busy.")

        def make() -> None:
            try:
                requests.make(attempt)
            except TransientError as error:
                ended.append(str(error))

        asking = threading.Thread(target=make)
        asking.start()
        assert failed.wait(60)
        while not requests._problem:  # noted once it waits for the next try
            time.sleep(0.001)
        with requests.giving_up():
            asking.join(60)
        assert ended == ["given up: busy."]
        assert not requests._under_way
        assert len(tries) == 1

    def test_small_requests_do_not_wait_for_large_ones(self) -> None:
        requests, came, go = Requests(RetryPolicy(), at_once=1), threading.Event(), threading.Event()

        def slow() -> bool:
            came.set()
            return go.wait(60)

        asking = [threading.Thread(target=lambda: requests.make(slow, is_large=True))]
        asking[0].start()
        assert came.wait(60)
        assert [requests.make(lambda: 7) for _ in range(3)] == [7, 7, 7]
        assert not requests._large.acquire(blocking=False)
        for _ in range(SMALL_AT_ONCE):
            assert requests._small.acquire(blocking=False)
        assert not requests._small.acquire(blocking=False)
        go.set()
        asking[0].join(60)
        assert requests._large.acquire(blocking=False)

    def test_no_more_large_pieces_are_under_way_than_may_be(self) -> None:
        requests, at_work, most = Requests(RetryPolicy(), at_once=2), list[int](), list[int]()
        together = threading.Semaphore(0)

        def attempt() -> None:
            at_work.append(1)
            most.append(len(at_work))
            together.acquire(timeout=0.05)
            at_work.pop()

        threads = [threading.Thread(target=lambda: requests.make(attempt, is_large=True)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(most) == 2

    @pytest.mark.parametrize("lost", [True, False])
    def test_nothing_is_changed_in_a_store_whose_lease_is_lost(
        self, monkeypatch: pytest.MonkeyPatch, lost: bool
    ) -> None:
        objects = RecordedObjects()
        storage = ObjectStorage(objects)  # type: ignore[arg-type]

        def confirm() -> None:
            if lost:
                raise LostError("lost")

        monkeypatch.setattr(storage._leases, "confirm", confirm)
        calls: list[Callable[[], object]] = [
            lambda: storage.write("a", [b""]),
            lambda: storage.link("a", "b"),
            lambda: storage.delete(["a"]),
            lambda: storage.sweep(),
        ]
        for call in calls:
            if lost:
                with pytest.raises(LostError):
                    call()
            else:
                call()
        assert len(objects.asked) == (0 if lost else 4)


class TestGroupsOfFiles:
    def test_a_folder_that_cannot_be_synced_is_named_with_all_its_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage, real = LocalStorage(tmp_path), os.fsync
        storage.write("a/x", [b"1"])

        def failing(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(errno.EIO, "broken")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(NotDurableError, match=r"wrote \S*/a/x, but could not sync the folder: broken\."):
            storage.write("a/x", [b"2"])
        group = storage.grouped()
        group.__enter__()
        for key in ("a/x", "a/y"):
            storage.write(key, [b"3"])
        with pytest.raises(NotDurableError, match=r"/a/x, .*/a/y, but could not sync the folder"):
            group.__exit__(None, None, None)
        assert sizes(storage) == {"a/x": 1, "a/y": 1}

    def test_a_file_that_could_not_be_synced_fails_the_group_also_when_it_is_left(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The kernel reports a failed fsync once: a second try would find nothing wrong."""
        storage = LocalStorage(tmp_path)
        failed: list[int] = []

        def failing(descriptor: int) -> None:
            if not failed:
                failed.append(descriptor)
                raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(os, "fsync", failing)
        monkeypatch.setattr(files, "_MOST_FILES", 2)
        (tmp_path / "a").mkdir()

        def both() -> None:
            with storage.grouped():
                for name in ("x", "y"):
                    try:
                        storage.write(f"a/{name}", [b"1"])
                    except TransientError:
                        assert name == "y"  # with which the group is full

        with pytest.raises(TransientError, match="broken"):
            both()
        assert os.listdir(tmp_path / "a") == []

    def test_a_disk_that_runs_full_as_it_begins_to_write_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code, calls = 0, list[tuple[object, ...]]()

        def call(_: int, *given: object) -> int:
            calls.append(given)
            return -1

        monkeypatch.setattr(files, "c_function", lambda *_: call)
        monkeypatch.setattr("ctypes.get_errno", lambda: code)
        storage = LocalStorage(tmp_path)
        for code in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP):
            with storage.grouped():
                storage.write(f"hint/{code}", [b"x"])
        code = errno.ENOSPC
        with pytest.raises(FullError), storage.grouped():
            storage.write("full", [b"x"])
        assert len(sizes(storage)) == 4
        assert set(calls) == {(0, 0, 2)}  # all of the file, without waiting

    def test_a_group_that_is_full_is_named_before_the_next_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(files, "_MOST_FILES", 2)
        storage = LocalStorage(tmp_path)
        with storage.grouped():
            for number in range(5):
                storage.write(f"a/{number}", [b"x"])
                assert len(sizes(storage)) == (number + 1) // 2 * 2


class TestFolders:
    def test_one_folder_lists_that_folder_alone_and_keeps_its_locks_inside(self, tmp_path: Path) -> None:
        outer = LocalStorage(tmp_path)
        for key in ("wanted/object", "other/object", "beside"):
            outer.write(key, [b"x"])
        left = tmp_path / "wanted/.x.0123.ckpt-tmp"
        left.write_bytes(b"123")
        (tmp_path / ".y.0123.ckpt-tmp").touch()
        storage = OneFolder(tmp_path / "wanted")
        assert storage.name == "wanted"
        assert set(sizes(storage)) == {"wanted/object"}
        assert set(sizes(storage, "other")) == {"other/object"}
        assert [(write.key, write.size) for write in storage.unfinished()] == [("wanted/.x.0123.ckpt-tmp", 3)]
        with storage.lock(".lock", note="me"):
            assert (tmp_path / "wanted/.lock").read_text() == "me"
        with storage.lock("wanted"):
            assert (tmp_path / ".wanted.ckpt-lock").exists()

    def test_a_sweep_takes_what_is_old_enough(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        storage = LocalStorage(tmp_path)
        for name, age in (("young", 50), ("old", 150)):
            (tmp_path / name).mkdir()
            path = tmp_path / name / f".x.{name}.ckpt-tmp"
            path.touch()
            os.utime(path, (time.time() - age,) * 2)
        ages = {write.key.partition("/")[0]: write.age for write in storage.unfinished()}
        assert ages == {"young": pytest.approx(50, abs=30), "old": pytest.approx(150, abs=30)}
        storage.sweep(age=100)
        assert os.listdir(tmp_path) == ["young"]
        storage.sweep("elsewhere")
        assert os.listdir(tmp_path) == ["young"]
        with monkeypatch.context() as patch:

            def refuse(path: str, **_: object) -> None:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))

            patch.setattr(os, "unlink", refuse)
            with pytest.raises(StorageError, match="weep"):
                storage.sweep()
        storage.sweep()
        assert os.listdir(tmp_path) == []

    def test_a_root_is_refused_that_is_no_path(self) -> None:
        for root in (None, 3, b"bytes", ["a"]):
            with pytest.raises(ConfigError, match="a root must be a path"):
                LocalStorage(root)  # type: ignore[arg-type]

    def test_folders_that_somebody_else_makes_meanwhile_are_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real_path, real = Path.mkdir, os.mkdir

        def made_first(path: Path) -> None:
            real_path(path)
            raise FileExistsError(errno.EEXIST, "somebody else was first")

        def made(*given: Any, **named: Any) -> None:
            real(*given, **named)
            raise FileExistsError(errno.EEXIST, "somebody else was first")

        monkeypatch.setattr(Path, "mkdir", made_first)
        files.make_directories(tmp_path / "a/b")
        monkeypatch.setattr(Path, "mkdir", real_path)
        monkeypatch.setattr(os, "mkdir", made)
        LocalStorage(tmp_path / "a/b").write("c/d/object", [b"x"])
        assert (tmp_path / "a/b/c/d/object").read_bytes() == b"x"

    def test_every_spelling_of_a_root_is_one_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "root").mkdir()
        (tmp_path / "link").symlink_to("root")
        monkeypatch.chdir(tmp_path)
        spellings = ["root", "./root/", "link", str(tmp_path / "root"), "other/../root"]
        assert {LocalStorage(root).place for root in spellings} == {os.path.realpath(tmp_path / "root")}
        assert [LocalStorage(root).url for root in spellings[:3]] == ["root", "root", "link"]

    def test_a_link_to_a_folder_or_to_nothing_is_refused(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        storage.write("folder/object", [b"x"])
        for source in ("folder", "absent"):
            with pytest.raises(AbsentError):
                storage.link(source, "target")
        assert sizes(storage) == {"folder/object": 1}

    def test_an_error_of_a_link_that_says_nothing_of_links_is_raised(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object, **__: object) -> None:
            raise OSError(errno.EIO, "broken")

        storage = LocalStorage(tmp_path)
        storage.write("a", [b"x"])
        monkeypatch.setattr(os, "link", broken)
        with pytest.raises(TransientError, match="broken"):
            storage.link("a", "b")
        assert os.listdir(tmp_path) == ["a"]


class TestDocuments:
    def test_no_more_than_the_most_is_read(self, tmp_path: Path) -> None:
        storage = MemoryStorage("documents")
        storage.write("document", [b"12345"])
        assert read_document(storage, "document", 5) == b"12345"
        with pytest.raises(DamagedError, match="more than 4 bytes"):
            read_document(storage, "document", 4)
        with open(tmp_path / "holes", "wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(DamagedError, match=r"holes is damaged: .* almost all"):
            read_document(LocalStorage(tmp_path), "holes", 1 << 40)

    def test_keys_lie_below_their_folders(self) -> None:
        assert below("a/b", "")
        assert below("a/b", "a")
        assert below("a/b", "a/")
        assert not below("ab/c", "a")
        assert not below("a", "a")
        assert check_key("a/b") == "a/b"
        for key in ("a/\ud800", "..", ""):
            with pytest.raises(ConfigError, match="is not a key"):
                check_key(key)


class TestOverlays:
    def test_tiers_read_from_the_first_that_has_an_object(self) -> None:
        first, second = MemoryStorage("tiers-1"), MemoryStorage("tiers-2")
        first.write("both", [b"first"])
        second.write("both", [b"second one"])
        second.write("only", [b"0123456789"])
        storage = Tiers(first, second)
        assert storage.is_local
        assert storage.url == "memory://tiers-1"
        assert storage.read("both") == b"first"
        assert storage.read("only", 2, 5) == b"234"
        assert storage.read("only") == b"0123456789"
        assert storage.read("both", 1, 3) == b"ir"
        for key, expected in (("both", b"rs"), ("only", b"23")):
            buffer = bytearray(2)
            storage.read_into(key, 2, memoryview(buffer))
            assert buffer == expected
        assert sizes(storage) == {"both": 5, "only": 10}
        storage.write("new", [b"x"])
        assert set(sizes(first)) == {"both", "new"}
        with pytest.raises(AbsentError):
            storage.read("absent")

    def test_a_patched_storage_is_as_local_as_all_its_places(self) -> None:
        first, other = MemoryStorage("patched-1"), MemoryStorage("patched-2")
        other.write("elsewhere", [b"0123"])
        storage = Patched(first, {"here": Place(other, "elsewhere", 4)})
        assert storage.is_local
        buffer = bytearray(2)
        storage.read_into("here", 1, memoryview(buffer))
        assert buffer == b"12"
        assert storage.read("here", 1, 3) == b"12"
        assert storage.read("here") == b"0123"
        far = MemoryStorage("patched-3")
        far.is_local = False
        assert not Patched(first, {"here": Place(far, "elsewhere", 4)}).is_local
        assert not Patched(first, {"here": Place(other, "elsewhere", 4), "there": Place(far, "x", 4)}).is_local
        assert not Patched(far, {}).is_local
        assert not Patched(far, {"here": Place(other, "elsewhere", 4)}).is_local

    def test_a_lock_in_memory_says_who_holds_it(self) -> None:
        storage = MemoryStorage("held")
        with storage.lock("key"), pytest.raises(LockedError, match=r"memory://held/key is held: by somebody else\."):
            storage.lock("key").__enter__()
        with storage.lock("key", shared=True), storage.lock("key", shared=True), pytest.raises(LockedError):
            storage.lock("key").__enter__()
        with storage.lock("key", note="me"), pytest.raises(LockedError, match="is held: me"):
            storage.lock("key", shared=True).__enter__()
        storage.write("short", [b"123"])
        with pytest.raises(TruncatedError, match="is 2 bytes too short"):
            storage.read_into("short", 2, memoryview(bytearray(1)), memoryview(bytearray(2)))


class TestParts:
    @pytest.mark.parametrize("stable", [True, False])
    @pytest.mark.parametrize("lengths", [[10], [3, 7], [4, 4, 4], [0, 9, 0], [1] * 9, []])
    def test_all_parts_but_the_last_are_full(self, stable: bool, lengths: list[int]) -> None:
        data = random.Random(0).randbytes(sum(lengths))
        ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
        pieces = [data[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        parts = [b"".join(part) for part in split_into_parts(pieces if stable else iter(pieces), 4)]
        assert b"".join(parts) == data
        assert all(len(part) == 4 for part in parts[:-1])
        assert all(parts)

    def test_parts_grow_so_that_there_are_never_too_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckpt.storage.multipart._MOST_PARTS", 3)
        monkeypatch.setattr("ckpt.storage.multipart._GROWS_AFTER", 2)
        monkeypatch.setattr("ckpt.storage.multipart._CHUNK", 2)
        pieces = [bytes(13)]
        assert [sum(map(len, part)) for part in split_into_parts(pieces, 1)] == [6, 6, 1]
        assert [sum(map(len, part)) for part in split_into_parts([bytes(12)], 1)] == [4, 4, 4]
        assert [sum(map(len, part)) for part in split_into_parts(iter(pieces), 1)] == [1, 1, 2, 2, 3, 3, 1]

    def test_bytes_go_to_the_views_in_turn_and_the_rest_is_returned(self) -> None:
        buffers = [bytearray(3), bytearray(2), bytearray(4)]
        views = [memoryview(buffer) for buffer in buffers]
        views = scatter(b"ab", views)
        assert [len(view) for view in views] == [1, 2, 4]
        views = scatter(b"c", views)
        assert [len(view) for view in views] == [2, 4]
        views = scatter(b"defgh", views)
        assert [len(view) for view in views] == [1]
        assert b"".join(buffers) == b"abcdefgh\0"
        assert scatter(b"", views) == views

    def test_the_body_of_a_request_is_read_from_any_place(self) -> None:
        data = random.Random(4).randbytes(100)
        body = Body([memoryview(data)[:10], memoryview(data)[10:10], memoryview(data)[10:70], memoryview(data)[70:]])
        assert len(body) == 100
        assert body.read(15) == data[:15]
        assert body.tell() == 15
        assert body.read(0) == b""
        assert body.seek(10) == 10
        assert body.read(60) == data[10:70]
        assert body.seek(-5, os.SEEK_CUR) == 65
        assert body.read() == data[65:]
        assert body.read(-1) == b""
        assert body.seek(-3, os.SEEK_END) == 97
        assert body.read(-1) == data[97:]
        assert body.sent == 15 + 60 + 35 + 3

    def test_what_is_sent_for_the_first_time_is_progress(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckpt.storage.multipart._CHUNK", 10)
        monkeypatch.setattr("ckpt.storage.multipart._SWALLOWED", 20)
        progress: list[int] = []
        data = bytes(range(45))
        body = Body([memoryview(data)[:12], memoryview(data)[12:]], lambda: progress.append(body.sent))

        async def send(most: int) -> list[bytes]:
            found = []
            async for view in body:
                found.append(bytes(view))
                if len(found) == most:
                    break
            return found

        first = asyncio.run(send(100))
        assert b"".join(first) == data
        assert [len(part) for part in first] == [10, 2, 8, 10, 10, 5]
        assert progress == [30, 40, 45]  # neither the first bytes, which a network swallows
        assert b"".join(asyncio.run(send(100))) == data
        assert progress == [30, 40, 45]  # nor what is sent again
        assert body.sent == 90
        body.seek(40)
        assert asyncio.run(send(100)) == [data[40:]]


class RecordedObjects:
    """What an `ObjectStorage` asks of a store."""

    url = "store://bucket"

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.answer = ""

    def put(self, key: str, pieces: object, *, over: str | None) -> str:
        self.asked.append(("put", key, over))
        return self.answer

    def remove(self, keys: list[str]) -> None:
        self.asked.append(("remove", *keys))

    def abort(self, prefix: str, age: float) -> None:
        self.asked.append(("abort", prefix, age))

    def copy(self, source: str, target: str) -> None:
        self.asked.append(("copy", source, target))

    def unfinished(self, prefix: str) -> Iterator[object]:
        self.asked.append(("unfinished", prefix))
        return iter(())


def test_a_store_is_asked_in_the_order_and_with_the_ages_that_are_promised() -> None:
    objects = RecordedObjects()
    storage = ObjectStorage(objects)  # type: ignore[arg-type]
    calls: list[tuple[Callable[[], object], list[tuple[object, ...]]]] = [
        (lambda: storage.delete([]), []),
        (lambda: storage.delete(["a"]), [("remove", "a")]),
        (lambda: storage.delete(["a", "b"]), [("remove", "a"), ("remove", "b")]),
        (lambda: storage.delete(list("abcd")), [("remove", "a"), ("remove", "b", "c"), ("remove", "d")]),
        (lambda: storage.sweep(), [("abort", "", 24 * 3600.0)]),
        (lambda: storage.sweep("step"), [("abort", "step/", 0.0)]),
        (lambda: storage.sweep("step", age=5.0), [("abort", "step/", 5.0)]),
        (lambda: storage.sweep(age=5.0), [("abort", "", 5.0)]),
        (lambda: storage.link("a", "b"), [("copy", "a", "b")]),
        (lambda: list(storage.unfinished("step")), [("unfinished", "step/")]),
        (lambda: storage.write("a", [b""], over=None), [("put", "a", None)]),
    ]
    for call, expected in calls:
        objects.asked.clear()
        assert not call()
        assert objects.asked == expected
    objects.answer = "v1"
    assert storage.write("a", [b""]) == "v1"
    assert storage.progress == 0
    assert not storage.is_local
    assert not storage.allow_unconditional
    with storage.giving_up():
        pass
    assert StablePieces.of(iter([b"x"])) is None


@pytest.mark.parametrize(
    ("shared", "number", "raises"),
    [(True, errno.EACCES, False), (True, errno.EROFS, False), (True, errno.EIO, True), (False, errno.EACCES, True)],
)
def test_only_a_reader_who_may_not_write_does_without_a_lock(
    shared: bool, number: int, raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(LocalLocks, "_wait", fails)
    storage = LocalStorage(tmp_path)
    storage.write("a/file", [b"x"])
    if raises:
        with pytest.raises(StorageError), storage.lock("a", shared=shared):
            pass
    else:
        with storage.lock("a", shared=shared):
            pass


def test_nothing_is_listed_beyond_the_longest_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("a/b/deep", [b"x"])
    storage.write("a/near", [b"x"])
    root = len(str(tmp_path))
    for longest, found in ((root + 4, ["a/b/deep", "a/near"]), (root + 3, ["a/near"]), (root + 1, [])):
        monkeypatch.setattr(files, "_LONGEST_PATH", longest)
        assert sorted(entry.key for entry in storage.list()) == found
