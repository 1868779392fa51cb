"""Checkpoints on the Hub: the real client, against a server that stands in for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.storage import HubStorage, Storage
from tests.hub_server import HubServer, serving
from tests.storage_contract import StorageContract


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving(tmp_path, monkeypatch) as server:
        yield server


class TestHubStorage(StorageContract):
    @pytest.fixture
    def storage(self, hub: HubServer) -> Storage:
        return HubStorage("me/runs/some/path", interval=0)
