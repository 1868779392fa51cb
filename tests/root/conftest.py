"""What the tests of a root share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.storage import LocalStorage, MemoryStorage, Storage

_numbers = itertools.count()


@pytest.fixture(params=["folder", "memory"])
def new_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Storage]:
    """Makes empty roots, in a folder or in memory."""

    def make() -> Storage:
        number = next(_numbers)
        return LocalStorage(tmp_path / str(number)) if request.param == "folder" else MemoryStorage(f"root-{number}")

    return make


@pytest.fixture
def storage(new_storage: Callable[[], Storage]) -> Storage:
    """An empty root, in a folder or in memory."""
    return new_storage()
