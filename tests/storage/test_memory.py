from __future__ import annotations

import itertools
import threading

import pytest

from ckpt.errors import ConflictError, LockedError
from ckpt.storage import MemoryStorage, Storage
from tests.helpers.storage_contract import StorageContract, sizes

_names = (f"test-{number}" for number in itertools.count())


class TestMemoryStorage(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return MemoryStorage(next(_names))

    def test_storages_of_one_name_share_their_objects_and_locks(self) -> None:
        name = next(_names)
        first, other = MemoryStorage(name), MemoryStorage(name + "/")
        first.write("object", [b"shared"])
        assert other.read("object") == b"shared"
        assert first.url == other.url == f"memory://{name}"
        with first.lock("key", note="the first"), pytest.raises(LockedError, match="the first"), other.lock("key"):
            pass

    def test_storages_of_other_names_share_nothing(self) -> None:
        first, other = MemoryStorage(next(_names)), MemoryStorage(next(_names))
        first.write("object", [b"mine"])
        assert sizes(other) == {}
        with first.lock("key"), other.lock("key"):
            pass

    def test_an_object_is_a_copy_of_its_pieces(self) -> None:
        storage = MemoryStorage(next(_names))
        piece = bytearray(b"before")
        storage.write("object", [piece])
        piece[:] = b"after!"
        assert storage.read("object") == b"before"

    def test_of_many_threads_that_replace_one_version_a_single_one_does(self) -> None:
        storage, together, refused = MemoryStorage(next(_names)), threading.Barrier(8), []
        storage.write("object", [bytes(16 << 20)])  # so large that other threads run while its version is computed
        version = storage.version("object")

        def replace(number: int) -> None:
            together.wait(60)
            try:
                storage.write("object", [b"%d" % number], over=version)
            except ConflictError:
                refused.append(number)

        threads = [threading.Thread(target=replace, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 7
        assert int(storage.read("object")) not in refused
