"""The storage that the documentation shows passes the contract of all storages; its format reads real files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.storage import Storage, open_storage
from tests.docs.pages import Runner, page
from tests.helpers.storage_contract import StorageContract

pytestmark = pytest.mark.slow


@pytest.fixture
def extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which the files of the page lie, installed as far as entry points go."""
    monkeypatch.chdir(tmp_path)
    Runner({}).run([block for block in page("extending.md") if block.title])
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("sqlite_storage", "npy_format"):
        sys.modules.pop(name, None)


class TestSqliteStorage(StorageContract):
    @pytest.fixture
    def storage(self, extended: Path) -> Storage:
        return open_storage(f"sqlite://{extended}/objects.db")


def test_an_installed_format_is_asked_last_and_checked(extended: Path) -> None:
    Path("weights").mkdir()
    weight = torch.randn(3, 5)
    np.save("weights/weight.npy", np.asfortranarray(weight.numpy()))
    np.save("weights/bias.npy", np.ones(3, np.float32))
    model = nn.Linear(5, 3)
    ckpt.load_model("weights", model)
    assert torch.equal(model.weight, weight)
    assert not ckpt.diff("weights", "weights").differences
    with pytest.raises(ckpt.ConfigError, match="can't read the format of weights"):
        ckpt.merge("weights", "model.safetensors", part="optimizer")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x02\x00\xff\xff\xff\xff"])
def test_a_damaged_file_of_that_format_is_named(extended: Path, content: bytes) -> None:
    Path("weights").mkdir()
    Path("weights/weight.npy").write_bytes(content)
    with pytest.raises(ckpt.DamagedError, match=r"weights/weight\.npy is no \.npy file"):
        ckpt.load_model("weights", nn.Linear(5, 3))


def test_tensors_of_an_installed_format_that_lack_something_are_refused(
    extended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import npy_format  # type: ignore[import-not-found]

    from ckpt.formats.pieces import PiecedTensor

    def lacking(folder: Any, part: str) -> dict[str, PiecedTensor]:
        return {"weight": PiecedTensor(torch.float32, (3, 5), ())}

    monkeypatch.setattr(npy_format, "open_npy", lacking)
    Path("weights").mkdir()
    Path("weights/notes.txt").write_text("something")
    with pytest.raises(ckpt.DamagedError, match="weights is incomplete: weight"):
        ckpt.merge("weights", "model.safetensors")
