"""One run at a time writes to a root; `ckpt prune` makes it wait, and never fail."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ckpt
from ckpt.root import lock
from ckpt.root.lock import lock_root
from ckpt.storage import Storage
from tests.helpers.processes import DEADLINE


def test_a_second_run_is_refused_at_once_and_told_what_to_do(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lock, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it waits"))
    )
    with ExitStack() as first, ExitStack() as second:
        lock_root(storage, first)
        with pytest.raises(ckpt.LockedError, match=r"another run writes to .*process \d+ on .* another root"):
            lock_root(storage, second)


def test_the_root_is_free_again_when_the_stack_is_closed(storage: Storage) -> None:
    for _ in range(2):
        with ExitStack() as held:
            lock_root(storage, held)


def test_a_run_waits_for_a_prune(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as pruning, ExitStack() as run:
        lock_root(storage, pruning, to_prune=True)
        waits = threading.Event()
        monkeypatch.setattr(lock, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: waits.set()))

        def end() -> None:
            waits.wait(DEADLINE)
            pruning.close()

        ending = threading.Thread(target=end)
        ending.start()
        lock_root(storage, run)
        assert waits.is_set()
        ending.join()


def test_a_prune_waits_for_nobody(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lock, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it waits"))
    )
    for to_prune in (False, True):
        with ExitStack() as held, ExitStack() as pruning:
            lock_root(storage, held, to_prune=to_prune)
            with pytest.raises(ckpt.LockedError):
                lock_root(storage, pruning, to_prune=True)


def test_a_run_does_not_wait_for_a_prune_without_end(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_PATIENCE", 0.1)
    with ExitStack() as pruning, ExitStack() as run:
        lock_root(storage, pruning, to_prune=True)
        with pytest.raises(ckpt.LockedError, match="ckpt prune, process"):
            lock_root(storage, run)


@pytest.mark.not_on_s3("a lease is asked for when the root is taken")
def test_a_resume_from_a_root_that_another_run_has_changes_nothing(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with ckpt.StateManager(tmp_path, model=model) as manager:
        manager.save_state("first", wait=True)
        before = other.weight.detach().clone()
        with pytest.raises(ckpt.LockedError, match="another run writes to"):
            ckpt.StateManager(tmp_path, model=other).resume()
    assert torch.equal(other.weight, before)
    assert not torch.equal(other.weight, model.weight)
