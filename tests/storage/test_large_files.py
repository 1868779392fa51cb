"""Files that are larger than a block or a buffer: every byte is in its place, and all are durable."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.storage import LocalStorage, StablePieces
from ckpt.storage.local import storage as local_storage
from ckpt.storage.local.files import BLOCK, write_durably
from ckpt.storage.local.storage import read_scattered
from ckpt.storage.multipart import split_into_parts

pytestmark = pytest.mark.on_disk


def write(path: Path, pieces: object) -> None:
    with open(path, "xb", buffering=0) as file:
        write_durably(file.fileno(), pieces)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [BLOCK, 3 * BLOCK + 4097])
def test_a_large_file_is_synced_after_its_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    done: list[tuple[str, int]] = []
    sync, pwrite = os.fsync, os.pwrite

    def synced(descriptor: int) -> None:
        sync(descriptor)
        done.append(("synced", os.fstat(descriptor).st_ino))

    def written(descriptor: int, data: memoryview, start: int) -> int:
        count = pwrite(descriptor, data, start)
        done.append(("written", os.fstat(descriptor).st_ino))
        return count

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "pwrite", written)
    LocalStorage(tmp_path).write("object", [b"x" * size])
    inode = (tmp_path / "object").stat().st_ino
    of_the_file = [what for what, which in done if which == inode]
    assert of_the_file.count("written") >= size // BLOCK
    assert of_the_file[-1] == "synced"


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize("direct", [True, False])
def test_a_disk_that_takes_less_than_it_is_given_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    pwrite, short = os.pwrite, 0

    def half(descriptor: int, data: memoryview, start: int) -> int:
        nonlocal short
        if is_direct(descriptor) and not direct:
            raise OSError(errno.EINVAL, "not aligned for this disk")
        if len(data) < 2 * 4096:
            return pwrite(descriptor, data, start)
        short += 1
        return pwrite(descriptor, data[: len(data) // 2 // 4096 * 4096], start)

    monkeypatch.setattr(os, "pwrite", half)
    data = random.Random(1).randbytes(2 * BLOCK + 12_345)
    write(tmp_path / "file", [data])
    assert short >= 3
    assert (tmp_path / "file").read_bytes() == data


def test_a_block_of_memory_is_refilled_only_when_the_slow_disk_has_written_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More blocks than there are buffers, and a disk that takes its time with the first."""
    pwrite, blocks = os.pwrite, 20

    def slowly(descriptor: int, data: memoryview, start: int) -> int:
        if start == 0:
            time.sleep(1.0)
        return pwrite(descriptor, data, start)

    def pieces() -> Iterator[bytes]:
        for number in range(blocks):
            yield bytes([number]) * BLOCK

    monkeypatch.setattr(os, "pwrite", slowly)
    write(tmp_path / "file", pieces())
    with open(tmp_path / "file", "rb") as file:
        for number in range(blocks):
            assert file.read(BLOCK) == bytes([number]) * BLOCK, f"block {number} has another's bytes"
        assert not file.read()


@pytest.fixture(scope="module")
def file() -> Iterator[tuple[int, bytes]]:
    data = random.Random(2).randbytes((12 << 20) + 777)
    with tempfile.NamedTemporaryFile() as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
        yield opened.fileno(), data


@pytest.mark.parametrize("start", [0, 1, 4096, 4097, 123_457])
@pytest.mark.parametrize("sizes", [[9 << 20], [100, 300_000, 1, 4 << 20, 5000]])
def test_bytes_past_the_cache_are_those_that_were_asked_for(
    file: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch, start: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(local_storage, "_is_cached", lambda *_: False)
    descriptor, data = file
    buffers = [bytearray(size) for size in sizes]
    assert read_scattered(descriptor, start, [memoryview(buffer) for buffer in buffers]) == 0
    assert b"".join(buffers) == data[start : start + sum(sizes)]


@pytest.mark.parametrize("cached", [True, False])
def test_bytes_that_are_not_there_are_counted(
    file: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    monkeypatch.setattr(local_storage, "_is_cached", lambda *_: cached)
    descriptor, data = file
    buffers = [bytearray(1 << 20), bytearray(1 << 20)]
    start = len(data) - (1 << 20) - 10
    assert read_scattered(descriptor, start, [memoryview(buffer) for buffer in buffers]) == (1 << 20) - 10
    assert b"".join(buffers)[: (1 << 20) + 10] == data[start:]


def test_more_buffers_than_the_system_takes_at_once_are_all_filled(file: tuple[int, bytes]) -> None:
    descriptor, data = file
    buffers = [bytearray(7) for _ in range(3000)]
    assert read_scattered(descriptor, 5, [memoryview(buffer) for buffer in buffers], cached=True) == 0
    assert b"".join(buffers) == data[5 : 5 + 21_000]


def test_a_system_that_reads_less_than_it_is_asked_for_is_asked_again(
    file: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def short(descriptor: int, buffers: list[memoryview], start: int) -> int:
        return preadv(descriptor, [buffers[0][: max(1, len(buffers[0]) // 3)]], start)

    monkeypatch.setattr(os, "preadv", short)
    descriptor, data = file
    buffers = [bytearray(1000), bytearray(20_000), bytearray(3)]
    assert read_scattered(descriptor, 9, [memoryview(buffer) for buffer in buffers], cached=True) == 0
    assert b"".join(buffers) == data[9 : 9 + 21_003]


def test_an_object_of_any_size_has_no_more_parts_than_a_store_takes() -> None:
    block = memoryview(bytes(64 << 20))
    parts = list(split_into_parts(StablePieces(48 * len(block), lambda: iter([block] * 48)), 256 << 10))
    sizes = [sum(map(len, part)) for part in parts]
    assert len(sizes) <= 10_000
    assert sum(sizes) == 48 * len(block)
    assert {size % (256 << 10) for size in sizes[:-1]} == {0}  # as GCS wants them


def test_a_stream_of_unknown_length_has_no_more_parts_than_a_store_takes() -> None:
    data = random.Random(1).randbytes(5_000_000)
    pieces = (data[at : at + 777] for at in range(0, len(data), 777))
    parts = [b"".join(part) for part in split_into_parts(pieces, 100)]
    assert b"".join(parts) == data
    assert len(parts) <= 10_000
    assert {len(part) for part in parts[:1000]} == {100}
