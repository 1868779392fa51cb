"""Azure and Google Cloud Storage as homes, on their emulators: tests/helpers/clouds.py names their limits."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from ckpt.storage import Storage, open_storage
from tests.helpers.clouds import (
    BUCKET,
    azure_environment,
    azurite,
    azurite_binary,
    gcs_emulator,
    gcs_environment,
)
from tests.helpers.storage_contract import StorageContract

_numbers = itertools.count()


@pytest.fixture(scope="session")
def azurite_account() -> Iterator[str]:
    if azurite_binary() is None:
        pytest.skip("Azurite is not installed: make test-clouds puts it into build/")
    with azurite() as connection:
        yield connection


@pytest.fixture(scope="session")
def gcs_address() -> Iterator[str]:
    with gcs_emulator() as url:
        yield url


@pytest.fixture
def az(azurite_account: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty root on Azurite."""
    for name, value in azure_environment(azurite_account).items():
        monkeypatch.setenv(name, value)
    return f"az://{BUCKET}/test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def gs(gcs_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty root on the emulator of GCS."""
    for name, value in gcs_environment(gcs_address).items():
        monkeypatch.setenv(name, value)
    return f"gs://{BUCKET}/test-{os.getpid()}-{next(_numbers)}"


class TestAzure(StorageContract):
    @pytest.fixture
    def storage(self, az: str) -> Storage:
        return open_storage(az)


class TestGcs(StorageContract):
    @pytest.fixture
    def storage(self, gs: str) -> Storage:
        return open_storage(gs)
