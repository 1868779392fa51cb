"""Writing past the page cache: the same bytes, whatever the filesystem allows."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckpt.storage import LocalStorage
from ckpt.storage.local.files import BLOCK, reserve, write_durably
from ckpt.util.aligned_memory import allocate_pages
from tests.helpers.processes import interrupt

pytestmark = pytest.mark.on_disk


def write(path: Path, pieces: Any) -> None:
    with open(path, "xb", buffering=0) as file:
        write_durably(file.fileno(), pieces)


@pytest.mark.parametrize("size", [0, 1, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 4097])
def test_every_size_is_written_as_it_is(tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    write(tmp_path / "file", [data])
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("size", [BLOCK, BLOCK + 1, 5 * BLOCK, 6 * BLOCK + 4097])
def test_memory_is_written_from_where_it_lies(tmp_path: Path, size: int) -> None:
    memory = mmap.mmap(-1, size)
    memory[:] = random.Random(size).randbytes(size)
    write(tmp_path / "file", [memoryview(memory)])
    assert (tmp_path / "file").read_bytes() == memory[:]


def test_pieces_of_any_length_come_in_their_order(tmp_path: Path) -> None:
    dice = random.Random(0)
    pieces = [dice.randbytes(dice.choice([0, 1, 100, 5000, BLOCK // 3, BLOCK + 5])) for _ in range(20)]
    write(tmp_path / "file", iter(pieces))
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


def test_a_piece_may_be_overwritten_once_the_next_is_asked_for(tmp_path: Path) -> None:
    def reused() -> Iterator[memoryview]:
        buffer = bytearray(BLOCK // 2)
        for value in range(10):
            buffer[:] = bytes([value]) * len(buffer)
            yield memoryview(buffer)

    write(tmp_path / "file", reused())
    assert (tmp_path / "file").read_bytes() == b"".join(bytes([value]) * (BLOCK // 2) for value in range(10))


@pytest.mark.slow
def test_a_forked_process_finds_memory_that_a_disk_or_device_works_on_empty_and_may_use_it() -> None:
    memory = allocate_pages(4 << 20)
    memory[0] = 1
    child = os.fork()
    if not child:
        empty = memory[0] == 0
        memory[0] = 2
        memory.close()
        os._exit(not empty)
    assert os.waitpid(child, 0)[1] == 0
    assert memory[0] == 1


def test_files_that_are_written_at_the_same_time_do_not_mix(tmp_path: Path) -> None:
    contents = [random.Random(seed).randbytes(3 * BLOCK + seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: write(tmp_path / str(number), iter([contents[number]])), range(8)))
    assert [(tmp_path / str(number)).read_bytes() == data for number, data in enumerate(contents)] == [True] * 8


@pytest.mark.parametrize("refused", ["open", "write"])
def test_where_direct_writing_is_refused_the_cache_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real_open, real_write = os.open, os.pwrite

    def no_open(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writing here")
        return real_open(path, flags, *mode)

    def no_write(descriptor: int, data: memoryview, start: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not aligned for this disk")
        return real_write(descriptor, data, start)

    if refused == "open":
        monkeypatch.setattr(os, "open", no_open)
    else:
        monkeypatch.setattr(os, "pwrite", no_write)
    data = random.Random(1).randbytes(2 * BLOCK + 77)
    write(tmp_path / "file", [data])
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no filesystem in memory")
def test_a_filesystem_in_memory_serves_too() -> None:
    path = Path(f"/dev/shm/ckpt-direct-{os.getpid()}")
    try:
        write(path, [b"x" * (2 * BLOCK + 1)])
        assert path.read_bytes() == b"x" * (2 * BLOCK + 1)
    finally:
        path.unlink()


@contextmanager
def mounted(kind: str, folder: Path, *options: str) -> Iterator[Path]:
    """A filesystem of a kind, for as long as it is needed."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a filesystem of its own")
    folder.mkdir()
    done = subprocess.run(["mount", "-t", kind, *options, kind, folder], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"could not mount {kind}: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def writes_so_far() -> int:
    """How many system calls that write this process has made."""
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if "syscw" in line)


@pytest.mark.slow
def test_where_a_filesystem_reserves_no_room_every_byte_is_written_once(tmp_path: Path) -> None:
    with mounted("ramfs", tmp_path / "ramfs") as folder:
        before = writes_so_far()
        write(folder / "file", [b"x" * (4 * BLOCK)])
        assert writes_so_far() - before < 100  # and not one for every page
        assert (folder / "file").stat().st_size == 4 * BLOCK


@pytest.mark.slow
def test_where_a_filesystem_reserves_room_it_is_asked_to_and_no_more_is_kept(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "tmpfs", "-o", "size=200m") as folder:
        with open(folder / "file", "xb", buffering=0) as file:
            assert reserve(file.fileno(), 0, 5 * BLOCK)
        assert (folder / "file").stat().st_blocks * 512 >= 5 * BLOCK
        write(folder / "other", (b"x" * BLOCK for _ in range(3)))  # of a length that nobody knows beforehand
        assert (folder / "other").stat().st_size == 3 * BLOCK
        assert (folder / "other").stat().st_blocks * 512 == 3 * BLOCK


@pytest.mark.slow
def test_a_disk_that_is_too_small_is_noticed_before_it_is_written_full(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "tmpfs", "-o", "size=30m") as folder:
        before = writes_so_far()
        with pytest.raises(OSError, match="No space left"):
            LocalStorage(folder).write("file", [b"x" * (5 * BLOCK)])
        assert writes_so_far() - before < 3
        assert list(folder.iterdir()) == []
        LocalStorage(folder).write("file", (b"x" * BLOCK for _ in range(2)))


def test_an_error_of_the_disk_is_raised_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview, start: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        LocalStorage(tmp_path).write("file", [b"x" * (3 * BLOCK)])
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_whoever_gives_the_pieces_is_raised_and_nothing_is_left(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x" * (2 * BLOCK)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalStorage(tmp_path).write("file", pieces())
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_on_its_way_to_a_file_that_is_closed_because_somebody_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted, real_write = threading.Event(), os.pwrite
    begun: list[int] = []
    done: list[int] = []

    def slow(descriptor: int, data: memoryview, start: int) -> int:
        begun.append(start)
        assert interrupted.wait(60)
        time.sleep(0.1)
        written = real_write(descriptor, data, start)
        done.append(start)
        return written

    monkeypatch.setattr(os, "pwrite", slow)
    interrupt(lambda: write(tmp_path / "file", [b"x" * BLOCK]), interrupted.set)
    assert sorted(done) == sorted(begun)
