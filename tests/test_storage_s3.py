from __future__ import annotations

import pytest

from ckpt.storage import Storage, open_storage
from tests.storage_contract import StorageContract


class TestS3(StorageContract):
    @pytest.fixture
    def storage(self, s3: str) -> Storage:
        return open_storage(s3)


class TestFilesystem(StorageContract):
    """Any filesystem of fsspec. Its own of local files is one that is there."""

    @pytest.fixture
    def storage(self, tmp_path: object) -> Storage:
        return open_storage(f"local://{tmp_path}/made/when/needed")
