"""What ckpt does on macOS, for `pytest -p tests.helpers.macos`: `tests/test_macos.py` runs it."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.storage.leases import has_ended
from ckpt.util import memory_limit
from ckpt.util.threads import process_identity
from tests.helpers import macos


def test_linux_is_hidden() -> None:
    assert sys.platform == "darwin"
    assert not hasattr(os, "O_DIRECT")


def test_a_large_save_in_the_background_is_resumed_from(tmp_path: Path) -> None:
    """Above 64 MB it asks how much memory is free, which macOS does not tell in /proc."""
    model = torch.nn.Linear(4096, 5000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with ckpt.StateManager(tmp_path / "run", model=model, optimizer=optimizer) as manager:
        manager.resume()
        for _ in range(2):
            model(torch.ones(1, 4096)).sum().backward()
            optimizer.step()
            manager.step()
            manager.save_state()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with ckpt.StateManager(tmp_path / "run", model=model, optimizer=optimizer) as manager:
        restored = manager.resume()
    assert restored is not None
    assert restored.step == 2
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


def test_what_is_committed_has_left_the_cache_of_the_disk(tmp_path: Path) -> None:
    before = macos.full_syncs
    with ckpt.StateManager(tmp_path / "run", model=torch.nn.Linear(2, 2)) as manager:
        manager.save_state("a", wait=True)
    assert macos.full_syncs - before >= sum(path.is_file() for path in (tmp_path / "run/a").iterdir())


def test_a_disk_that_refuses_that_is_synced_as_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, command: int, *args: int) -> int:
        if command == macos.FULL_SYNC:
            raise OSError(errno.ENOTSUP, "Operation not supported")
        return 0

    synced: list[int] = []
    monkeypatch.setattr("fcntl.fcntl", refuse)
    monkeypatch.setattr("os.fsync", synced.append)
    with ckpt.StateManager(tmp_path / "run", model=torch.nn.Linear(2, 2)) as manager:
        manager.save_state("a", wait=True)
    assert synced


def test_snapshots_in_memory_are_off_and_it_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ckpt.StateManager(tmp_path / "run", model=torch.nn.Linear(2, 2), memory=ckpt.Memory(every=1)) as manager:
        manager.resume()
        for _ in range(3):
            manager.step()
        manager.save_state("a", wait=True)
    said = [record.getMessage() for record in caplog.records if "snapshots in memory" in record.getMessage()]
    assert said == [
        "snapshots in memory are off: only Linux has the shared memory that ckpt uses. ckpt saves to the root as usual."
    ]
    assert [one.name for one in ckpt.list_checkpoints(tmp_path / "run")] == ["a"]


def test_free_memory_is_known() -> None:
    assert 0 < memory_limit.spare() < 1 << 50


def test_a_process_is_told_from_one_that_has_ended() -> None:
    here = process_identity(os.getpid())
    assert here == process_identity(os.getpid())
    assert here[3] is not None
    ended = [*here[:2], 2**22 + 1, here[3]]
    assert has_ended({"note": "", "process": ended, "holder": "x", "sign": "y"})
