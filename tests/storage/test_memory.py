from __future__ import annotations

import itertools

import pytest

from ckpt.errors import LockedError
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
