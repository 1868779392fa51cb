"""The storage of a folder in memory: the contract of any storage, and files that are overwritten in place."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ckpt.errors import FullError
from ckpt.storage import StablePieces, Storage
from ckpt.storage.local import volatile
from ckpt.storage.local.volatile import VolatileStorage
from tests.helpers.namespaces import with_tmpfs
from tests.helpers.storage_contract import StorageContract, sizes

LARGE = 2 << 20


@pytest.mark.on_disk  # a tmpfs may list no name for one that is being replaced
class TestVolatileStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return VolatileStorage(tmp_path / "slots")


@pytest.fixture
def storage(tmp_path: Path) -> VolatileStorage:
    return VolatileStorage(tmp_path)


def inode(folder: Path, key: str) -> int:
    return os.stat(folder / key).st_ino


def test_files_are_for_their_user_alone(storage: VolatileStorage, tmp_path: Path) -> None:
    storage.write("a/small", [b"x"])
    storage.write("a/large", [bytes(LARGE)])
    assert {stat.S_IMODE(os.stat(tmp_path / "a" / name).st_mode) for name in ("small", "large")} == {0o600}


def test_nothing_is_synced(storage: VolatileStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write("a/first", [b"x"])
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("synced"))
    with storage.grouped():
        storage.write("a/object", [b"x"])
        storage.write("a/large", [bytes(LARGE)])
    assert storage.read("a/object") == b"x"


def test_a_large_file_is_written_over_one_that_was_deleted(storage: VolatileStorage, tmp_path: Path) -> None:
    storage.write("a/model", [b"a" * LARGE])
    storage.write("a/optimizer", [b"b" * 2 * LARGE])
    before = {"model": inode(tmp_path, "a/model"), "optimizer": inode(tmp_path, "a/optimizer")}
    storage.delete(["a/model", "a/optimizer"])
    assert sizes(storage) == {}
    storage.write("b/optimizer", [b"c" * (2 * LARGE - 5)])
    storage.write("b/model", (piece for piece in [b"d" * LARGE, b"e"]))
    storage.write("b/other", [b"f" * (LARGE + 3)])
    assert inode(tmp_path, "b/optimizer") == before["optimizer"]
    assert inode(tmp_path, "b/other") == before["model"]
    assert storage.read("b/optimizer") == b"c" * (2 * LARGE - 5)
    assert storage.read("b/model") == b"d" * LARGE + b"e"
    assert storage.read("b/other") == b"f" * (LARGE + 3)


def test_a_file_with_another_name_is_not_overwritten(storage: VolatileStorage) -> None:
    storage.write("a/model", [b"a" * LARGE])
    storage.link("a/model", "b/model")
    storage.delete(["a/model"])
    storage.write("c/model", [b"c" * LARGE])
    assert storage.read("b/model") == b"a" * LARGE


def test_spares_are_given_back(storage: VolatileStorage, tmp_path: Path) -> None:
    storage.write("a/model", [bytes(LARGE)])
    storage.write("a/small", [b"x"])
    storage.delete(["a/model", "a/small"])
    assert len(os.listdir(tmp_path)) == 1
    storage.trim()
    assert os.listdir(tmp_path) == []


def test_a_sweep_gives_them_back_too(storage: VolatileStorage, tmp_path: Path) -> None:
    storage.write("a/model", [bytes(LARGE)])
    storage.delete(["a/model"])
    storage.sweep()
    assert os.listdir(tmp_path) == []


def test_pieces_are_written_by_several_threads_in_their_places(
    storage: VolatileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volatile, "_CHUNK", 1000)
    data = os.urandom(12_345)
    views = [memoryview(data)[start : start + 2_501] for start in range(0, len(data), 2_501)]
    storage.write("object", StablePieces(len(data), lambda: iter(views)))
    assert storage.read("object") == data


def _pieces(data: bytes, size: int) -> Iterator[memoryview]:
    return (memoryview(data)[start : start + size] for start in range(0, len(data), size))


def test_pieces_over_a_deleted_file_are_written_in_their_places(
    storage: VolatileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volatile, "_CHUNK", 300_000)
    for size in (3 * LARGE, 3 * LARGE - 12_345, 4 * LARGE):
        data = os.urandom(size)
        storage.write(f"{size}", StablePieces(size, partial(_pieces, data, 777_777)))
        assert storage.read(f"{size}") == data
        storage.delete([f"{size}"])


def test_an_error_of_the_pieces_is_the_one_that_is_raised(
    storage: VolatileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(4000))
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(volatile, "_CHUNK", 1000)
    with pytest.raises(RuntimeError, match="the device is gone"):
        storage.write("object", StablePieces(9000, pieces))
    assert sizes(storage) == {}


FULL = """
import os, sys
from ckpt.errors import FullError
from ckpt.storage import StablePieces
from ckpt.storage.local.volatile import VolatileStorage

storage = VolatileStorage(sys.argv[1])
small, large = bytearray(os.urandom(20 << 20)), memoryview(bytearray(os.urandom(80 << 20)))
pieces = lambda: (large[start : start + (8 << 20)] for start in range(0, len(large), 8 << 20))
storage.write("before/object", [small])
storage.write("removed/object", [small])
storage.delete(["removed/object"])
try:
    storage.write("object", StablePieces(len(large), pieces))
except FullError as error:
    print(error)
assert storage.read("before/object") == small
assert [entry.key for entry in storage.list()] == ["before/object"], [entry.key for entry in storage.list()]
storage.write("after/object", StablePieces(len(small), lambda: iter([memoryview(small)])))
assert storage.read("after/object") == small
"""


@pytest.mark.slow
def test_a_tmpfs_that_is_full_is_an_error_that_says_so_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    said = with_tmpfs(small, 64 << 20, "-c", FULL, str(small), cwd=tmp_path).run()
    assert "could not write" in said
    assert "No space left on device" in said


def test_a_full_tmpfs_is_an_error_where_pages_cannot_be_asked_for(
    storage: VolatileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(volatile, "_CHUNK", 1000)
    monkeypatch.setattr(volatile, "make_resident", lambda view: False)
    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(FullError, match="No space left on device"):
        storage.write("object", [bytes(5000)])
    assert sizes(storage) == {}
    assert list(storage.unfinished()) == []
