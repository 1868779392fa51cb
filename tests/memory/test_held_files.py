"""Files whose memory the keeper holds: the contract of every storage, and what becomes of the memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ckpt.errors import AbsentError, StorageError, TransientError
from ckpt.memory import slot_storage
from ckpt.memory.keeper import HELD, HeldFiles
from ckpt.storage import LocalStorage, StablePieces, Storage
from ckpt.storage.local import volatile
from ckpt.storage.local.volatile import VolatileStorage
from tests.helpers.storage_contract import StorageContract, sizes
from tests.memory.deserted import wait_until

LARGE = b"x" * (100 << 10)


class Holding(HeldFiles):
    """What a keeper does, in a thread of this process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        super().__init__(str(folder))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tend)
        self._thread.start()

    def _tend(self) -> None:
        while not self._ended.wait(0.001):
            self.tend()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def end(self) -> None:
        """As the end of its process."""
        self.stop()
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Holding]:
    keeper = Holding(tmp_path / HELD)
    yield keeper
    keeper.end()


@pytest.fixture
def storage(tmp_path: Path, keeper: Holding) -> VolatileStorage:
    return VolatileStorage(tmp_path / "slots", partial(slot_storage._hold, tmp_path / HELD))


@pytest.mark.on_disk  # a tmpfs may list no name for one that is being replaced
class TestHeldStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path, keeper: Holding, monkeypatch: pytest.MonkeyPatch) -> Storage:
        monkeypatch.setattr(volatile, "_LARGE", 1)
        monkeypatch.setattr(LocalStorage, "_kind", volatile._MemoryTree)  # for those that are opened by their URL
        return VolatileStorage(tmp_path / "slots", partial(slot_storage._hold, tmp_path / HELD))


def test_large_files_alone_are_held_and_for_their_user_alone(storage: VolatileStorage, tmp_path: Path) -> None:
    storage.write("a/large", [LARGE])
    storage.write("a/stream", iter([b"of a size", b"that is not known"]))
    storage.write("a/small", [b"x"])
    folder = tmp_path / "slots/a"
    assert {path.name for path in folder.iterdir() if path.is_symlink()} == {"large", "stream"}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert sizes(storage) == {"a/large": len(LARGE), "a/stream": 26, "a/small": 1}


def test_the_memory_of_a_removed_file_is_used_again_and_freed_when_asked(
    storage: VolatileStorage, keeper: Holding
) -> None:
    storage.write("a", [LARGE])
    held = dict(keeper.descriptors)
    storage.delete(["a"])
    storage.write("b", [LARGE[:-1]])
    assert keeper.descriptors == held
    assert storage.read("b") == LARGE[:-1]
    storage.delete(["b"])
    storage.trim()
    wait_until(lambda: not keeper.descriptors, "it is free")


def test_a_file_with_two_names_is_held_once_and_until_the_last_is_gone(
    storage: VolatileStorage, keeper: Holding
) -> None:
    storage.write("a", [LARGE])
    storage.link("a", "b")
    storage.delete(["a"])
    storage.write("c", [LARGE[::-1]])
    time.sleep(0.05)
    assert len(keeper.descriptors) == 2
    assert storage.read("b") == LARGE


def test_a_reserved_file_is_held_and_gets_its_name_without_another_copy(
    storage: VolatileStorage, keeper: Holding
) -> None:
    descriptor, file = storage.reserve(len(LARGE))
    os.pwrite(descriptor, LARGE, 0)
    os.close(descriptor)
    storage.write("a", StablePieces(len(LARGE), lambda: iter([memoryview(LARGE)]), file))
    assert len(keeper.descriptors) == 1
    assert storage.read("a") == LARGE
    storage.give_up(file)
    assert sizes(storage) == {"a": len(LARGE)}


@pytest.mark.slow
def test_what_a_killed_writer_has_asked_for_is_freed(tmp_path: Path, keeper: Holding) -> None:
    child = os.fork()
    if not child:
        descriptor = os.memfd_create("ckpt")
        os.symlink(f"/proc/{os.getpid()}/fd/{descriptor}", tmp_path / HELD / "token.asked")
        wait_until(lambda: os.path.lexists(tmp_path / HELD / "token"), "it is held")
        os._exit(0)
    os.waitpid(child, 0)
    wait_until(lambda: not keeper.descriptors and not os.listdir(tmp_path / HELD), "nothing is left")


def test_nothing_but_memory_of_ckpt_is_held(tmp_path: Path, keeper: Holding) -> None:
    (tmp_path / "file").touch()
    (tmp_path / HELD / "token.asked").symlink_to(tmp_path / "file")
    wait_until(lambda: not os.listdir(tmp_path / HELD), "it is refused")
    assert not keeper.descriptors


class TestAKeeperThatIsGone:
    def test_nothing_can_be_read_and_its_names_can_be_removed(self, storage: VolatileStorage, keeper: Holding) -> None:
        storage.write("a", [LARGE])
        keeper.end()
        with pytest.raises(AbsentError):
            storage.read("a")
        storage.delete(["a"])
        assert sizes(storage) == {}

    def test_a_write_is_an_error_that_leaves_nothing(
        self, storage: VolatileStorage, keeper: Holding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slot_storage, "_PATIENCE", 0.1)
        keeper.stop()
        with pytest.raises(TransientError, match=r"did not answer for 0\.1 s"):
            storage.write("a", [LARGE])
        assert sizes(storage) == {}
        assert list((tmp_path / HELD).iterdir()) == []

    def test_a_file_that_has_its_number_now_is_not_written_to(
        self, storage: VolatileStorage, keeper: Holding, tmp_path: Path
    ) -> None:
        storage.write("a", [LARGE])
        storage.delete(["a"])
        [number] = keeper.descriptors.values()
        keeper.stop()
        (tmp_path / "other").write_bytes(b"of somebody")
        with open(tmp_path / "other", "r+b") as other:
            os.dup2(other.fileno(), number)
        storage = VolatileStorage(tmp_path / "slots")
        storage.write("b", [LARGE])
        assert (tmp_path / "other").read_bytes() == b"of somebody"
        assert storage.read("b") == LARGE


def test_memory_that_cannot_be_reached_through_its_holder_is_refused_and_leaves_no_name(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "held"
    other.write_bytes(b"another file")
    path.symlink_to(other)
    with open(__file__, "rb") as file, pytest.raises(StorageError, match=f"through {other}"):
        slot_storage._check(path, file.fileno())
    assert not os.path.lexists(path)
