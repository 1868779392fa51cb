"""The garbage collector is paused while snapshots are laid out, in no other process and for no longer."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.save.snapshot.snapshots import Snapshots
from ckpt.util import threads
from ckpt.util.threads import gc_paused


def test_the_last_of_several_threads_enables_it_again() -> None:
    inside, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with gc_paused():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=pause)
    with gc_paused():
        thread.start()
        inside.wait(60)
        assert not gc.isenabled()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_it_is_disabled_within_one_pause_and_within_the_rest_of_the_outer_of_two() -> None:
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_threads_that_begin_or_end_a_pause_wait_for_each_other() -> None:
    inside, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with gc_paused():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=pause)
    with threads._lock:
        thread.start()
        assert not inside.wait(0.1)
    assert inside.wait(60)
    with threads._lock:
        leave.set()
        thread.join(0.1)
        assert not gc.isenabled()
    thread.join()
    assert gc.isenabled()


def test_a_collector_that_the_program_has_disabled_stays_so() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_child_that_is_forked_meanwhile_collects_garbage() -> None:
    with gc_paused():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_snapshot_is_laid_out_without_collections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    seen: list[bool] = []
    take = Snapshots.take

    def watched(self: Snapshots, *arguments: Any) -> Any:
        seen.append(gc.isenabled())
        return take(self, *arguments)

    monkeypatch.setattr(Snapshots, "take", watched)
    with ckpt.StateManager(tmp_path, model=model) as manager:
        manager.save_state()
        manager.wait()
        assert gc.isenabled()
    assert seen == [False]
